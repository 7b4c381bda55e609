"""Suites: files are checked, grids complete with the numbers of runs alone, and a dead worker loses nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from light_jobs import LightEngine, attempts, stop_after_stage, write_script
from pictures import photos
from tpl import TplError
from tpl.bench.engines import Job, JobEvent, create_engine, local
from tpl.bench.engines.local import LocalEngine
from tpl.bench.results import RunResult, is_alive
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.bench.suite import Suite, check_suite, over, read_suite
from tpl.bench.suite_run import RunState, SuiteRun, read_states
from tpl.engine import Event

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"methods": ["tpl", "slda"], "benchmarks": ["digits-5t"]}


# The file


def test_the_grid_is_every_method_on_every_benchmark_in_every_order_with_every_seed() -> None:
    suite = check_suite(
        SMALL | {"benchmarks": ["digits-5t", "c10-5t"], "orders": ["natural", "random:1"], "seeds": [0, 3]}
    )
    specs = suite.specs()
    assert len({(s.method, s.benchmark, s.order, s.seed) for s in specs}) == len(specs) == 16
    assert len({s.directory_name() for s in specs}) == 16
    alone = RunSpec("c10-5t", "slda", order="random:1", seed=3)
    assert alone.directory_name() in {s.directory_name() for s in specs}  # `tpl run` would use the same directory


def test_a_contaminated_encoder_must_be_accepted() -> None:
    grid = {"methods": ["slda"], "benchmarks": ["c10-5t"]}
    with pytest.raises(TplError, match="slda on c10-5t: 'compact' was pre-trained on cifar100"):
        check_suite(grid | {"run": {"encoder": "compact"}})
    (spec,) = check_suite(grid | {"run": {"encoder": "compact", "accept_contaminated_encoder": True}}).specs()
    assert spec.contamination() == ["cifar100"]
    assert {s.encoder for s in check_suite(SMALL | {"benchmarks": ["digits-5t", "c10-5t"]}).specs()} == {
        "compact", "vit_tiny_patch16_224",
    }  # fmt: skip


def test_the_more_special_option_wins(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(
        """
        methods = ["tpl", "hat", "slda"]
        benchmarks = ["digits-5t", "c10-5t"]
        [run]
        device = "cpu"
        tasks = 3
        [options]
        epochs = 7
        lr = 0.25
        [method.hat]
        epochs = 2
        [benchmark.c10-5t]
        tasks = 2
        per_task = [2, 3, 5]
        [benchmark.c10-5t.options]
        lr = 0.125
        epochs = 5
        """
    )
    content = read_suite(file)
    found = {(s.method, s.benchmark): s for s in check_suite(content).specs()}
    options = {key: spec.all_options() for key, spec in found.items()}
    assert [options["tpl", b]["epochs"] for b in ("digits-5t", "c10-5t")] == [7, 5]
    assert [options["hat", b]["epochs"] for b in ("digits-5t", "c10-5t")] == [2, 2]
    assert [options["tpl", b]["lr"] for b in ("digits-5t", "c10-5t")] == [0.25, 0.125]
    assert "epochs" not in options["slda", "digits-5t"]  # it has none: left out, as another method has them
    assert [(s.tasks, s.per_task) for s in (found["tpl", "digits-5t"], found["tpl", "c10-5t"])] == [
        (3, None),
        (2, (2, 3, 5)),
    ]
    assert {s.device for s in found.values()} == {"cpu"}
    given = over(content, {"methods": ["tpl"], "orders": None}, {"tasks": 1}, {"epochs": 1, "tpl.k": "9"})
    specs = check_suite(given).specs()
    assert {(s.method, s.tasks, s.all_options()["epochs"], s.all_options()["k"]) for s in specs} == {("tpl", 1, 1, 9)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metods": ["tpl"]}, "no key 'metods'.*do you mean 'methods'"),
        ({"methods": []}, "A suite needs methods"),
        ({"methods": "tpl"}, "A suite needs methods"),
        ({"methods": ["tpl", "tpl"]}, "names tpl twice"),
        ({"methods": ["tpl", "nobody"]}, "nobody"),
        ({"benchmarks": ["digits"]}, "no benchmark 'digits'"),
        ({"seeds": [-1]}, "0 or more"),
        ({"seeds": [True]}, "whole numbers"),
        ({"orders": ["alphabetical"]}, "'alphabetical' is not understood"),
        ({"orders": ["gone.json:1"]}, "no class-order file gone.json"),
        ({"run": 3}, "run must be a table"),
        ({"run": {"epochs": 3}}, r"\[run\] has no key 'epochs'"),
        ({"run": {"tasks": "2"}}, "tasks must be a int"),
        ({"run": {"data": "nowhere/at/all"}}, "'nowhere/at/all' is not there"),
        ({"run": {"per_task": [2, "3"]}}, "number of classes"),
        ({"options": {"epoch": 3}}, r"\[options\] has no key 'epoch' \(do you mean 'epochs'\?\)"),
        ({"options": {"epochs": 0}}, "tpl on digits-5t: epochs must be at least 1"),
        ({"options": {"epochs": [1, 2]}}, "epochs must be a int"),
        ({"method": {"slda": {"epochs": 3}}}, r"\[method.slda\] has no key 'epochs'"),
        ({"method": {"hat": {"epochs": 3}}}, r"\[method.hat\] is for a method that is not in methods"),
        ({"benchmark": {"digits-5t": {"device": "cpu"}}}, "device is the same for all runs"),
        ({"benchmark": {"digits-5t": {"task": 1}}}, r"\[benchmark.digits-5t\] has no key 'task'"),
        ({"benchmark": {"digits-5t": {"options": {"colour": 1}}}}, r"digits-5t.options\] has no key 'colour'"),
    ],
)
def test_mistakes_in_a_suite_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TplError, match=message):
        check_suite(SMALL | changes)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(TplError, match="no suite file"):
        read_suite(tmp_path / "none.toml")
    file = tmp_path / "bad.toml"
    file.write_text("methods = [tpl]\n")
    with pytest.raises(TplError, match=r"bad.toml is not TOML: .*line 1"):
        read_suite(file)


def test_recipes_and_the_documented_example_are_suites() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "suites.md").read_text(encoding="utf-8"), re.DOTALL)
    files = sorted((ROOT / "recipes").glob("suite-*.toml"))
    assert len(files) >= 2
    for content in (tomllib.loads(example), *map(read_suite, files)):
        content["run"].pop("data", None)  # wherever it may lie
        assert len(check_suite(content).specs()) >= 8


# The engine


def jobs_in(out: Path, script: dict[str, list[str]]) -> list[Job]:
    write_script(out, script)
    return [Job.of(RunSpec("digits-5t", per_task=(2, 3, 5), data=Path("here"), seed=3), out / name) for name in script]


def told(engine: LocalEngine, jobs: list[Job]) -> dict[str, list[JobEvent]]:
    found: dict[str, list[JobEvent]] = {job.name: [] for job in jobs}
    with closing(engine.run(jobs)) as events:
        for event in events:
            found[event.job].append(event)
    return found


def test_a_job_is_plain_data(tmp_path: Path) -> None:
    (job,) = jobs_in(tmp_path, {"a": []})
    again = Job.from_json(job.to_json())
    assert again.run_spec() == RunSpec("digits-5t", per_task=(2, 3, 5), data=Path("here").absolute(), seed=3)
    assert Path(again.directory) == tmp_path / "a"


def test_a_dead_worker_is_replaced_once_and_takes_nobody_along(tmp_path: Path) -> None:
    script = {
        "doomed": ["die", "die", "finish"],
        "gone": ["exit", "exit", "finish"],
        "clumsy": ["stumble", "stumble", "finish"],
        "wrong": ["refuse", "finish"],
    }
    jobs = jobs_in(tmp_path, script)
    found = told(LightEngine("cpu", 2), jobs)
    assert {name: len(attempts(tmp_path / name)) for name in script} == {
        "doomed": 2, "gone": 2, "clumsy": 2, "wrong": 1
    }  # fmt: skip
    life = {name: [e.kind for e in events if e.kind != "run"] for name, events in found.items()}
    assert life["wrong"] == ["started", "failed"]
    assert all(life[name] == ["started", "retried", "started", "failed"] for name in script if name != "wrong")
    errors = {name: events[-1].data["error"] for name, events in found.items()}
    assert (
        "signal 9" in errors["doomed"]
        and "exit code 7" in errors["gone"]
        and errors["wrong"] == "there is no such data"
    )
    assert "what went wrong" in (tmp_path / "clumsy" / "worker.log").read_text()


def test_workers_end_when_the_suite_stops_listening(tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, {"a": ["wait"], "b": ["wait"], "c": ["wait"]})
    pids = []
    with closing(LightEngine("cpu", 2).run(jobs)) as events:
        for event in events:
            pids += [event.data["pid"]] if event.kind == "started" else []
            if len(pids) == 2:
                break
    assert len(pids) == 2 and not any(map(is_alive, pids))


def test_workers_end_with_a_suite_that_is_killed(tmp_path: Path) -> None:
    (job,) = jobs_in(tmp_path, {"a": ["wait"]})
    program = """
