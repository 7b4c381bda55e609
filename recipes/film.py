"""Film a real session of tpl in a terminal as an animated SVG of 15 seconds: docs/images/film.svg.

python recipes/film.py                       # two minutes on two cores; the images ship with scikit-learn
python recipes/film.py --session FILE        # from the commands and outputs that --save FILE kept

The session learns two digits, then two more, and asks about an old one, and about a flower. The text is
what the commands print on standard output; reports of progress and the waiting are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from textwrap import wrap

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "images" / "film.svg"
NAMES = "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"
DAYS = {"monday": (0, 1), "tuesday": (2, 3)}
COMMANDS = (
    "tpl learn model monday/",
    "tpl predict model zero.png",
    "rm -r monday/",
    "tpl learn model tuesday/",
    "tpl predict model zero.png",
    "tpl predict model flower.jpg --reject 0.05",
)
NOTES = (
    "monday: pictures of zero and one",
    "",
    "tuesday: two and three; monday's folder is gone",
    "",
    "monday's zero, long gone, is still known",
    "a flower was never learned",
)
SECONDS = 15.0
TYPING, READING, WAITING, END = 0.035, 0.75, 0.6, 2.2  # seconds: a letter, an output, a command at work, the end
COLUMNS, ROWS = 60, 24  # of the terminal: narrow enough to be read on a phone; what is above scrolls away
LINE, LETTER, MARGIN, TOP = 19, 8.05, 22, 52  # pixels
COLOURS = {"prompt": "#7fd1ae", "command": "#f2f5f7", "output": "#b9c4cd", "note": "#7d8b97", "answer": "#ffd479"}


@dataclass(frozen=True)
class Step:
    """A command and what it printed."""

    command: str
    output: str


def write_pictures(folder: Path, images: int) -> None:
    """Class folders for both days, and pictures to ask about."""
    digits = load_digits()

    def save(digit: int, number: int, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(digits.images[digits.target == digit][number] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC).save(file)

    for day, classes in DAYS.items():
        for digit in classes:
            for number in range(images):
                save(digit, number, folder / day / NAMES[digit] / f"{number}.png")
    save(0, 150, folder / "zero.png")
    Image.fromarray(load_sample_image("flower.jpg")).resize((320, 213)).save(folder / "flower.jpg")


def record(folder: Path, images: int) -> list[Step]:
    """Run the commands one after the other."""
    write_pictures(folder, images)
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "TPL_OFFLINE": "1"}
    steps = []
    for command in COMMANDS:
        program, *words = command.split()
        called = [sys.executable, "-m", "tpl", *words] if program == "tpl" else [program, *words]
        done = subprocess.run(called, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        steps.append(Step(command, done.stdout.rstrip()))
    return steps


def check(steps: Sequence[Step]) -> None:
    """The session must show what the film says: the same answer before and after, and a rejected image."""
    before, after, unknown = (step.output for step in steps if step.command.startswith("tpl predict"))
    if not (before.startswith("zero.png: zero") and after.startswith("zero.png: zero")):
        raise SystemExit(f"The old class is not recognised: {before!r}, then {after!r}.")
    if not unknown.startswith("flower.jpg: unknown ("):
        raise SystemExit(f"The unknown image is not rejected: {unknown!r}.")


@dataclass(frozen=True)
class Piece:
    """Some letters, and when they appear."""

    text: str
    kind: str
    row: int
    column: int
    seconds: float


def pieces_of(steps: Sequence[Step]) -> list[Piece]:
    """The whole session, on a time line that is stretched or shortened to the film's length."""
    pieces, row, now = [], 0, 0.4
    for number, step in enumerate(steps):
        if NOTES[number]:
            pieces.append(Piece(f"# {NOTES[number]}", "note", row, 0, now))
            row, now = row + 1, now + 0.5
        pieces.append(Piece("$", "prompt", row, 0, now))
        for column, letter in enumerate(step.command):
            now += TYPING
            pieces.append(Piece(letter, "command", row, 2 + column, now))
        now += WAITING
        for line in chain.from_iterable(wrap(each, COLUMNS) or [""] for each in step.output.splitlines()):
            row += 1
            answer = step.command.startswith("tpl predict")
            pieces.append(Piece(line.rstrip(), "answer" if answer else "output", row, 0, now))
            now += 0.06
        row, now = (row + 2, now + READING) if step.output else (row + 1, now)
    stretch = (SECONDS - END) / now
    return [Piece(p.text, p.kind, p.row, p.column, p.seconds * stretch) for p in pieces]


