"""Run the commands of docs/learn.md on generated pictures, and write what they print into the page.

python recipes/record_learn.py            # a minute on two cores
python recipes/record_learn.py --check    # only compare the words, and change nothing

Commands that the page shows without output are not run: no later one with output needs them.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "learn.md"
BLOCK = re.compile(r"(```console\n)(.*?)(```)", re.DOTALL)
WIDTH = "118"  # columns of the terminal


def make_photos(place: Path) -> None:
    """The folders that the page starts from, as tests/test_walkthrough.py makes them."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from pictures import walkthrough  # type: ignore[import-not-found,unused-ignore]
    finally:
        sys.path.pop(0)
    walkthrough(place)


def printed(line: str, place: Path) -> str:
    """What a command of the page prints on standard output."""
    environment = os.environ | {"COLUMNS": WIDTH, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "TPL_OFFLINE": "1"}
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{line} ended with {done.returncode}")
    return "".join(f"{text.rstrip()}\n" for text in done.stdout.splitlines())


def recorded(block: str, place: Path) -> str:
    """A console block with the output of each command that had one before."""
    parts = re.split(r"^(\$ .+\n)", block, flags=re.MULTILINE)
    text = parts[0]
    for command, output in zip(parts[1::2], parts[2::2], strict=True):
        text += command + (printed(command[2:].strip(), place) if output.strip() else output)
    return text


def main() -> None:
    """Record the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the words alone; exit with 1 if they differ")
    chosen = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_photos(place)
        after = BLOCK.sub(lambda found: found[1] + recorded(found[2], place) + found[3], before)
    if chosen.check:
        same = re.findall(r"[A-Za-z]{2,}", before) == re.findall(r"[A-Za-z]{2,}", after)
        raise SystemExit(0 if same else f"{PAGE} shows other words than the commands print")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
