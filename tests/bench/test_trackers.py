"""Trackers hear what a run tells, go on where an interrupted run stopped, and never stop a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpl import TplError
from tpl.bench import trackers
from tpl.bench.engines import Job
from tpl.bench.run import RunSpec, execute
from tpl.bench.trackers import TRACKERS, TrackedRun, Tracker, Tracking, check_trackers, epochs_of, flat
from tpl.bench.trackers.base import LOSS, Numbers
from tpl.engine import Event


class Notes(Tracker):
    """A tracker that writes down what it hears."""

    package, extra = "json", "none"
    heard: list[tuple[Any, ...]]

    def __init__(self, where: str, run: TrackedRun) -> None:
        if where == "broken":
            raise ConnectionError("nobody there")
        Notes.heard = [("open", where, run.settings["method"], run.learned)]

    def stage(self, task: int, numbers: Numbers) -> None:
        self.heard.append(("stage", task, dict(numbers)))

    def loss(self, epoch: int, value: float) -> None:
        self.heard.append(("loss", epoch, value))

    def close(self, finished: bool) -> None:
        self.heard.append(("close", finished))


def tracked(place: Path, learned: int = 0, epochs: int = 0) -> TrackedRun:
    return TrackedRun(place, {"method": "tpl", "options.lr": 0.1}, learned, epochs, bool(learned))


def tell(tracking: Tracking, task: int, losses: list[float], last: float | None) -> None:
    for value in losses:
        tracking(Event("epoch", {"epoch": 1, "epochs": 2, "loss": value}))
    if last is not None:
        tracking(Event("stage", {"stage": task, "stages": 2, "so_far": {"last": last, "aia": last}}))


def test_a_run_tells_its_settings_and_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "notes", Notes)
    spec = RunSpec("digits-5t", "slda", tasks=1, device="cpu")  # it has no epochs: quick
    warnings: list[str] = []

    def callback(event: Event) -> None:
        warnings.extend([event.data["text"]] if event.kind == "warning" else [])

    result = execute(spec, tmp_path / "run", callback=callback, track=["notes:broken", "notes:here"])
    kinds = [entry[0] for entry in Notes.heard]
    assert kinds == ["open", "stage", "close"] and Notes.heard[0] == ("open", "here", "slda", 0)
    _, task, numbers = Notes.heard[1]
    assert task == 1 and Notes.heard[2] == ("close", True)
    for key in ("last", "aia", "til", "tp", "forgetting_classic", "parameters"):
        assert numbers[key] == pytest.approx(result.summary[key])
    assert warnings == ["--track notes:broken has stopped: ConnectionError: nobody there"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    stage = next(line for line in lines if line["kind"] == "stage")  # the file has it all, trackers or not
    assert stage["so_far"] == numbers and stage["stages"] == 1


def test_losses_count_over_all_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "notes", Notes)
    tracking = Tracking(["notes"], tracked(tmp_path, learned=1, epochs=7), print)
    tell(tracking, 1, [1.0, 0.5], None)
    tracking.close()
    assert Notes.heard[1:] == [("loss", 8, 1.0), ("loss", 9, 0.5), ("close", False)]  # interrupted


def test_a_tracker_that_fails_midway_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "notes", Notes)
    warnings: list[Event] = []
    tracking = Tracking(["notes"], tracked(tmp_path), warnings.append)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Notes, "loss", fail)
    tell(tracking, 0, [1.0, 0.5], 0.9)
    tracking.close()
    assert [event.data["text"] for event in warnings] == ["--track notes has stopped: OSError: the disk is full"]
    assert [entry[0] for entry in Notes.heard] == ["open"]


def test_epochs_of_interrupted_attempts_do_not_count() -> None:
    events: list[dict[str, Any]] = [{"kind": "run", "learned": 0}, {"kind": "task"}]
    events += [{"kind": "epoch"}] * 3 + [{"kind": "stage", "stage": 0}, {"kind": "task"}, {"kind": "epoch"}]
    events += [{"kind": "run", "learned": 1}, {"kind": "task"}, *[{"kind": "epoch"}] * 2, {"kind": "stage", "stage": 1}]
    lines = [json.dumps(event) for event in events]
    assert [epochs_of([*lines, '{"kind": "epo'], learned) for learned in (0, 1, 2)] == [0, 3, 5]


def test_settings_are_flat() -> None:
    content = {
        "method": "tpl",
        "options": {"lr": 0.1, "beta": None},
        "classes": [["a", "b"], ["c"]],
        "data": None,
    }
    assert flat(content) == {
        "method": "tpl", "options.lr": 0.1, "options.beta": "null", "classes_per_task": "[2, 1]", "data": "null",
    }  # fmt: skip


def test_trackers_that_cannot_be_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TplError, match="no tracker 'nonsense'; there are tensorboard, mlflow, wandb"):
        execute(RunSpec("digits-5t"), tmp_path / "run", track=["nonsense:x"])
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(TplError, match=r"--track wandb needs the package wandb: pip install 'tpl-cil\[wandb\]'"):
        check_trackers(["wandb:project"])


def test_a_job_of_a_suite_carries_its_trackers(tmp_path: Path) -> None:
    job = Job.of(RunSpec("digits-5t"), tmp_path / "run", ["tensorboard:/there"])
    assert Job.from_json(job.to_json()) == job and job.track == ["tensorboard:/there"]
    old = json.loads(job.to_json())
    del old["track"]
    assert Job(**old).track == []


@pytest.mark.parametrize("where", ["", "elsewhere"])
def test_tensorboard_has_every_number_once_after_a_resume(where: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place, folder = tmp_path / "run", str(tmp_path / where) if where else ""
    name = f"tensorboard:{folder}" if where else "tensorboard"
    first = Tracking([name], tracked(place), print)
    tell(first, 0, [1.0, 0.5], 0.9)
    tell(first, 1, [9.0], None)  # interrupted while the second task was trained
    first.close()
    second = Tracking([name], tracked(place, learned=1, epochs=2), print)
    tell(second, 1, [0.8, 0.4], 0.8)
    second.close()
    root = Path(folder) / "run" if where else place / "tensorboard"
    stages, training = (EventAccumulator(str(path)).Reload() for path in (root, root / "training"))
    assert [(e.step, round(e.value, 4)) for e in stages.Scalars("last")] == [(1, 0.9), (2, 0.8)]
    assert [(e.step, round(e.value, 4)) for e in training.Scalars(LOSS)] == [(1, 1.0), (2, 0.5), (3, 0.8), (4, 0.4)]
    text = stages.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| options.lr | 0.1 |" in text


def test_mlflow_goes_on_in_the_same_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    name = f"mlflow:{tmp_path / 'store'}"
    for learned, epochs, last in ((0, 0, 0.9), (1, 2, 0.8)):
        tracking = Tracking([name], tracked(tmp_path / "run", learned, epochs), print)
        tell(tracking, learned, [1.0, 0.5], last)
        tracking.close()
    client = mlflow.MlflowClient((tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("tpl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["options.lr"] == "0.1" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "last")
    assert [(m.step, m.value) for m in history] == [(1, 0.9), (2, 0.8)]
    assert [m.step for m in client.get_metric_history(run.info.run_id, LOSS)] == [1, 2, 3, 4]


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    place = tmp_path / "run"
    place.mkdir()
    tracking = Tracking(["wandb:project"], tracked(place), print)
    tell(tracking, 0, [1.0, 0.5], 0.9)
    tracking.close()
    assert list(place.glob("wandb/offline-run-*/*.wandb"))
