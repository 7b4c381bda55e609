"""`tpl suite`: what it prints and how it exits. Its processes are real; what they do is a script."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from light_jobs import MADE, attempts, write_script
from tpl import TplError, cli
from tpl.bench.engines import ENGINES, JobEvent
from tpl.bench.results import RunResult
from tpl.bench.run import data_hashes
from tpl.bench.spec import RunSpec
from tpl.bench.suite_run import RunState
from tpl.cli.suite import SuiteView, seconds_left
from tpl.nets.compact import record

GRID = ["--methods", "tpl,slda", "--benchmarks", "digits-5t", "--orders", "natural,random:1"]
SPECS = [
    RunSpec("digits-5t", method, order=order, tasks=2, device="cpu")
    for method in ("tpl", "slda")
    for order in ("natural", "random:1")
]
NAMES = [spec.directory_name() for spec in SPECS]
LAST = dict(zip(NAMES, (0.90, 0.94, 0.80, 0.80), strict=True))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_run(place: Path, spec: RunSpec, last: float) -> None:
    description = {
        "benchmark": spec.benchmark,
        "method": spec.method,
        "options": spec.all_options(),
        "seed": spec.seed,
        "order": spec.order,
        "validation": None,
        "encoder": {"name": spec.encoder, "sha256": record()["sha256"]},
        "data": data_hashes(spec.stream()),
    }
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps(description))
    RunResult(description, {"last": last, "aia": last, "seconds": 1.0}, {"cil": np.full((2, 2), last)}).write(place)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite's directory. Its workers find there what they shall do."""
    monkeypatch.setitem(ENGINES, "light", "light_jobs:LightEngine")
    for spec in SPECS:
        write_run(tmp_path / "out" / MADE / spec.directory_name(), spec, LAST[spec.directory_name()])
    return tmp_path / "out"


def script(place: Path, *todo: str) -> None:
    """What each of the four runs does; several words are several attempts."""
    write_script(place, {name: words.split() for name, words in zip(NAMES, todo, strict=True)})


def call(place: Path, *more: str) -> Result:
    arguments = ["suite", *GRID, "--tasks", "2", "--device", "cpu", "--engine", "light", "--workers", "2"]
    return CliRunner().invoke(cli.app, [*arguments, "--out", str(place), *more], env={"COLUMNS": "120"})


