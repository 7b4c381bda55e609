"""The Ray engine, on a cluster of two nodes: the numbers of runs alone, and nothing lost with a worker or a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

import light_jobs
from light_jobs import MADE, MESSAGES, attempts, write_script
from pictures import photos
from ray_cluster import add_node, two_nodes
from tpl import Learner, TplError, cli
from tpl.bench.engines import Job, JobEvent, create_engine
from tpl.bench.results import is_alive
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.bench.suite import Suite, check_suite
from tpl.bench.suite_run import RunState, SuiteRun, read_states
from tpl.bulk import WorkerPool, answer_here
from tpl.cluster import connect
from tpl.stream import Found, find_images


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, two_nodes() as cluster:
        patch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        assert connect(cluster.address)
        yield cluster


def engine(**options: Any) -> Any:
    """`ray` with light jobs."""
    made = create_engine("ray", options.pop("device", "cpu"), options.pop("workers", None), **options)
    made.carry_out = light_jobs.carry_out  # type: ignore[attr-defined]
    return made


def jobs_in(out: Path, script: dict[str, list[str]], **settings: Any) -> list[Job]:
    write_script(out, script)
    for name in script:
        (out / name).mkdir()
        (out / MADE / name).mkdir(parents=True)
    return [Job.of(RunSpec("digits-5t", **settings), out / name) for name in script]


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 120
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The whole


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    names = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "owl", "pig"]
    data = tmp_path_factory.mktemp("photos")
    photos(data / "train", names, count=6)
    photos(data / "test", names, count=2, seed=1)
    return check_suite(
        {
            "methods": ["replay", "slda", "ranpac"],
            "benchmarks": ["c10-5t"],
            "run": {
                "data": str(data),
                "device": "cpu",
                "tasks": 2,
                "encoder": "compact",
                "accept_contaminated_encoder": True,
            },
            "options": {"epochs": 1, "batch_size": 8},
        }
    )


class Killed:
    """A suite whose directories travel. One run is finished before; the worker of another is killed."""

    def __init__(self, grid: Suite, out: Path) -> None:
        self.run = SuiteRun(grid, out)
        self.out, self.victim, self.done = out, self.run.states[0], self.run.states[-1]
        execute(self.run.specs[-1], self.done.directory)
        self.pids: dict[str, int] = {}
        self.events: list[JobEvent] = []
        self.seen: dict[str, str] = {}
        with self.run.open():
            engine = create_engine("ray", "cpu", None)
            engine.in_place = False  # type: ignore[attr-defined]
            flag = out.with_name("stopped")
            engine.carry_out = partial(light_jobs.stop_after_stage, self.victim.directory.name, flag)  # type: ignore[attr-defined]
            self.run.carry_out(engine, self._watch)

    def _watch(self, state: RunState, event: JobEvent) -> None:
        self.events.append(event)
        if event.kind == "started":
            self.pids[event.job] = event.data["pid"]
        if state is self.victim and state.attempt == 1 and event.kind == "stage":
            self.seen = {s.directory.name: s.state for s in read_states(self.out)}
            os.kill(self.pids[event.job], signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(cluster: Any, grid: Suite, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    return Killed(grid, tmp_path_factory.mktemp("suite") / "out")


def test_all_complete_with_the_numbers_of_runs_alone(killed: Killed, tmp_path: Path) -> None:
    assert [state.state for state in killed.run.states] == ["finished"] * 3
    for spec, state in zip(killed.run.specs, killed.run.states, strict=True):
        if state is not killed.done:
            execute(spec, tmp_path / state.directory.name)
            here, there = (
                json.loads((out / state.directory.name / "results.json").read_text()) for out in (killed.out, tmp_path)
            )
            assert here["matrices"] == there["matrices"]


def test_a_killed_worker_goes_on_and_nothing_is_done_twice(killed: Killed) -> None:
    life = {state.directory.name: [] for state in killed.run.states}
    for event in killed.events:
        if event.kind in ("started", "retried", "finished"):
            life[event.job].append(event.kind)
    assert life.pop(killed.victim.directory.name) == ["started", "retried", "started", "finished"]
    assert life.pop(killed.done.directory.name) == []
    assert list(life.values()) == [["started", "finished"]]
    events = [json.loads(line) for line in (killed.victim.directory / "events.jsonl").read_text().splitlines()]
    assert [e["learned"] for e in events if e["kind"] == "run"] == [0, 1]
    assert [e["stage"] for e in events if e["kind"] == "stage"] == [0, 1]
    again = [e for e in killed.events if e.kind == "retried"]
    assert len(again) == 1 and "died" in again[0].data["error"]


def test_directories_come_back_whole_and_tell_of_themselves_meanwhile(killed: Killed) -> None:
    assert killed.seen[killed.victim.directory.name] == "running"
    assert killed.seen[killed.done.directory.name] == "finished"
    assert {event.data["away"] for event in killed.events if event.kind == "started"} == {True}
    for state in killed.run.states:
        assert not list(state.directory.rglob("*.partial")) and (state.directory / "model" / "model.json").is_file()
        commits = [folder.name for folder in (state.directory / "model" / "tasks").iterdir()]
        assert "001" in commits  # and what the newest commit swept away is not here either
        assert len(list((state.directory / "model").rglob("shared.safetensors"))) == 1


def test_a_second_call_runs_nothing(killed: Killed, grid: Suite) -> None:
    again = SuiteRun(grid, killed.out)
    with again.open():
        again.carry_out(create_engine("ray", "cpu", None), lambda state, event: pytest.fail(event.kind))
    assert [state.reused for state in again.states] == [True] * 3


# Its parts


def test_a_dead_worker_is_replaced_once_and_takes_nobody_along(cluster: Any, tmp_path: Path) -> None:
    script = {"doomed": ["die", "die", "finish"], "clumsy": ["stumble", "finish"], "wrong": ["refuse", "finish"]}
    jobs = jobs_in(tmp_path, script)
    found: dict[str, list[JobEvent]] = {name: [] for name in script}
    with closing(engine().run(jobs)) as events:
        for event in events:
            found[event.job].append(event)
    life = {name: [e.kind for e in events if e.kind != "run"] for name, events in found.items()}
    assert life == {
        "doomed": ["started", "retried", "started", "failed"],
        "clumsy": ["started", "retried", "started", "finished"],
        "wrong": ["started", "failed"],
    }
    assert "died" in found["doomed"][-1].data["error"]
    assert found["wrong"][-1].data["error"] == "there is no such data"
    assert "what went wrong" in (tmp_path / "clumsy" / "worker.log").read_text()
    assert {a["OMP_NUM_THREADS"] for name in script for a in attempts(tmp_path / name)} == {
        str(torch.get_num_threads())
    }
    assert not list(tmp_path.glob(".here-*"))


def test_no_more_runs_at_a_time_than_there_is_room_for_and_no_message_lost(cluster: Any, tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, {name: ["talk"] for name in "abcdef"})
    found: dict[str, list[JobEvent]] = {job.name: [] for job in jobs}
    for event in engine(workers=6).run(jobs):  # Ray has them all; two cores are there
        found[event.job].append(event)
    for name, events in found.items():
        assert [e.kind for e in events] == ["started", "run", *["epoch"] * MESSAGES, "finished"]
        assert [e.data["epoch"] for e in events if e.kind == "epoch"] == list(range(MESSAGES))
        assert int((tmp_path / name / "most").read_text()) <= 2


def test_runs_share_a_gpu(cluster: Any, tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, {"a": ["wait"], "b": ["wait"], "c": ["wait"]})
    sharing = engine(device="auto", gpu_share=0.5)
    assert sharing.slots(3) == 2  # of one GPU; the node without is left alone
    with closing(sharing.run(jobs)) as events:
        first = [next(events) for _ in range(4)]
        assert {event.job for event in first} == {"a", "b"}
        pids = {event.data["pid"] for event in first if event.kind == "started"}
        gpus = [a["CUDA_VISIBLE_DEVICES"] for name in "ab" for a in attempts(tmp_path / name)]
    assert gpus == ["0", "0"]
    assert len(pids) == 2
    for pid in pids:  # closing ends them
        wait_for_end(pid)
    with pytest.raises(TplError, match="above 0 and at most 1"):
        engine(device="auto", gpu_share=1.5)
    with pytest.raises(TplError, match="no GPU to share"):
        engine(device="cpu", gpu_share=0.5)


def test_what_a_machine_lacks_is_named(cluster: Any, tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, {"a": ["finish"]}, data=tmp_path / "nowhere")
    events = list(engine().run(jobs))
    assert [event.kind for event in events] == ["started", "failed"]
    assert f"data = {tmp_path / 'nowhere'} is not on " in events[-1].data["error"]
    assert attempts(tmp_path / "a") == []


def test_ctrl_c_ends_all_and_ray_says_nothing(cluster: Any, tmp_path: Path) -> None:
    (job,) = jobs_in(tmp_path, {"a": ["die", "wait"]})
    program = """
