"""Checks of names that a user may mistype, without importing torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable

from tpl.errors import TplError
from tpl.outline import method_outlines

MAX_NAME = 1000  # characters of a class or a task


def refuse_unknown(what: str, name: str, known: Iterable[str]) -> None:
    """Raise an error that lists the known names, unless `name` is one of them."""
    known = list(known)
    if name not in known:
        raise TplError(f"There is no {what} '{name}'; there are {', '.join(known)}.")


def check_stored_names(what: str, names: Iterable[str]) -> None:
    """Refuse names that a model directory cannot hold: empty or endless ones, and file names that are no text."""
    for name in names:
        if not name.strip():
            raise TplError(f"The name of a {what} is empty.")
        if len(name) > MAX_NAME:
            raise TplError(f"The {what} '{name[:40]}...' has more than {MAX_NAME} characters; shorten its name.")
        if any("\ud800" <= sign <= "\udfff" for sign in name):
            raise TplError(f"The {what} {name!a} is no text in UTF-8; rename its folder.")


def method_names() -> tuple[str, ...]:
    """The names of all methods of the package, sorted."""
    return tuple(method_outlines())
