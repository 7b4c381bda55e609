"""The README promises commands, options, targets and files: all of them must exist."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from tpl.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_and_option_exists() -> None:
    lines = re.findall(r"`(tpl [^`]+)`", README) + re.findall(r"^(tpl [^#\n]+)", README, flags=re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        _, name, *words = line.split()
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_link_leads_somewhere() -> None:
    for page in (README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        for link in re.findall(r"\]\(([^)#]+)\)", page):
            assert (ROOT / link).exists(), link


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in README