import sys
from light_jobs import LightEngine
from tpl.bench.engines import Job
if __name__ == "__main__":
    for event in LightEngine("cpu", 1).run([Job.from_json(sys.argv[1])]):
        print(event.kind, event.data.get("pid"), flush=True)
"""
    (tmp_path / "program.py").write_text(program)
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(tmp_path / "program.py"), job.to_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}) as suite:
        assert suite.stdout is not None
        worker = int(suite.stdout.readline().split()[1])
        assert suite.stdout.readline().startswith("run")  # it is at work
        suite.kill()
    deadline = time.monotonic() + 30
    while is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_workers_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in local.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local, "cores", lambda: 6)
    engine = LocalEngine("cpu")
    assert (engine.slots(100), engine.slots(2), engine.slots(0)) == (6, 2, 1)
    assert engine.environment(0, 2) == dict.fromkeys(local.THREADS, "3")
    assert engine.environment(0, 12)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert engine.environment(0, 2) == {}  # what is set stays
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [LocalEngine("auto").environment(i, 2) for i in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": n} for n in "01"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-abc")
    engine = LocalEngine("cuda", workers=4)
    assert [engine.environment(i, 4)["CUDA_VISIBLE_DEVICES"] for i in range(4)] == ["4", "GPU-abc"] * 2
    assert (engine.slots(100), LocalEngine("cuda").slots(100)) == (4, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TplError, match="no GPU"):
        LocalEngine("cuda")
    with pytest.raises(TplError, match="CUDA_VISIBLE_DEVICES"):
        create_engine("local", "cuda:1", None)
    with pytest.raises(TplError, match="no engine 'cloud'; there are local"):
        create_engine("cloud", "cpu", None)


# The whole


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    data = photos(tmp_path_factory.mktemp("photos"), ["ant", "bee", "cat", "dog"], count=8)
    return check_suite(
        {
            "methods": ["replay", "slda"],
            "benchmarks": ["folder"],
            "orders": ["natural", "random:1"],
            "run": {"data": str(data), "device": "cpu", "validation": 0.25},
            "options": {"epochs": 3, "batch_size": 8},
        }
    )


@pytest.fixture(scope="module")
def alone(grid: Suite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs, each by itself."""
    out = tmp_path_factory.mktemp("alone")
    for spec in grid.specs():
        execute(spec, out / spec.directory_name())
    return out


