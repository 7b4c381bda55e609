"""Build the wheel and try it in an empty environment outside the checkout, as a user would install it.

    python3 tools/try_wheel.py                all of it: dependencies installed anew, the whole demo; 4 minutes
    python3.13 tools/try_wheel.py --epochs 1  a smoke test of another Python; 2 minutes with the downloads

What it proves: the package installs, its data files and its command are complete, and it needs nothing of the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from set_up import ROOT, Steps, environment, install

METHODS = ["finetune", "tpl", "joint"]  # the demo's


def main() -> int:
    """Build, install, run; returns the exit status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, help="epochs a task in the demo; default: the demo's own")
    parser.add_argument("--index", default="", help="a further package index, such as one with CPU builds of torch")
    chosen = parser.parse_args()
    step = Steps()
    step(f"the wheel, by Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as place:
        wheel = build(Path(place))
        python = environment(Path(place) / "venv", step)
        install(python, [str(wheel)], chosen.index, step)
        step("tpl demo --json, in an empty folder")
        rows = demo(python, Path(place), chosen.epochs)
    for method, row in rows.items():
        step(f"{method}: {100 * row['last']:.1f} % in {row['seconds']:.0f} s")
    step(f"{wheel.name} works with Python {platform.python_version()} on {platform.machine()}")
    return 0


def build(place: Path, *options: str) -> Path:
    """The wheel of this checkout, made in a folder; `options` are further ones of `pip wheel`."""
    source = place / "source"  # a copy: setuptools leaves build/ and egg-info/ behind where it works
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, *options, source]
    subprocess.run(command, check=True)
    (wheel,) = place.glob("tpl_cil-*.whl")
    return wheel


def demo(python: Path, place: Path, epochs: int | None = None) -> dict[str, dict[str, float]]:
    """What `tpl demo --json` reports, run by an environment's command in a folder without the checkout."""
    command = [python.with_name("tpl"), "demo", "--json", *(["--epochs", str(epochs)] if epochs else [])]
    rows: dict[str, dict[str, float]] = json.loads(printed(command, place))["methods"]
    if list(rows) != METHODS:
        raise SystemExit(f"tpl demo reports {', '.join(rows)} instead of {', '.join(METHODS)}")
    return rows


def printed(command: list[str | Path], place: Path) -> str:
    """What a command prints, run in a folder as if nothing of this environment were there."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=place, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
