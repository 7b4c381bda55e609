"""The `tpl` command: parses, calls one function below, prints.

A group of commands is one module here. To add one, write its functions with `@app.command()` and name the
module below; torch, timm and matplotlib belong inside the functions (see `app.py`).
"""

from importlib import import_module

from tpl.cli.app import app, main

# In the order of `tpl --help`.
for _name in (
    "model_learn",
    "model_predict",
    "model",
    "model_evaluate",
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