def ask(place: Path, code: int) -> Any:
    result = call(place, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, whatever ran in this process before."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, handler)


def status(place: Path, *more: str) -> Result:
    return CliRunner().invoke(cli.app, ["suite", "status", str(place), *more], env={"COLUMNS": "120"})


def states(place: Path) -> list[str]:
    return [run["state"] for run in json.loads(status(place, "--json").stdout)["runs"]]


def test_a_grid_is_made_once_and_then_reused(place: Path) -> None:
    script(place, *["finish"] * 4)
    answer = ask(place, 0)
    assert [run["directory"] for run in answer["runs"]] == [str(place / name) for name in NAMES]
    assert set(answer["runs"][0]) == {
        "method", "benchmark", "order", "seed", "state", "last", "aia", "directory", "reused", "error",
        "contamination",
    }  # fmt: skip
    assert [(r["method"], r["order"], r["last"], r["reused"]) for r in answer["runs"]] == [
        ("tpl", "natural", 0.90, False),
        ("tpl", "random:1", 0.94, False),
        ("slda", "natural", 0.80, False),
        ("slda", "random:1", 0.80, False),
    ]
    tpl, slda = answer["table"]
    assert (tpl["method"], tpl["runs"], tpl["last"]) == ("tpl", 2, pytest.approx(0.92))
    assert tpl["last_std"] == pytest.approx(np.std([0.90, 0.94], ddof=1)) and slda["last_std"] == 0
    again = ask(place, 0)
    assert [run["reused"] for run in again["runs"]] == [True] * 4
    assert again["table"] == answer["table"] and again["counts"] == {"finished": 4}
    assert all(len(attempts(place / name)) == 1 for name in NAMES)
    text = call(place).stdout
    assert "92.00 ± 2.83" in text and "80.00 ± 0.00" in text and "4 of them reused" in text


def test_what_fails_is_named_and_the_rest_goes_on(place: Path) -> None:
    script(place, "finish", "refuse finish", "die die finish", "die finish")
    result = call(place)
    assert result.exit_code == 1
    assert "failed: tpl on digits-5t, random:1, seed 0: there is no such data" in result.stdout
    assert "4 runs: 2 finished, 2 failed" in result.stdout and "tpl (1 of 2 runs)" in " ".join(result.stdout.split())
    assert "run 4 of 4 (slda on digits-5t, random:1, seed 0): finished: Last 80.00 %" in result.stderr
    assert states(place) == ["finished", "failed", "failed", "finished"]
    errors = [run["error"] for run in json.loads(status(place, "--json").stdout)["runs"]]
    assert errors[1] == "there is no such data" and "killed by signal 9" in errors[2]
    assert "2 finished, 2 failed" in status(place).stdout
    script(place, "", "refuse refuse", "die die finish", "")
    answer = ask(place, 1)
    assert [run["reused"] for run in answer["runs"]] == [True, False, False, True]
    assert [run["state"] for run in answer["runs"]] == ["finished", "failed", "finished", "finished"]
    assert [run["error"] for run in answer["runs"]] == [None, "there is no such data", None, None]
    assert states(place) == ["finished", "failed", "finished", "finished"]
    assert [len(attempts(place / name)) for name in NAMES] == [1, 2, 3, 2]


def test_without_a_terminal_every_run_writes_lines(place: Path) -> None:
    script(place, *["learn"] * 4)
    result = call(place, "--json")
    assert json.loads(result.stdout)["counts"] == {"finished": 4}
    for number, state in enumerate(json.loads(result.stdout)["runs"], start=1):
        name = f"run {number} of 4 ({state['method']} on digits-5t, {state['order']}, seed 0): "
        told = [line.partition(name)[2] for line in result.stderr.splitlines() if name in line]
        assert told[:2] == ["started", "task 1 of 2 (task 1): 2 classes, 10 images"]
        assert re.match(r"task 1 of 2 done in \d+ s: 75.0 % accuracy on the classes so far", told[2])
        assert told[3] == "warning: hardly any room left"
        assert told[4].startswith(f"finished: Last {100 * state['last']:.2f} %") and len(told) == 5
    assert all(re.match(r"\[00:\d\d\] tpl: run ", line) for line in result.stderr.splitlines())


def test_the_time_left_counts_runs_that_wait(place: Path) -> None:
    found = [RunState("tpl", "digits-5t", "natural", seed, place / str(seed)) for seed in range(4)]
    assert seconds_left(found, 1, now=100.0) is None
    found[0].state, found[0].result = "finished", RunResult({}, {"seconds": 30.0}, {})
    assert seconds_left(found, 1, now=100.0) == 90.0  # between two runs
    found[1].state = "running"
    found[1].handle("run", {"images": [10, 10], "learned": 0}, now=100.0)
    found[1].handle("stage", {"stage": 0}, now=125.0)
    assert seconds_left(found, 1, now=125.0) == 25.0 + 2 * 40.0
    for state in found:
        state.state, state.result = "finished", found[0].result
    assert seconds_left(found, 1, now=130.0) is None


def test_an_interrupted_suite_goes_on(place: Path) -> None:
    script(place, "finish", "interrupt finish", "finish", "finish")
    result = call(place, "--json", "--workers", "1")
    assert result.exit_code == 130
    answer = json.loads(result.stdout)
    assert [run["state"] for run in answer["runs"]] == ["finished", "interrupted", "interrupted", "interrupted"]
    assert "continue with the same command" in result.stderr
    assert states(place) == ["finished", "waiting", "waiting", "waiting"]  # the light job wrote no run.json
    finished = ask(place, 0)
    assert [run["reused"] for run in finished["runs"]] == [True, False, False, False]
    assert len(attempts(place / NAMES[0])) == 1


def test_a_second_suite_in_the_same_directory_is_refused(place: Path) -> None:
    script(place, *["finish"] * 4)
    hold = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held'); input()"
    command = [sys.executable, "-u", "-c", hold, str(place.resolve() / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        result = call(place)
        other.communicate("\n")
    assert isinstance(result.exception, TplError) and "is being written by another process" in str(result.exception)
    assert not (place / NAMES[0]).exists()


def test_a_file_says_the_same_as_options(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text('methods = ["tpl", "slda"]\nbenchmarks = ["digits-5t"]\n[run]\ntasks = 2\ndevice = "cpu"\n')
    script(place, *["finish"] * 4)
    arguments = ["suite", str(file), "--engine", "light", "--out", str(place), "--json"]
    result = CliRunner().invoke(cli.app, [*arguments, "--methods", "slda", "--orders", "random:1"])
    assert [run["directory"] for run in json.loads(result.stdout)["runs"]] == [str(place / NAMES[3])]
    plan = json.loads((place / "suite.json").read_text())
    assert plan["suite"]["methods"] == ["slda"] and plan["suite"]["run"] == {"tasks": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["suite"], "Name a suite file"),
        (["suite", "none.toml"], "no suite file none.toml"),
        (["suite", "a.toml", "b.toml"], "A suite is one file"),
        (["suite", "--methods", "tpl"], "needs benchmarks"),
        (["suite", *GRID, "--seeds", "0,x"], "--seeds takes whole numbers"),
        (["suite", *GRID, "--engine", "cloud"], "no engine 'cloud'"),
        (["suite", *GRID, "--device", "tpu"], "auto, cpu or cuda"),
        (["suite", "status"], "Name the directory"),
        (["suite", "status", "nowhere"], "no directory nowhere"),
        (["suite", "status", ".", "--methods", "tpl"], "takes no --methods"),
        (["suite", "status", "."], "holds no suite and no runs"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, arguments)
    assert isinstance(result.exception, TplError) and message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_help_has_examples_and_times() -> None:
    text = CliRunner().invoke(cli.app, ["suite", "-h"], env={"COLUMNS": "120"}).stdout
    assert "tpl suite status" in text and "--workers" in text and "as long as its runs" in text


def test_the_picture_shows_what_matters_in_a_low_terminal(place: Path) -> None:
    found = [RunState("tpl", "digits-5t", "natural", seed, place / str(seed)) for seed in range(12)]
    now = time.time()
    for state in found[5:7]:
        state.state = "running"
        state.handle("run", {"images": [10, 10], "learned": 0}, now - 60)
        state.handle("epoch", {"epoch": 1, "epochs": 2}, now)
    found[9].state, found[9].error = "failed", "no such [data]"
    console = Console(file=Terminal(), force_terminal=True, width=100, height=10)
    with SuiteView(console, found, slots=2) as view:
        console.print(view.draw())
        view(found[5], JobEvent("5", "warning", {"text": "mind [this]"}))
    text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    # 180 s for each of two, and 9 that wait take 240 s each
    assert "12 runs: 2 running, 9 waiting, 1 failed; about 21 min left" in text
    assert text.count("task 1 of 2, epoch 1 of 2") >= 2 and "3 min" in text
    assert "no such [data]" in text and "mind [this]" in text and "... and 7 more" in text