import signal
import sys
import light_jobs
from tpl.bench.engines import Job, create_engine
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job of a shell it is ignored
engine = create_engine("ray", "cpu", None, address=sys.argv[1])
engine.carry_out = light_jobs.carry_out
try:
    for event in engine.run([Job.from_json(sys.argv[2])]):
        if event.kind != "run":
            print(event.kind, event.data.get("pid"), flush=True)
except KeyboardInterrupt:
    print("interrupted", engine.ray.is_initialized())
"""
    command = [sys.executable, "-c", program, cluster.address, job.to_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as suite:
        assert suite.stdout is not None
        lines = [suite.stdout.readline().split() for _ in range(3)]
        assert [line[0] for line in lines] == ["started", "retried", "started"], lines
        suite.send_signal(signal.SIGINT)
        assert suite.stdout.read().split() == ["interrupted", "False"]
    wait_for_end(int(lines[2][1]))


# Bulk prediction


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bulk")
    learner = Learner("slda", device="cpu")
    learner.learn(photos(place / "pets", ["cat", "dog", "fox"], count=4))
    learner.save(place / "model")
    photos(place / "inbox", ["cat", "fox"], count=5, seed=1)
    (place / "inbox" / "dog").mkdir()
    (place / "inbox" / "dog" / "torn.png").write_bytes(b"no picture")
    return place / "model"


def predict(model: Path, *more: str | Path) -> Result:
    images = model.parent / "inbox"
    arguments = ["predict", model, images, model.parent / "gone.png", "--device", "cpu", "--batch", "3", *more]
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_a_cluster_goes_on_with_the_answers_of_this_process(cluster: Any, model: Path, tmp_path: Path) -> None:
    whole = predict(model, "--json").stdout
    assert whole.count("\n") == 12 and whole.count('"error"') == 2
    file = tmp_path / "answers.jsonl"
    first = json.loads(predict(model, "--out", file, "--json").stdout)
    assert (first["images"], first["earlier"], first["unreadable"]) == (12, 0, 2) and file.read_text() == whole
    file.write_text("".join(whole.splitlines(keepends=True)[:5]) + '{"path": "cut o')
    again = predict(model, "--out", file, "--json", "--engine", "ray")
    counts = json.loads(again.stdout)
    assert (counts["images"], counts["earlier"], counts["unreadable"]) == (12, 5, 2)
    assert file.read_text() == whole  # the same answers in the same order, errors included
    assert sorted(f.name for f in tmp_path.iterdir()) == ["answers.jsonl", "answers.jsonl.job.json"]


def images_of(model: Path) -> list[Found]:
    return list(find_images([str(model.parent / "inbox"), str(model.parent / "gone.png")], None))


def first_worker(ray: Any) -> int:
    """The process of the first worker; it answers when its batches are done."""
    worker = ray.get_actor(min(ray.util.list_named_actors()))
    while True:
        with suppress(ray.exceptions.ActorUnavailableError):  # Ray does not know yet that it is dead
            return int(ray.get(worker.__ray_call__.remote(lambda self: os.getpid())))
        time.sleep(0.2)


def test_a_killed_worker_and_a_lost_machine_lose_no_answer(cluster: Any, model: Path) -> None:
    found = images_of(model)
    more = add_node(cluster)
    pool = WorkerPool(model, None, "cpu", 3, None)
    pids: list[int] = []

    def images() -> Iterator[Found]:
        yield from found[:2]
        pids.append(first_worker(pool.ray))
        os.kill(pids[0], signal.SIGSTOP)  # it gets the next batch, and cannot have it done
        yield from found[2:4]
        os.kill(pids[0], signal.SIGKILL)
        yield from found[4:8]
        pids.append(first_worker(pool.ray))
        cluster.remove_node(more, allow_graceful=False)
        yield from found[8:]

    answered = list(pool.answer(images(), 2))
    assert answered == list(answer_here(Learner.load(model, device="cpu"), found, 2, 3))
    assert sum(len(part.answers) for part in answered) == 10 and pids[0] != pids[1]


class OftenOutOfReach:
    """Ray, but two answers in three cannot be had, as if their worker could not be reached."""

    def __init__(self, ray: Any) -> None:
        self.ray, self.calls = ray, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ray, name)

    def get(self, answer: Any) -> Any:
        self.calls += 1
        if self.calls % 3:
            raise self.ray.exceptions.ActorUnavailableError("out of reach", None)
        return self.ray.get(answer)


def test_a_worker_out_of_reach_is_asked_again(cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpl.bulk.TICK", 0.01)
    found, pool = images_of(model), WorkerPool(model, None, "cpu", 3, None)
    pool.ray = OftenOutOfReach(pool.ray)
    assert list(pool.answer(found, 4)) == list(answer_here(Learner.load(model, device="cpu"), found, 4, 3))
    assert pool.ray.calls == 9  # three batches


def test_answers_of_another_job_are_not_gone_on_with(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    assert predict(model, "--out", file).exit_code == 0
    before = file.read_text()
    assert "12 images, 12 of them before; 2 could not be read" in predict(model, "--out", file).stdout
    refused = predict(model, "--out", file, "--top", "1")
    assert isinstance(refused.exception, TplError) and "made with another top" in str(refused.exception)
    (model.parent / "inbox" / "ant.png").write_bytes(b"")  # the first now
    refused = predict(model, "--out", file)
    (model.parent / "inbox" / "ant.png").unlink()
    assert isinstance(refused.exception, TplError) and "made from other images: line 1 is of" in str(refused.exception)
    assert file.read_text() == before
    (tmp_path / "answers.jsonl.job.json").unlink()
    refused = predict(model, "--out", file)
    assert isinstance(refused.exception, TplError) and "nothing says what it was made with" in str(refused.exception)
    for more, message in ((["--csv"], "--out writes JSON lines"), (["--address", "head:1"], "not for --engine local")):
        refused = predict(model, "--out", file, *more)
        assert isinstance(refused.exception, TplError) and message in str(refused.exception)


# The last: one machine is gone after it


def test_a_lost_machine_loses_no_run(cluster: Any, tmp_path: Path) -> None:
    jobs = jobs_in(tmp_path, {"a": ["wait", "finish"], "b": ["wait", "finish"]})
    pids: dict[str, int] = {}
    kinds: dict[str, list[str]] = {"a": [], "b": []}
    with closing(engine().run(jobs)) as events:
        for event in events:
            kinds[event.job].append(event.kind)
            if event.kind == "started":
                pids[event.job] = event.data["pid"]
            if kinds == {"a": ["started", "run"], "b": ["started", "run"]}:  # one on each
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            if event.kind == "retried" and "retried" not in kinds["a" if event.job == "b" else "b"]:
                os.kill(pids["a" if event.job == "b" else "b"], signal.SIGKILL)
    life = ["started", "run", "retried", "started", "run", "finished"]
    assert kinds == {"a": life, "b": life}
    assert [len(attempts(tmp_path / name)) for name in "ab"] == [2, 2]
