"""The `tpl` command: parses, calls one function below, prints.

A group of commands is one module here. To add one, write its functions with `@app.command()` and name the
module below; torch, timm and matplotlib belong inside the functions (see `app.py`).
"""

from importlib import import_module

from tpl.cli.app import app, main

for _name in ("bench", "reproduce", "about"):  # in the order of `tpl --help`
    import_module(f"tpl.cli.{_name}")

__all__ = ["app", "main"]
