"""The notebooks: every one runs from top to bottom, shows what its file shows, and is small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import load_script
from tpl.methods import load_methods
from tpl.methods.base import METHODS

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(file.stem for file in FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script("tools/run_notebooks.py")


def notebook_of(*sources: str) -> dict[str, Any]:
    """A notebook of code cells."""
    return {"cells": [{"cell_type": "code", "source": source.splitlines(True)} for source in sources]}


def kinds(outputs: list[list[dict[str, Any]]]) -> list[list[tuple[str, int]]]:
    """What each cell showed: the kind of output, and the number of lines that were printed."""
    return [[(output["output_type"], len(output.get("text", ()))) for output in cell] for cell in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_its_file_shows(
    tool: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_methods()
    monkeypatch.setattr("tpl.methods.base.METHODS", METHODS.copy())  # one of them adds a method
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    found = tool.run(notebook, FOLDER)
    assert kinds(found) == kinds([cell["outputs"] for cell in tool.code_cells(notebook)])
    printed = "".join(line for cell in found for output in cell for line in output.get("text", ()))
    if name == "photos":
        assert "Same answers: True" in printed
    if name == "reproduce":
        committed, here = re.findall(r"^LAST +([\d.]+)% +([\d.]+)%", printed, re.MULTILINE)[0]
        assert abs(float(committed) - float(here)) < 1


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_is_whole_and_small(tool: ModuleType, name: str) -> None:
    file = FOLDER / f"{name}.ipynb"
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = tool.code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert file.stat().st_size < 60_000 and notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert not re.search(r"/(home|work|tmp|root)/|object at 0x|Traceback", json.dumps(notebook))


def test_the_list_of_notebooks_names_them_all() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\((\w+)\.ipynb\)", page)) == NAMES and len(NAMES) == 4


def test_outputs_of_a_cell(tool: ModuleType, tmp_path: Path) -> None:
    drawn = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.tight_layout()"
    found = tool.run(notebook_of("x = 2\nprint(x)\nx + 1", "x * 5", drawn, "!echo one two"), tmp_path)
    assert [[output["output_type"] for output in cell] for cell in found] == [
        ["stream", "execute_result"], ["execute_result"], ["display_data"], ["stream"],
    ]  # fmt: skip
    assert found[0][0]["text"] == ["2\n"] and found[1][0]["data"]["text/plain"] == ["10"]
    assert found[3][0]["text"] == ["one two\n"] and len(found[2][0]["data"]["image/png"]) > 500


def test_a_cell_that_fails_is_named(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        tool.run(notebook_of("x = 0", "1 / x"), tmp_path)
    assert any("cell 2" in note for note in caught.value.__notes__)


def test_stored_outputs_are_those_of_the_run(tool: ModuleType, tmp_path: Path) -> None:
    notebook = notebook_of("print('here')")
    again = json.loads(tool.store(notebook, tool.run(notebook, tmp_path)))
    assert again["cells"][0]["outputs"][0]["text"] == ["here\n"] and again["cells"][0]["execution_count"] == 1
