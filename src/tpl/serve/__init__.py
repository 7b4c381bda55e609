"""The HTTP server: one model that answers queries while it learns new tasks.

app.py has the routes, server.py the parts they share, model.py the model and its batched queries, jobs.py the tasks to
learn and worker.py the process that learns them, security.py access, uploads.py files and their limits,
label_studio.py a backend for Label Studio.
"""
