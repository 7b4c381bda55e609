"""The server: one model behind HTTP, which answers while it learns.

app.py ties the parts together: security.py says who may ask, limits.py how much, batching.py lets requests share
a forward pass, jobs.py and worker.py learn new tasks in a process of their own, served.py holds the model.
"""
