"""Runs many hostile inputs: none may end in a traceback, take more than 10 seconds or more than 512 MiB."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torture.tally import MEBIBYTES, Tally, forget_peak, peak, within
from tpl import TplError

Attempt = Callable[[random.Random], str]  # makes a case, tries it, and returns what happened


class Case:
    """What the current case is, for the report of a failure."""

    text = ""


def run_attempts(tally: Tally, cases: int, attempt: Attempt) -> Tally:
    """Try that many cases, each with random numbers of its own: a failure is repeated by its number alone."""
    base = forget_peak()
    most = 0
    for number in range(tally.cases, tally.cases + cases):
        draw = random.Random(f"{tally.seed} {tally.name} {number}")
        try:
            with within():
                tally.counts[attempt(draw)] += 1
        except TplError:
            tally.counts["refused"] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            tally.fail(f"case {number} ({Case.text}): {type(error).__name__} at {place}: {str(error)[:200]}")
        above = peak() - base
        most = max(most, above)
        if above > MEBIBYTES:
            tally.fail(f"case {number} ({Case.text}): {above} MiB more than before")
            base = forget_peak()
    tally.notes["MiB above idle"] = max(most, tally.notes.get("MiB above idle", 0))
    return tally


@contextmanager
def described(text: str) -> Iterator[None]:
    """Name the case."""
    Case.text = text
    yield
