"""Set up the virtual environment that the Makefile uses, and say what is happening meanwhile.

    python3 tools/set_up.py .venv             the package and what it needs
    python3 tools/set_up.py .venv --extra dev the same, and all that the tests need

Standard library only: this runs before anything is installed. It can be interrupted at any moment and run again;
packages that pip has downloaded completely are not downloaded again.
"""

from __future__ import annotations

import argparse
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (3, 11)
WORTH_A_LINE = 5.0  # MB: smaller packages are counted, not named
SILENCE = 20.0  # seconds after which a line says that the work goes on
UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
PACKAGE = re.compile(  # a line of pip's that names a package file, with its size where pip knows it
    r"(?P<how>Downloading|Using cached|Processing) (?P<place>\S+\.(?:whl|tar\.gz))"
    r"(?: \((?P<size>[\d.]+) (?P<unit>\w+)\))?"
)


class Steps:
    """Prints one line per step, with the time since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print one line."""
        seconds = int(time.monotonic() - self.start)
        print(f"[{seconds // 60:02d}:{seconds % 60:02d}] {text}", flush=True)


def main() -> int:
    """Create or complete the environment; returns the exit status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, help="the virtual environment to create or complete")
    parser.add_argument("--extra", default="", help="optional dependencies to add, as in pyproject.toml")
    parser.add_argument("--index", default="", help="a further package index, such as one with CPU builds of torch")
    chosen = parser.parse_args()
    if sys.version_info < NEEDED:
        found, needed = platform.python_version(), ".".join(map(str, NEEDED))
        print(f"tpl needs Python {needed} or newer; this is {found}. Run: make PYTHON=python{needed}", file=sys.stderr)
        return 1
    step = Steps()
    try:
        python = environment(chosen.place, step)
        target = f"{ROOT}[{chosen.extra}]" if chosen.extra else str(ROOT)
        install(python, ["--editable", target], chosen.index, step)
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again; it goes on from here.", file=sys.stderr)
        return 130
    except subprocess.CalledProcessError as error:
        print(f"The set-up failed at: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        print("Check the network and the disk, then run the same command again.", file=sys.stderr)
        return 1
    step(f"ready: {folder_size(chosen.place) / 1e6:,.0f} MB in {chosen.place}")
    return 0


def environment(place: Path, step: Steps) -> Path:
    """The Python of the virtual environment; an incomplete one is made anew."""
    python = place / "bin" / "python"
    if place.exists():
        found = subprocess.run([python, "-m", "pip", "--version"], capture_output=True) if python.exists() else None
        if found is not None and found.returncode == 0:
            return python
        step(f"{place} is incomplete and is made anew")
        shutil.rmtree(place)
    step(f"virtual environment {place} with Python {platform.python_version()} ({platform.machine()})")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    return python


def install(python: Path, wanted: list[str], index: str, step: Steps) -> None:
    """Let pip install what is wanted, with all that it needs at the versions of the constraints file."""
    command = [str(python), "-m", "pip", "install", "--progress-bar", "off"]
    command += ["--constraint", str(ROOT / "constraints.txt"), *wanted]
    command += ["--extra-index-url", index] if index else []
    last = "looking up packages"
    step(last)
    sizes: list[float] = []
    for line in lines_of(command):
        found = PACKAGE.match(line or "")
        if line is None:
            step(f"still {last}")
        elif line.startswith(("ERROR", "error")):
            print(line, file=sys.stderr, flush=True)
        elif line.startswith("Installing collected packages"):
            last = f"unpacking {line.count(',') + 1} packages"
            step(f"{last}, {sum(sizes):,.0f} MB")
        elif found:
            sizes.append(megabytes(found))
            last = f"{found['how'].lower()} {Path(found['place']).name.split('-')[0]}"
            if sizes[-1] >= WORTH_A_LINE:
                last += f" ({sizes[-1]:,.0f} MB)"
                step(last)


def megabytes(package: re.Match[str]) -> float:
    """Size of a package file that pip has named."""
    if package["size"]:
        return float(package["size"]) * UNITS.get(package["unit"], 1.0)
    file = Path(package["place"])
    return file.stat().st_size / 1e6 if file.is_file() else 0.0


def lines_of(command: list[str]) -> Iterator[str | None]:
    """The lines that a command prints, and None whenever it has been silent for a while.

    Raises CalledProcessError, after the last line, if the command failed.
    """
    environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        while True:
            try:
                line = lines.get(timeout=SILENCE)
            except queue.Empty:
                yield None
                continue
            if line is None:
                break
            yield line.strip()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _read(stream: Iterator[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def folder_size(place: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(f.stat().st_size for f in place.rglob("*") if f.is_file() and not f.is_symlink())


if __name__ == "__main__":
    sys.exit(main())
