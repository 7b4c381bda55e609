"""The film: it shows real commands and their real outputs, in order, and is small and short."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import typer.main

from scripts import load_script
from tpl._version import __version__
from tpl.cli import app

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_script("recipes/film.py")


def session(recipe: ModuleType, *changes: tuple[int, str]) -> list[object]:
    """A session with outputs such as tpl's."""
    outputs = [
        "Learned one",
        "zero.png: zero 99 %",
        "",
        "Learned <two>",
        "zero.png: zero 99 %",
        "flower.jpg: unknown (0.99); of the known classes three 99 %",
    ]
    for number, output in changes:
        outputs[number] = output
    return [recipe.Step(*pair) for pair in zip(recipe.COMMANDS, outputs, strict=True)]


def shown(text: str) -> list[str]:
    """The lines of a film, once all of it is visible."""
    rows: dict[str, list[str]] = {}
    for element in ElementTree.fromstring(text).iter():
        if element.tag.endswith("text"):
            rows.setdefault(element.attrib["y"], []).append(element.text or "")
    return ["".join(parts) for parts in rows.values()]


def test_a_film_shows_commands_and_outputs_in_order(recipe: ModuleType) -> None:
    text = recipe.svg_of(session(recipe))
    lines = [line for line in shown(text) if not line.startswith("#")]
    assert lines[1] == "Learned one" and lines[6] == "Learned <two>"
    commands = [line for line in lines if line.startswith("$")]
    assert commands == ["$" + command.replace(" ", "") for command in recipe.COMMANDS]
    shares = [float(share) for share in re.findall(r"([\d.]+)%,100%\{fill-opacity:1\}", text)]
    assert shares == sorted(shares) and shares[-1] < 100 * (1 - recipe.END / recipe.SECONDS) + 0.1


def test_a_session_that_does_not_show_what_it_should_ends_the_recipe(recipe: ModuleType) -> None:
    recipe.check(session(recipe))
    for change in ((4, "zero.png: two 50 %"), (5, "flower.jpg: three 99 %, task tuesday, unknown 0.50")):
        with pytest.raises(SystemExit):
            recipe.check(session(recipe, change))


def test_outputs_are_recorded(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "COMMANDS", ("tpl --version",))
    (step,) = recipe.record(tmp_path, images=2)
    assert step.command == "tpl --version" and __version__ in step.output
    assert len(list((tmp_path / "monday").rglob("*.png"))) == 4 and (tmp_path / "flower.jpg").is_file()


def test_the_committed_film_is_small_short_and_true(recipe: ModuleType) -> None:
    file = ROOT / "docs" / "images" / "film.svg"
    text = file.read_text(encoding="utf-8")
    lines = shown(text)
    assert file.stat().st_size < 300_000 and recipe.SECONDS <= 15 and f"animation:{recipe.SECONDS:g}s" in text
    assert "href" not in text and "url(" not in text  # nothing is loaded
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in recipe.COMMANDS:
        assert "$" + command.replace(" ", "") in lines
        program, name, *words = command.split()
        if program != "tpl":
            continue
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
    answers = [line for line in lines if line.startswith("zero.png: zero")]
    assert len(answers) == 2 and any(line.startswith("flower.jpg: unknown (") for line in lines)
