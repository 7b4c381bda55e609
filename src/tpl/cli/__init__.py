"""The `tpl` command: parses, calls one function below, prints.

Each module holds a group of commands, registered with `@app.command()`. To add a group, write its module and name it
below; import torch, timm and matplotlib inside the functions (see `app.py`).
"""

from importlib import import_module

from tpl.cli.app import app, main

# In the order of `tpl --help`.
for _name in (
    "learn",
    "predict",
    "models",
    "versions",
    "merge",
    "advice",
    "evaluate",
    "serve",
    "export",
    "bench",
    "report",
    "suite",
    "study",
    "figure",
    "reproduce",
    "about",
):
    import_module(f"tpl.cli.{_name}")

__all__ = ["app", "main"]
