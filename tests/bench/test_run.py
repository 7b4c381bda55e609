"""A run and its directory: complete, consistent, and the same whether or not it was interrupted."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pictures import photos
from small_encoder import SMALL_VIT
from tpl import Learner, TplError
from tpl.bench import metrics, results
from tpl.bench.benchmarks import BENCHMARKS
from tpl.bench.evaluate import Evaluator
from tpl.bench.results import KINDS, RunResult, _loss_by_epoch
from tpl.bench.run import RunError, execute
from tpl.bench.spec import RunSpec
from tpl.engine import Event
from tpl.nets import create_encoder
from tpl.pretraining import pretrained_on
from tpl.report import markdown, summary_rows

TRAINING: dict[str, Any] = {"epochs": 1, "latent": 8, "batch_size": 32}
OPTIONS: dict[str, Any] = TRAINING | {"memory": 20}
SPEC = RunSpec("digits-5t", encoder=SMALL_VIT, tasks=2, device="cpu", options=OPTIONS)


class Whole:
    """An uninterrupted run: where it is, what it measured, what it told."""

    def __init__(self, place: Path) -> None:
        self.place, self.events = place, list[Event]()
        self.result = execute(SPEC, place, callback=self.events.append)
        self.answers = answers(place)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    spec = RunSpec("digits-5t", "joint", SMALL_VIT, tasks=2, device="cpu", options=TRAINING)
    return execute(spec, tmp_path_factory.mktemp("joint") / "run")


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    spec = RunSpec("digits-5t", "finetune", SMALL_VIT, tasks=1, validation=0.2, device="cpu", options=TRAINING)
    return execute(spec, tmp_path_factory.mktemp("validated") / "run")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose second task was interrupted while it was being trained."""
    place = tmp_path_factory.mktemp("interrupted") / "run"
    epochs = 0

    def interrupt(event: Event) -> None:
        nonlocal epochs
        epochs += event.kind == "epoch"
        if epochs == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(SPEC, place, callback=interrupt)
    return place


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def refuse_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(*_: object) -> None:
        raise AssertionError("nothing may be trained here")

    monkeypatch.setattr(Learner, "learn", learn)


def answers(place: Path) -> torch.Tensor:
    """log P(class | image) of a run's model, on the test images of all its tasks."""
    images = SPEC.stream().union(1).test
    assert images is not None
    return Learner.load(place / "model", device="cpu").log_probabilities(images)


def assert_same_run(place: Path, whole: Whole) -> None:
    """The same matrices, and bit for bit the same answers."""
    assert read(place / "results.json")["matrices"] == read(whole.place / "results.json")["matrices"]
    assert torch.equal(answers(place), whole.answers)