class Killed:
    """A suite that finds two runs finished and one interrupted; the worker of the fourth is killed."""

    def __init__(self, grid: Suite, alone: Path, out: Path) -> None:
        self.out = out
        self.run = SuiteRun(grid, out)
        self.victim, self.done, self.cut, other = self.run.states
        for state in (self.done, other):
            shutil.copytree(alone / state.directory.name, state.directory)
        with pytest.raises(KeyboardInterrupt):
            execute(self.run.specs[2], self.cut.directory, callback=self._interrupt)
        self.before = {f: f.stat().st_mtime_ns for f in self.done.directory.rglob("*") if f.is_file()}
        self.pids: dict[str, int] = {}
        self.told: list[JobEvent] = []
        self.seen: list[dict[str, str]] = []
        with self.run.open():
            engine = LocalEngine("cpu", 1)
            engine.carry_out = partial(stop_after_stage, self.victim.directory.name, out.with_name("stopped"))
            self.run.carry_out(engine, self._watch)

    def _interrupt(self, event: Event) -> None:
        if event.kind == "stage":
            raise KeyboardInterrupt

    def _watch(self, state: RunState, event: JobEvent) -> None:
        self.told.append(event)
        if event.kind == "started":
            self.pids[event.job] = event.data["pid"]
        if state is self.victim and state.attempt == 1 and event.kind == "task" and not self.seen:
            self.seen.append({s.directory.name: s.state for s in read_states(self.out)})
        if state is self.victim and state.attempt == 1 and event.kind == "stage":
            os.kill(self.pids[event.job], signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(grid: Suite, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        return Killed(grid, alone, tmp_path_factory.mktemp("suite") / "out")


def test_all_complete_with_the_numbers_of_runs_alone(killed: Killed, alone: Path) -> None:
    assert [state.state for state in killed.run.states] == ["finished"] * 4
    for state in killed.run.states:
        assert state.result is not None
        there, here = (json.loads((d / state.directory.name / "results.json").read_text()) for d in (alone, killed.out))
        assert here["matrices"] == there["matrices"]
        assert state.result.summary["last"] == RunResult.read(alone / state.directory.name).summary["last"]


def test_a_killed_worker_goes_on_and_nothing_is_learned_twice(killed: Killed) -> None:
    kinds = [e.kind for e in killed.told if e.job == killed.victim.directory.name and e.kind in ("started", "retried")]
    assert kinds == ["started", "retried", "started"]
    for state in (killed.cut, killed.victim):
        events = [json.loads(line) for line in (state.directory / "events.jsonl").read_text().splitlines()]
        assert [e["learned"] for e in events if e["kind"] == "run"] == [0, 1]
        learned = [tuple(e["classes"]) for e in events if e["kind"] == "task"]
        assert learned.count(learned[0]) == 1  # the finished task; the one in hand when it was cut off begins anew
        assert [e["stage"] for e in events if e["kind"] == "stage"] == [0, 1]


def test_what_is_finished_is_reused_untouched(killed: Killed) -> None:
    assert [state.reused for state in killed.run.states] == [False, True, False, True]
    assert killed.done.directory.name not in {e.job for e in killed.told}
    now = {f: f.stat().st_mtime_ns for f in killed.done.directory.rglob("*") if f.is_file()}
    assert now == killed.before


def test_the_directory_tells_where_a_suite_stands_while_it_runs(killed: Killed) -> None:
    (seen,) = killed.seen
    assert [seen[s.directory.name] for s in killed.run.states] == ["running", "finished", "interrupted", "finished"]


def test_a_second_call_runs_nothing(killed: Killed, grid: Suite) -> None:
    again = SuiteRun(grid, killed.out)
    with again.open():
        again.carry_out(LocalEngine("cpu", 1), lambda state, event: pytest.fail(event.kind))
    assert [state.reused for state in again.states] == [True] * 4
    assert again.report()["counts"] == {"finished": 4}


def test_a_finished_run_on_other_images_is_not_taken_for_this_one(killed: Killed, grid: Suite, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", ["ant", "bee", "cat", "elk"], count=8)
    suite = replace(grid, run=grid.run | {"data": str(other)})
    run = SuiteRun(suite, killed.out)
    assert [s.directory for s in run.states] == [s.directory for s in killed.run.states]
    with run.open() as states:
        assert [state.reused for state in states] == [False] * 4


def test_time_left_follows_the_share_that_is_done() -> None:
    state = RunState("tpl", "digits-5t", "natural", 0, Path("nowhere"))
    assert state.seconds_left(5.0) is None and state.doing() == "starting"
    state.handle("run", {"images": [10, 30], "learned": 1}, now=100.0)
    assert state.share == 0.25 and state.seconds_left(101.0) is None
    state.handle("epoch", {"epoch": 1, "epochs": 3}, now=110.0)
    assert state.share == 0.5 and state.seconds_left(110.0) == pytest.approx(20.0)
    assert state.doing() == "task 2 of 2, epoch 1 of 3"
    state.handle("stage", {"stage": 1}, now=130.0)
    assert state.share == 1.0 and state.seconds_left(130.0) == 0.0
