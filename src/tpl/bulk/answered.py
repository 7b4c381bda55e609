"""What is said of a batch of images, and saying it here."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass

from tpl.answers import Answer
from tpl.learner import Learner
from tpl.stream import Batch, Found, batches


@dataclass(frozen=True)
class Answered:
    """Images by name; `errors` has a reason for each that cannot be read, `answers` has one for each of the others."""

    names: tuple[str, ...]
    errors: tuple[str | None, ...]
    answers: tuple[Answer, ...]


def answer(learner: Learner, batch: Batch, top: int) -> Answered:
    """What a learner says of images that are ready."""
    said = learner.answers_of(batch.pixels, top) if len(batch.pixels) else []
    return Answered(batch.names, batch.errors, tuple(said))


def answer_here(learner: Learner, found: Iterable[Found], size: int, top: int) -> Generator[Answered]:
    """What a learner says of found images, `size` of them at a time."""
    with closing(batches(found, learner.method.preprocess, size)) as ready:
        for batch in ready:
            yield answer(learner, batch, top)
