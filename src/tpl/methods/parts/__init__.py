"""Building blocks that several methods share.

network.py     one network with adapters and a growing head, its losses, and the method around it
rehearsal.py   a memory of old images, class-balanced training, reservoir sampling
distill.py     distillation from teachers
expansion.py   a feature extractor for every task
ridge.py       ridge regression on random features
"""
