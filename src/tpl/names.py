"""Checks of names that a user may mistype, without importing torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from tpl.errors import TplError
from tpl.outline import method_outlines

SHOWN = 20  # names of a long list
LIKE = 0.7  # similarity from which a name was likely meant: owl is not cow


def refuse_unknown(what: str, name: str, known: Iterable[str]) -> None:
    """Raise an error with the name that was likely meant and the known ones, unless `name` is one of them."""
    known = list(known)
    if name in known:
        return
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    names = f"{', '.join(known[:SHOWN])}{more}" if known else "none yet"
    meant = close_to(name, known)
    if meant is None:
        raise TplError(f"There is no {what} '{name}'; there are {names}.")
    raise TplError(f"There is no {what} '{name}'. Did you mean '{meant}'? There are {names}.")


def close_to(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` is most like, whatever its case; None if there is none like it."""
    plain, wanted = {each.casefold(): each for each in known}, name.casefold()
    swapped = [each for each in plain if sorted(each) == sorted(wanted)]  # letters in another order: tlp for tpl
    found = swapped or get_close_matches(wanted, plain, n=1, cutoff=LIKE)
    return plain[found[0]] if found else None


def method_names() -> tuple[str, ...]:
    """The names of all methods of the package, sorted."""
    return tuple(method_outlines())
