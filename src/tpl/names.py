"""Checks of names that a user may mistype, without importing torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable

from tpl.errors import TplError
from tpl.outline import method_outlines


def refuse_unknown(what: str, name: str, known: Iterable[str]) -> None:
    """Raise an error that lists the known names, unless `name` is one of them."""
    known = list(known)
    if name not in known:
        raise TplError(f"There is no {what} '{name}'; there are {', '.join(known)}.")


def method_names() -> tuple[str, ...]:
    """The names of all methods of the package, sorted."""
    return tuple(method_outlines())
