"""Files of runs and suites that were damaged in ways which could end in a traceback: refused in words, or shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, write_run

from tpl import TplError
from tpl.bench.suite_run import FINISHED, INTERRUPTED, read_states
from tpl.report import find_runs
from tpl.report.find import group_runs
from tpl.report.page import write_page

RESULTS: dict[str, Callable[[Any], Any]] = {
    "no object": lambda content: [],
    "no summary": lambda content: {k: v for k, v in content.items() if k != "summary"},
    "a summary of text": lambda content: content | {"summary": "x"},
    "an accuracy of text": lambda content: content | {"summary": content["summary"] | {"last": "x"}},
    "an accuracy above one": lambda content: content | {"summary": content["summary"] | {"aia": 1e300}},
    "seconds without end": lambda content: content | {"summary": content["summary"] | {"seconds": 1e300}},
    "a negative count": lambda content: content | {"summary": content["summary"] | {"parameters": -1}},
    "matrices of text": lambda content: content | {"matrices": {"cil": [["x"]]}},
    "a matrix that is flat": lambda content: content | {"matrices": {"cil": [0.5, 0.5]}},
    "rows of other lengths": lambda content: content | {"matrices": {"cil": [[0.5], [0.5, 0.5, 0.5], []]}},
    "no matrix": lambda content: content | {"matrices": {}},
    "an empty matrix": lambda content: content | {"matrices": content["matrices"] | {"cil": []}},
    "a confusion of text": lambda content: content | {"task_confusion": [["x"]]},
    "accuracies of classes that are a number": lambda content: content | {"class_accuracy": 3},
}
DESCRIPTIONS: dict[str, Callable[[Any], Any]] = {
    "no method": lambda content: {k: v for k, v in content.items() if k != "method"},
    "a method of numbers": lambda content: content | {"method": [1]},
    "options of text": lambda content: content | {"options": "x"},
    "a nested option": lambda content: content | {"options": {"lr": {"a": {}}}},
    "a negative seed": lambda content: content | {"seed": -1},
    "a seed of text": lambda content: content | {"seed": "x"},
    "classes in one list": lambda content: content | {"classes": ["a", "b"]},
    "no encoder": lambda content: content | {"encoder": None},
    "an encoder of text": lambda content: content | {"encoder": "x"},
    "a benchmark of a hundred thousand letters": lambda content: content | {"benchmark": "x" * 100_000},
    "fewer tasks than measured": lambda content: content | {"classes": content["classes"][:1], "test_images": [1]},
}
BYTES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe\x00",
    "nested too deeply": b"[" * 100_000,
    "a number": b"7",
    "digits without end": b'{"method": ' + b"9" * 10_000 + b"}",
}
CASES = [
    *(pytest.param("results.json", change, id=f"results: {name}") for name, change in RESULTS.items()),
    *(pytest.param("run.json", change, id=f"run: {name}") for name, change in DESCRIPTIONS.items()),
    *(
        pytest.param(file, lambda _, content=content: content, id=f"{file}: {name}")
        for file in ("run.json", "results.json")
        for name, content in BYTES.items()
    ),
]


@pytest.mark.parametrize(("file", "change"), CASES)
def test_a_damaged_run_is_refused_or_shown(file: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    place = tmp_path / "runs" / "one"
    write_run(place, make_run("tpl", 0.9, 0.01))
    write_run(tmp_path / "runs" / "two", make_run("finetune", 0.5, 0.1))
    changed = change(json.loads((place / file).read_text(encoding="utf-8")))
    (place / file).write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    for use in (lambda: _shown(tmp_path / "runs"), lambda: read_states(tmp_path / "runs")):
        said = ""
        try:
            use()
        except TplError as error:
            said = str(error)
        assert not said or file in said or "one" in said


def _shown(folder: Path) -> None:
    for experiment in group_runs(find_runs([folder]).runs):
        _ = experiment.rows, experiment.run_rows()


def test_a_run_with_a_short_row_is_drawn(tmp_path: Path) -> None:
    """What passes the check must also be drawn."""
    place = tmp_path / "runs" / "one"
    write_run(place, make_run("tpl", 0.9, 0.01))
    content = json.loads((place / "results.json").read_text(encoding="utf-8"))
    content["matrices"]["cil"][1] = content["matrices"]["cil"][1][:1]
    (place / "results.json").write_text(json.dumps(content), encoding="utf-8")
    write_page(find_runs([tmp_path / "runs"]), tmp_path / "page.html", "runs")
    assert "tpl" in (tmp_path / "page.html").read_text(encoding="utf-8")


PLANNED = {"method": "tpl", "benchmark": "b", "order": "natural", "seed": 0, "directory": "run"}
RUN = '{"kind": "run", "time": 1, "images": [4, 4], "learned": 0}'
EPOCH = '{"kind": "epoch", "time": 2, "epoch": 1, "epochs": 2}'
EVENTS = {
    "a line that is no object": "7",
    "a line without a kind": '{"time": 1}',
    "a line without a time": '{"kind": "epoch", "epoch": 2, "epochs": 2}',
    "an epoch of text": '{"kind": "epoch", "time": 3, "epoch": "x", "epochs": 2}',
    "an epoch without end": '{"kind": "epoch", "time": 3, "epoch": 1e999, "epochs": 2}',
    "no stage": '{"kind": "stage", "time": 3, "stage": null}',
    "images of text": '{"kind": "run", "time": 3, "images": ["x"], "learned": 0}',
    "half a line": '{"kind": "sta',
    "no text": "\udcff\udcfe",
    "nested too deeply": "[" * 100_000,
}


@pytest.mark.parametrize("line", EVENTS.values(), ids=EVENTS)
def test_a_damaged_line_of_a_runs_events_is_left_out(line: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "suite.json").write_text(json.dumps({"runs": [PLANNED]}), encoding="utf-8")
    (tmp_path / "run" / "events.jsonl").write_bytes(f"{RUN}\n{EPOCH}\n{line}\n".encode("utf-8", "surrogateescape"))
    (state,) = read_states(tmp_path)
    assert state.state == INTERRUPTED and state.progress(9.0)["share"] == 0.25


def test_a_run_without_images_has_no_share(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"seed": "x"}', encoding="utf-8")
    (tmp_path / "run" / "events.jsonl").write_text('{"kind": "run", "time": 1, "images": [0]}\n', encoding="utf-8")
    (state,) = read_states(tmp_path)
    assert state.progress(9.0)["share"] == 0 and state.seed == 0


@pytest.mark.parametrize(
    "change",
    [{"directory": "../other"}, {"directory": "/etc"}, {"directory": ""}, {"seed": "x"}, {"more": 1}, {"method": None}],
    ids=str,
)
def test_a_list_of_runs_that_no_suite_wrote_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text(json.dumps({"runs": [PLANNED | change]}), encoding="utf-8")
    with pytest.raises(TplError, match="was not written by a suite"):
        read_states(tmp_path)


def test_a_finished_run_is_still_found(tmp_path: Path) -> None:
    write_run(tmp_path / "run", make_run("tpl", 0.9, 0.01))
    (tmp_path / "suite.json").write_text(json.dumps({"runs": [PLANNED]}), encoding="utf-8")
    assert [state.state for state in read_states(tmp_path)] == [FINISHED]
