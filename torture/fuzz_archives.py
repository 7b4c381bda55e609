"""Zips of class folders with a few bytes changed, read as `tpl learn`, `tpl predict` and the server read them."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

from torture.fuzz import Case, run_attempts
from torture.fuzz_images import some
from torture.mutations import mutated_bytes
from torture.tally import Tally
from tpl import TplError
from tpl.serve.uploads import Limits, check_archive, check_images
from tpl.stream import find_images, labelled_images

NAMES = (
    "cat/1.png",
    "cat/2.png",
    "dog/1.png",
    "dog/2.png",
    "train/cat/1.png",
    "../x/1.png",
    "a\\b\\1.png",
    "é/ü.png",
    "/",
)


def run(seed: int, cases: int, place: Path) -> Tally:
    """Open changed zips and read what is in them."""
    file = place / "classes.zip"

    def attempt(draw: random.Random) -> str:
        file.write_bytes(mutated_bytes(_zip(draw), draw))
        Case.text = f"{file.stat().st_size} bytes"
        refused = 0
        for read in (_learn, _predict, _serve):
            try:
                read(file)
            except TplError:
                refused += 1
        return f"{3 - refused} of 3 readers took it"

    return run_attempts(Tally("archives", seed), cases, attempt)


def _zip(draw: random.Random) -> bytes:
    buffer = io.BytesIO()
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name in draw.sample(NAMES, draw.randint(1, 6)):
            archive.writestr(name, some(draw, ("PNG", "L")))
    return buffer.getvalue()


def _learn(file: Path) -> None:
    found = labelled_images(file)
    for index in range(min(len(found.images), 5)):
        found.images.load(index)


def _predict(file: Path) -> None:
    for found in find_images([str(file)]):
        try:
            found.read()
        except TplError:
            continue


def _serve(file: Path) -> None:
    limits = Limits()
    check_archive(file, limits)
    check_images(file, limits)