def svg_of(steps: Sequence[Step]) -> str:
    """The film: every piece of text becomes visible at its time, again and again."""
    pieces = [piece for piece in pieces_of(steps) if piece.text.strip()]
    width, height = round(2 * MARGIN + LETTER * COLUMNS), TOP + LINE * ROWS + MARGIN
    times = sorted({round(piece.seconds, 2) for piece in pieces})
    names = {seconds: f"t{number}" for number, seconds in enumerate(times)}
    rules = [
        f".{name}{{animation-name:{name}}}"
        f"@keyframes {name}{{0%{{fill-opacity:0}}{100 * seconds / SECONDS:.2f}%,100%{{fill-opacity:1}}}}"
        for seconds, name in names.items()
    ]
    style = (
        "text{font:13.4px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        f"animation:{SECONDS:g}s step-end infinite}}"
        + "".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
        + ".command{font-weight:600}"
        + "".join(rules)
        + scrolling(pieces)
        + "@media(prefers-reduced-motion:reduce){text,.scroll{animation:none}}"
    )
    texts = [
        f'<text class="{piece.kind} {names[round(piece.seconds, 2)]}" x="{MARGIN + LETTER * piece.column:.1f}" '
        f'y="{TOP + LINE * (piece.row + 1) - 5}" textLength="{LETTER * len(piece.text):.1f}">'
        f"{escape(piece.text)}</text>"
        for piece in pieces
    ]
    label = escape("A terminal session. " + " ".join(f"{s.command}: {' '.join(s.output.split())}" for s in steps), True)
    dots = "".join(
        f'<circle cx="{MARGIN + 6 + 20 * i}" cy="24" r="6" fill="{colour}"/>'
        for i, colour in enumerate(("#ee6a5f", "#f5bd4f", "#61c454"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{label}"><style>{style}</style>'
        f'<rect width="{width}" height="{height}" rx="10" fill="#16202a"/>{dots}'
        f'<svg y="{TOP}" width="{width}" height="{height - TOP}" viewBox="0 {TOP} {width} {height - TOP}">'
        f'<g class="scroll">{"".join(texts)}</g></svg></svg>\n'
    )


def scrolling(pieces: Sequence[Piece]) -> str:
    """Style rules that move the text up whenever a new line would be below the terminal's last row."""
    moves, lowest = [(0.0, 0)], ROWS - 1
    for piece in sorted(pieces, key=lambda piece: piece.seconds):
        if piece.row > lowest:
            lowest = piece.row
            moves.append((piece.seconds, LINE * (lowest - ROWS + 1)))
    frames = "".join(f"{100 * seconds / SECONDS:.2f}%{{transform:translateY(-{up}px)}}" for seconds, up in moves)
    end = f"transform:translateY(-{moves[-1][1]}px)"
    return f".scroll{{{end};animation:scroll {SECONDS:g}s step-end infinite}}@keyframes scroll{{{frames}100%{{{end}}}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    parser.add_argument("--images", type=int, default=140, help="pictures of each class")
    parser.add_argument("--save", type=Path, help="keep commands and outputs in a JSON file")
    parser.add_argument("--session", type=Path, help="take commands and outputs from such a file; nothing is learned")
    given = parser.parse_args()
    if given.session:
        steps = [Step(**step) for step in json.loads(given.session.read_text(encoding="utf-8"))]
    else:
        with tempfile.TemporaryDirectory() as folder:
            steps = record(Path(folder), given.images)
    if given.save:
        given.save.write_text(json.dumps([vars(step) for step in steps], indent=2) + "\n", encoding="utf-8")
    check(steps)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(svg_of(steps), encoding="utf-8")
    print(f"{given.out}: {given.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
