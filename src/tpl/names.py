"""Checks of names that a user may mistype, without importing torch, which takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tpl.errors import TplError

MAX_NAME = 1000  # characters of a class or a task


def refuse_unknown(what: str, name: str, known: Iterable[str]) -> None:
    """Raise an error that lists the known names, unless `name` is one of them."""
    known = list(known)
    if name not in known:
        raise TplError(f"There is no {what} '{name}'; there are {', '.join(known)}.")


def check_stored_names(what: str, names: Iterable[str]) -> None:
    """Refuse names that a model directory cannot hold: empty or endless ones, and file names that are no text."""
    for name in names:
        if not name.strip() or len(name) > MAX_NAME:
            raise TplError(f"The {what} '{name[:40]}' must have between 1 and {MAX_NAME} characters.")
        if any("\ud800" <= sign <= "\udfff" for sign in name):
            raise TplError(f"The {what} {name!a} is no text in UTF-8; rename its folder.")


@cache
def method_names() -> tuple[str, ...]:
    """The names of all methods of the package, sorted: parsed from their files, none of which is imported."""
    files = (Path(__file__).parent / "methods").glob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return tuple(sorted(name for tree in trees for node in tree.body for name in _registered(node)))


def _registered(node: ast.stmt) -> list[str]:
    """The value of `name = "..."` in a class with `@register`."""
    marks = node.decorator_list if isinstance(node, ast.ClassDef) else []
    if not isinstance(node, ast.ClassDef) or not any(isinstance(m, ast.Name) and m.id == "register" for m in marks):
        return []
    return [
        str(line.value.value)
        for line in node.body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant) and _names(line.targets[0], "name")
    ]


def _names(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name
