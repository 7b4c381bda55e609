"""How answers about images are printed: for people, for programs, for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tpl.cli.model_words import percent, printable

if TYPE_CHECKING:
    from tpl.answers import Answer
    from tpl.bulk import Answered

UNKNOWN = "unknown"


class Form:
    """How answers are printed; `top` is how many classes of each image are asked for."""

    usual_top = 1

    def __init__(self, top: int | None, reject: float | None) -> None:
        self.top, self.reject = top or self.usual_top, reject

    def lines(self, part: Answered, first: bool) -> Iterator[str]:
        """A line for every image of a batch."""
        answers = iter(part.answers)
        for name, error in zip(part.names, part.errors, strict=True):
            yield self._error(name, error) if error is not None else self._answer(name, next(answers))

    def _answer(self, name: str, answer: Answer) -> str:
        raise NotImplementedError

    def _error(self, name: str, error: str) -> str:
        raise NotImplementedError

    def _rejected(self, answer: Answer) -> bool:
        return self.reject is not None and answer.rejected(self.reject)


class TextForm(Form):
    """For people."""

    def _answer(self, name: str, answer: Answer) -> str:
        best = f"{answer.name} {percent(answer.probability)}"
        if self._rejected(answer):
            said = f"{UNKNOWN} ({answer.unknown:.2f}); of the known classes {best}, task {answer.task}"
        else:
            said = f"{best}, task {answer.task}, unknown {answer.unknown:.2f}"
        others = ", ".join(f"{other} {percent(p)}" for other, p in answer.top[1:])
        return printable(f"{name}: {said}{'; then ' if others else ''}{others}") + "\n"

    def _error(self, name: str, error: str) -> str:
        return printable(f"error: {error}") + "\n"  # which names the image


class JsonForm(Form):
    """For programs: one object a line."""

    usual_top = 5

    def _answer(self, name: str, answer: Answer) -> str:
        rejected = self._rejected(answer)
        content = {"path": name} | answer.to_dict()
        if self.reject is not None:
            content |= {"class": None if rejected else answer.name, "rejected": rejected}
        return _object(content)

    def _error(self, name: str, error: str) -> str:
        return _object({"path": name, "error": error})


class CsvForm(Form):
    """For spreadsheets."""

    def lines(self, part: Answered, first: bool) -> Iterator[str]:
        """And a line of column names before the first."""
        more = [f"{column}_{rank}" for rank in range(2, self.top + 1) for column in ("class", "probability")]
        if first:
            yield self._row("path", "class", "probability", "task", "unknown", "rejected", "error", *more)
        yield from super().lines(part, first)

    def _answer(self, name: str, answer: Answer) -> str:
        rejected = self._rejected(answer)
        mark = "" if self.reject is None else str(rejected).lower()
        chosen = UNKNOWN if rejected else answer.name
        more = [cell for other, p in answer.top[1:] for cell in (other, f"{p:.6f}")]
        return self._row(
            name, chosen, f"{answer.probability:.6f}", answer.task, f"{answer.unknown:.6f}", mark, "", *more
        )

    def _error(self, name: str, error: str) -> str:
        return self._row(name, "", "", "", "", "", error)

    def _row(self, *cells: str) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow([_encodable(cell) for cell in cells])
        return text.getvalue()


def _object(content: dict[str, Any]) -> str:
    text = json.dumps(content, ensure_ascii=False)
    if _encodable(text) != text:  # a file name that is no UTF-8: as \udcXX, it is the same name when read back
        text = json.dumps(content)
    return text + "\n"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
