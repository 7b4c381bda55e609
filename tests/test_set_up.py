"""The two commands of the README set up what they need, say so meanwhile, and the wheel is complete."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]


set_up, try_wheel = load_script("tools/set_up.py"), load_script("tools/try_wheel.py")


def planned(target: str, *variables: str) -> str:
    """What make would run."""
    return subprocess.check_output(["make", "-n", "-W", "pyproject.toml", target, *variables], cwd=ROOT, text=True)


def test_no_setuptools_with_known_holes_is_used() -> None:
    """Below 78.1.1 a package's address could name a file anywhere (CVE-2025-47273)."""
    safe = (78, 1, 1)
    pinned = re.findall(r"^setuptools==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    asked = re.findall(r"setuptools>=([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert len(pinned) == 1 and len(asked) == 2
    for version in (*pinned, *asked):
        assert tuple(map(int, version.split("."))) >= safe


def test_the_demo_needs_no_development_tools() -> None:
    assert "set_up.py" in planned("demo") and "--extra" not in planned("demo")
    assert "--extra dev" in planned("test")


def test_a_further_index_reaches_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--index somewhere" in planned("demo", "TORCH_INDEX=somewhere")
    commands: list[list[str]] = []
    monkeypatch.setattr(set_up, "lines_of", lambda command: commands.append(command) or [])
    set_up.install(Path("python"), ["tpl-cil"], "somewhere", print)
    assert commands[0][-2:] == ["--extra-index-url", "somewhere"]


def test_every_large_package_is_a_line_and_silence_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    local = tmp_path / "local-1.0-py3-none-any.whl"
    local.write_bytes(b"x" * 7_000_000)
    printed = [
        "Collecting torch>=2.4 (from tpl-cil==0.1.0)",
        "Downloading torch-2.10.0-cp311-cp311-manylinux_2_28_aarch64.whl (146.0 MB)",
        None,
        "Using cached filelock-4.2.10-py3-none-any.whl (218 kB)",
        f"Processing {local} (from tpl-cil==0.1.0)",
        "Installing collected packages: filelock, local, torch",
    ]
    monkeypatch.setattr(set_up, "lines_of", lambda command: printed)
    steps: list[str] = []
    set_up.install(Path("python"), ["tpl-cil"], "", steps.append)
    assert steps == [
        "looking up packages",
        "downloading torch (146 MB)",
        "still downloading torch (146 MB)",
        "processing local (7 MB)",
        "unpacking 3 packages, 153 MB",
    ]


def test_lines_come_while_a_command_works_and_its_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "SILENCE", 0.2)
    program = "import time; print('begun', flush=True); time.sleep(1); print('done'); raise SystemExit(3)"
    found = set_up.lines_of([sys.executable, "-c", program])
    assert next(found) == "begun" and next(found) is None  # while it works
    with pytest.raises(subprocess.CalledProcessError):
        list(found)


def test_an_environment_that_was_left_incomplete_is_made_anew(tmp_path: Path) -> None:
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)  # what an interrupted `python -m venv` leaves
    steps: list[str] = []
    python = set_up.environment(place, steps.append)
    assert "incomplete" in steps[0]
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    again: list[str] = []
    assert set_up.environment(place, again.append) == python and not again  # a complete one is left alone


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    """It has every file of the package, and its command works where there is no checkout.

    Dependencies are those of this environment; `make wheel` installs them anew and runs the whole demo.
    """
    wheel = try_wheel.build(tmp_path, "--no-build-isolation")
    package = ROOT / "src"
    files = {str(f.relative_to(package)) for f in package.glob("tpl/**/*") if f.is_file() and f.suffix != ".pyc"}
    assert len(files) > 100 and files <= set(zipfile.ZipFile(wheel).namelist())
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-compile", "--no-index", wheel]
    subprocess.run(install, check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read
    where = try_wheel.printed([python, "-c", "import tpl; print(tpl.__file__)"], tmp_path)
    assert where.startswith(str(place))
    run = [place / "bin" / "tpl", "run", "digits-5t", "--tasks", "1", "--epochs", "1", "--json"]
    assert json.loads(try_wheel.printed(run, tmp_path))["last"] > 0.6  # of two classes
    try_wheel.printed([place / "bin" / "tpl", "report", "runs"], tmp_path)