def test_the_description_says_what_was_run(whole: Whole) -> None:
    run = read(whole.place / "run.json")
    assert (run["benchmark"], run["method"], run["seed"], run["order"]) == ("digits-5t", "tpl", 0, "natural")
    assert run["options"] == SPEC.all_options()
    assert run["options"] | OPTIONS == run["options"]
    assert run["benchmark_options"] == {"lr": 0.05}  # all else that digits-5t sets was given
    assert run["classes"] == [["0", "1"], ["2", "3"]]
    assert run["encoder"] == {"name": SMALL_VIT, "sha256": create_encoder(SMALL_VIT).sha256}
    assert run["test_images"] == [len(task.test or ()) for task in SPEC.stream()]
    assert set(run["data"]) == {"train", "test"}
    assert all(len(bytes.fromhex(digest)) == 32 for digest in run["data"].values())
    assert run["precision"] == "fp32"
    assert run["environment"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert run["environment"]["device"].startswith("cpu")
    assert whole.result.description == run


@pytest.mark.parametrize(
    ("stages", "mean"),
    [
        ([[[3.0, 1.0]], [[5.0, 2.0], [9.0]]], [4.0, 1.5]),  # the second task has a further training
        ([[[3.0, 2.0]], []], [3.0, 2.0]),  # only the first task is trained
        ([[], []], None),  # nothing was trained
        ([[[3.0]], None], None),  # a stage of an earlier version
        ([[[3.0]], [[5.0, 2.0]]], None),  # of different lengths
    ],
)
def test_losses_are_means_over_tasks(stages: list[list[list[float]] | None], mean: list[float] | None) -> None:
    assert _loss_by_epoch(stages) == mean


def test_every_event_is_one_line_of_json(whole: Whole) -> None:
    lines = (whole.place / "events.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    assert [e["kind"] for e in logged] == [e.kind for e in whole.events if e.kind != "prepare"]
    assert [e["kind"] for e in logged if e["kind"] != "warning"] == [
        "run", *(["task", "epoch", "trained", "capacity", "stage"] * 2)
    ]  # fmt: skip
    assert all(a["time"] <= b["time"] for a, b in pairwise(logged))


def test_the_directory_holds_stages_matrices_and_the_model(whole: Whole) -> None:
    assert sorted(f.name for f in (whole.place / "stages").iterdir()) == ["000.json", "001.json"]
    for t in range(2):
        stage = read(whole.place / "stages" / f"{t:03d}.json")
        for kind in KINDS:
            assert stage[kind] == whole.result.matrices[kind][t, : t + 1].tolist()
        assert stage["seconds_learning"] > 0 and stage["seconds_evaluation"] > 0
        assert stage["memory_images"] == 20 and stage["memory_bytes"] > 0
        assert len(stage["covariance_estimators"]) == t + 1 and set(stage["covariance_estimators"]) <= {"none", "oas"}
        assert stage["trained"]["steps"] > 0
    logged = [e.data["loss"] for e in whole.events if e.kind == "epoch"]
    assert [read(whole.place / "stages" / f"{t:03d}.json")["losses"] for t in range(2)] == [[[x]] for x in logged]
    assert whole.result.summary["loss_by_epoch"] == [pytest.approx(sum(logged) / 2)]
    summary = whole.result.summary
    assert summary["covariance_estimators"] == stage["covariance_estimators"]
    assert summary["network_bytes"] > 4 * summary["parameters"]  # whitening matrices are float64
    assert summary["network_and_memory_bytes"] == summary["network_bytes"] + summary["memory_bytes"]
    assert summary["steps_per_task"] == stage["trained"]["steps"]  # tasks of equally many batches
    for kind in KINDS:
        with (whole.place / f"{kind}.csv").open(encoding="utf-8", newline="") as stream:
            header, *rows = csv.reader(stream)
        assert header == ["stage", "task 0", "task 1"]
        assert [row[0] for row in rows] == ["0", "1"]
        assert rows[0][2] == ""  # task 1 was not there yet
        cells = [float(rows[0][1]), *map(float, rows[1][1:])]
        assert cells == pytest.approx(whole.result.matrices[kind][[0, 1, 1], [0, 0, 1]], abs=1e-6)
    assert Learner.load(whole.place / "model", device="cpu").classes_ == ["0", "1", "2", "3"]


def test_the_numbers_follow_from_the_matrices(whole: Whole) -> None:
    summary, matrices, sizes = whole.result.summary, whole.result.matrices, whole.result.sizes
    confusion, known = whole.result.task_confusion, whole.result.class_accuracy
    assert confusion is not None and known is not None
    assert np.diag(confusion) / sizes == pytest.approx(matrices["tp"][-1])
    assert [len(row) for row in known] == [2, 4] and [sum(row) for row in confusion] == sizes
    read_back = RunResult.read(whole.place)
    assert (read_back.task_confusion, read_back.class_accuracy) == (confusion, known)
    assert summary["last"] == metrics.last(matrices["cil"], sizes)
    assert summary["aia"] == metrics.average_incremental(matrices["cil"], sizes)
    assert (summary["til"], summary["tp"]) == tuple(metrics.last(matrices[k], sizes) for k in ("til", "tp"))
    assert matrices["cil"][0, 0] == matrices["til"][0, 0]  # with one task there is nothing to confuse it with
    assert matrices["tp"][0, 0] == 1.0
    known = np.tril(np.ones((2, 2), dtype=bool))
    assert (matrices["cil"][known] <= matrices["til"][known]).all()
    assert (matrices["cil"][known] <= matrices["tp"][known]).all()
    assert all(np.isnan(m[~known]).all() for m in matrices.values())
    assert summary["last"] > 0.5  # chance is 1/4
    assert summary["memory_images"] == 20


def test_a_result_read_back_is_the_result(whole: Whole) -> None:
    again = RunResult.read(whole.place)
    assert (again.description, again.summary) == (whole.result.description, whole.result.summary)
    for kind in KINDS:
        np.testing.assert_array_equal(again.matrices[kind], whole.result.matrices[kind])


def test_an_unfinished_directory_is_no_result(interrupted: Path, tmp_path: Path) -> None:
    for place in (interrupted, tmp_path):
        with pytest.raises(TplError, match="holds no finished run"):
            RunResult.read(place)


def test_a_finished_run_is_neither_overwritten_nor_repeated(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_training(monkeypatch)
    with pytest.raises(RunError, match=r"--resume.*--out"):
        execute(SPEC, whole.place)

    def times() -> dict[Path, int]:  # a lock may be touched: nothing is written into it
        return {f: f.stat().st_mtime_ns for f in whole.place.rglob("*") if f.is_file() and f.name != ".lock"}

    before = times()
    again = execute(SPEC, whole.place, resume=True)
    assert again.summary == whole.result.summary
    assert times() == before


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_run_is_not_resumed_with_other_settings(
    state: str, whole: Whole, interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_training(monkeypatch)
    place = whole.place if state == "finished" else interrupted
    before = (place / "run.json").read_bytes()
    other = replace(SPEC, seed=1, options=OPTIONS | {"lr": 0.01})
    with pytest.raises(RunError, match=r"\(options, seed\)"):
        execute(other, place, resume=True)
    longer = replace(SPEC, tasks=3)
    with pytest.raises(RunError, match=r"\(classes, test_images, data\)"):
        execute(longer, place, resume=True)
    assert (place / "run.json").read_bytes() == before


def test_interrupted_while_training_then_resumed_is_the_same_run(
    interrupted: Path, whole: Whole, tmp_path: Path
) -> None:
    assert read(interrupted / "model" / "model.json")["commits"] == 1  # nothing of the second task
    place = Path(shutil.copytree(interrupted, tmp_path / "run"))
    told: list[Event] = []
    execute(SPEC, place, resume=True, callback=told.append)
    assert [e.data["classes"] for e in told if e.kind == "task"] == [["2", "3"]]  # the first is not trained again
    assert_same_run(place, whole)


def test_interrupted_right_after_the_commit_then_resumed_is_the_same_run(
    interrupted: Path, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(shutil.copytree(interrupted, tmp_path / "run"))
    save = Learner.save

    def save_then_stop(self: Learner, path: Path | str, **options: Any) -> None:
        save(self, path, **options)
        raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "save", save_then_stop)  # the model is there, and that is all
        with pytest.raises(KeyboardInterrupt):
            execute(SPEC, place, resume=True)
    refuse_training(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "stage", stop)  # stopped once more, before anything was measured
        with pytest.raises(KeyboardInterrupt):
            execute(SPEC, place, resume=True)
    assert not (place / "results.json").exists()
    result = execute(SPEC, place, resume=True)
    assert result.summary["seconds_per_task"] > 0
    assert_same_run(place, whole)


def test_killed_then_resumed_is_the_same_run(whole: Whole, tmp_path: Path) -> None:
    place = tmp_path / "run"
    options = [text for name, value in OPTIONS.items() for text in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "small_encoder", "run", "digits-5t", "--encoder", SMALL_VIT, *options]
    command += ["--tasks", "2", "--device", "cpu", "--out", str(place), "--json"]
    paths = os.pathsep.join(path for path in sys.path if path)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(torch.get_num_threads()))
    environment = os.environ | threads | {"PYTHONPATH": paths}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 300
        while not ((place / "stages" / "000.json").exists() and (place / "model" / "model.json").exists()):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (place / "results.json").exists()
    assert execute(SPEC, place, resume=True).summary["last"] == whole.result.summary["last"]
    assert_same_run(place, whole)


def test_validation_measures_on_held_out_training_images(validated: RunResult, whole: Whole) -> None:
    mine, other = validated.description, whole.result.description
    assert mine["validation"] == 0.2 and other["validation"] is None
    trained_on = [len(task.train) for task in SPEC.stream()]
    assert mine["test_images"] == [pytest.approx(trained_on[0] / 5, abs=1)]
    assert mine["test_images"] != other["test_images"][:1]
    one_task = RunSpec("digits-5t", tasks=1).stream()[0]
    held = RunSpec("digits-5t", tasks=1, validation=0.2).stream()[0]
    assert held.test is not None and one_task.test is not None
    assert len(held.train) + len(held.test) == len(one_task.train)
    names = [{images.name(i) for i in range(len(images))} for images in (held.train, held.test, one_task.test)]
    assert not names[0] & names[1] and not (names[0] | names[1]) & names[2]
    assert all(mine["data"][part] != other["data"][part] for part in ("train", "test"))


def test_a_joint_run_gives_the_rectified_forgetting(joint: RunResult, whole: Whole) -> None:
    mine, other = whole.result.matrices["cil"], joint.matrices["cil"]
    forgetting = whole.result.against(joint)
    stages = [np.mean(other[t, : t + 1] - mine[t, : t + 1]) for t in range(2)]
    assert forgetting["forgetting_last"] == pytest.approx(stages[-1])
    assert forgetting["forgetting_aia"] == pytest.approx(np.mean(stages))
    assert joint.against(joint) == {"forgetting_last": 0.0, "forgetting_aia": 0.0}
    assert joint.description["classes"] == whole.result.description["classes"]
    assert joint.summary["memory_images"] == 0


def test_rectified_forgetting_needs_the_same_classes(validated: RunResult, joint: RunResult) -> None:
    with pytest.raises(TplError, match="same classes"):
        joint.against(validated)


def test_the_directory_name_changes_with_whatever_changes_a_number() -> None:
    others = (
        {"seed": 1}, {"order": "random:1"}, {"tasks": 3}, {"validation": 0.1}, {"method": "finetune"},
        {"options": OPTIONS | {"lr": 0.1}},
    )  # fmt: skip
    base: dict[str, Any] = {"benchmark": "digits-5t", "options": OPTIONS}
    finetune = {"method": "finetune", "options": TRAINING}
    names = [RunSpec(**base | (finetune if "method" in other else other)).directory_name() for other in ({}, *others)]
    assert len(set(names)) == len(names)
    assert RunSpec(**base).directory_name() == RunSpec(**base, download=True).directory_name()


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("in the way")
    with pytest.raises(RunError, match="cannot be made"):
        execute(SPEC, file)


def test_the_papers_small_memory_has_a_name() -> None:
    assert RunSpec("c100-10t", options={"memory": "small"}).all_options()["memory"] == 1000
    assert RunSpec("c10-5t", options={"memory": "small"}).all_options()["memory"] == 100
    with pytest.raises(TplError, match="no small memory for digits-5t"):
        RunSpec("digits-5t", options={"memory": "small"}).all_options()


def test_what_a_benchmark_sets_depends_on_method_and_encoder() -> None:
    scratch = RunSpec("c100-10t", encoder="resnet18", options={"memory": "small", "epochs": "3"})
    found = scratch.benchmark_options()
    assert found["lr"] == 0.05 and found["schedule"] == "cosine" and not {"memory", "epochs"} & set(found)
    assert found.items() <= scratch.all_options().items()
    note = scratch.benchmark_note()
    assert note.startswith("c100-10t with resnet18 sets for tpl: lr=0.05, batch_size=64, ")
    assert "nesterov=true" in note and note.endswith(" (change with --set)")
    assert RunSpec("c100-10t", "slda").benchmark_note() == ""  # it has none of these options
    assert "lr" not in RunSpec("c100-10t", "l2p").benchmark_options()  # not meant for its optimiser


def test_the_default_encoder_has_not_seen_the_benchmarks_classes() -> None:
    for name, benchmark in BENCHMARKS.items():
        spec = RunSpec(name)
        assert spec.encoder == benchmark.encoder and spec.contamination() == []
        spec.check_encoder()
    assert RunSpec("digits-5t").encoder == RunSpec("folder").encoder == "compact"
    assert RunSpec("c100-10t").encoder == "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("benchmark", "encoder", "seen"),
    [
        ("c100-10t", "compact", ["cifar100"]),
        ("c10-5t", "compact", ["cifar100"]),
        ("t-5t", "vit_tiny_patch16_224", ["imagenet"]),
        ("t-5t", "photos", ["imagenet", "tiny-imagenet"]),
        ("imagenet380-10t", "photos", ["imagenet"]),
        ("c100-10t", "photos", []),
        ("imagenet380-10t", "deit_small_patch16_224", ["imagenet"]),
        ("t-5t", "compact", []),
        ("t-5t", "deit_small_611", []),
        ("c100-10t", "resnet18:128", []),
    ],
)
def test_an_encoder_that_has_seen_the_classes_must_be_accepted(benchmark: str, encoder: str, seen: list[str]) -> None:
    spec = RunSpec(benchmark, encoder=encoder)
    assert spec.contamination() == seen
    accepted = replace(spec, accept_contaminated_encoder=True)
    accepted.check_encoder()
    assert accepted.directory_name() == spec.directory_name()
    if not seen:
        spec.check_encoder()
        return
    told = " and ".join(pretrained_on(encoder))
    with pytest.raises(TplError, match=f"pre-trained on {told}, .*--accept-contaminated-encoder"):
        spec.check_encoder()


def test_a_run_with_a_contaminated_encoder_carries_the_mark(tmp_path: Path) -> None:
    names = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "owl", "pig"]
    photos(tmp_path / "data" / "train", names, count=3)
    photos(tmp_path / "data" / "test", names, count=1, seed=1)
    spec = RunSpec("c10-5t", "slda", "compact", data=tmp_path / "data", tasks=2, device="cpu")
    with pytest.raises(TplError, match="--accept-contaminated-encoder"):
        execute(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    events: list[Event] = []
    spec = replace(spec, accept_contaminated_encoder=True)
    result = execute(spec, tmp_path / "run", callback=events.append)
    assert any("pre-trained on cifar100" in event.data.get("text", "") for event in events if event.kind == "warning")
    assert read(tmp_path / "run" / "run.json")["contamination"] == ["cifar100"]
    assert result.summary["contamination"] == result.contamination == ["cifar100"]
    assert "| slda † |" in markdown(summary_rows({"slda": result}))
    older = RunResult({k: v for k, v in result.description.items() if k != "contamination"}, {}, {})
    assert older.contamination == ["cifar100"]  # from the declarations: such runs exist


def test_a_run_made_before_the_benchmarks_options_were_stored_is_resumed(interrupted: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(interrupted, tmp_path / "run"))
    description = read(place / "run.json")
    del description["benchmark_options"]
    (place / "run.json").write_text(json.dumps(description), encoding="utf-8")
    assert "benchmark_options" not in execute(SPEC, place, resume=True).description


def test_a_commit_that_was_only_named_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "copy" / "tpl"
    (package / "bench").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(results, "__file__", str(package / "bench" / "results.py"))
    monkeypatch.delenv("TPL_COMMIT", raising=False)
    assert results._commit() == "unknown"
    monkeypatch.setenv("TPL_COMMIT", "c0ffee")
    assert results._commit() == "c0ffee+unverified"
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    (tmp_path / "other").write_text("")
    for command in (["init", "-q"], ["add", "other"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    assert results._commit() == "c0ffee+unverified"  # a checkout of something else around it
    for command in (["add", "."], ["commit", "-qm", "y"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    assert re.fullmatch("[0-9a-f]{40}", results._commit())
    before = results.hash_sources(package)
    (package / "__init__.py").write_text("changed = True\r\n")
    assert results._commit().endswith("+changes") and results.hash_sources(package) != before
    copy = Path(shutil.copytree(package, tmp_path / "elsewhere"))
    (copy / "__init__.py").write_bytes(b"changed = True\n")
    assert results.hash_sources(copy) == results.hash_sources(package)  # whatever the line ends


def test_drift_of_old_features_is_measured_at_every_stage(whole: Whole) -> None:
    drifts = [read(whole.place / "stages" / f"{t:03d}.json")["drift"] for t in range(2)]
    assert drifts == [0.0, 0.0] and whole.result.summary["drift"] == 0.0


@pytest.mark.parametrize("method", ["tpl", "finetune"])
def test_in_a_blurry_run_late_images_update_the_methods_that_can(method: str, tmp_path: Path) -> None:
    spec = replace(
        SPEC, benchmark="digits-blurry", method=method, options=TRAINING if method == "finetune" else OPTIONS
    )
    late = spec.stream()[1].more
    assert late is not None and 0 < len(late.train) < 40 and set(late.classes) <= {"0", "1"}
    result = execute(spec, tmp_path / "run")
    assert len(result.matrices["cil"]) == 2
    records = Learner.load(tmp_path / "run" / "model", device="cpu").tasks_
    expected = len(spec.stream()[0].train) + (len(late.train) if method == "tpl" else 0)
    assert records[0].images == expected
