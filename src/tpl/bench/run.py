"""A run: one method on one benchmark, in a directory that records everything and from which it can be resumed.

run.json        what was run: benchmark, method, options (and which of them the benchmark set), seed, class order,
                encoder and data hashes, machine, whether the encoder's pre-training had the same classes
events.jsonl    what happened, one event a line
stages/000.json accuracies after task 0, and so on
model/          the model directory after the newest task, unless the run was told to keep none
results.json    the metrics and accuracy matrices of a finished run (cil.csv, til.csv, tp.csv beside it), also those of
                the parts of a prediction, where a method has several; a stage that was left out has an empty row
"""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from tpl.bench.evaluate import Evaluator
from tpl.bench.results import (
    RunResult,
    describe_environment,
    numbers_so_far,
    read_description,
    stage_file,
    summarise,
    write_stage,
)
from tpl.bench.spec import RunSpec
from tpl.bench.trackers import TrackedRun, Tracking, check_trackers, epochs_of, flat
from tpl.engine import FREQUENT, Callback, Event, RunLabel, current, labelled, no_callback
from tpl.errors import TplError
from tpl.files import replace_atomically
from tpl.learner import Learner, learn_side_by_side
from tpl.pretraining import weights_status
from tpl.store import ModelStore
from tpl.stream import Stream, Task, fingerprint

__all__ = ["RunError", "RunSpec", "data_hashes", "execute", "execute_together"]


class RunError(TplError):
    """A run cannot start or go on."""


def execute(
    spec: RunSpec, out: Path, resume: bool = False, callback: Callback = no_callback, track: Sequence[str] = ()
) -> RunResult:
    """Run `spec` in the directory `out`; an interrupted run continues after its last finished task."""
    return execute_together([spec], [out], resume, callback, track)[0]


def execute_together(
    specs: Sequence[RunSpec],
    places: Sequence[Path],
    resume: bool = False,
    callback: Callback = no_callback,
    track: Sequence[str] = (),
    keep_model: bool = True,
) -> list[RunResult]:
    """Make several runs side by side, e.g. all class orders of a protocol: on a GPU they share forward passes.

    Every run has its own directory, as if it had run alone; one that fails does not stop the others, and its error is
    raised when they are finished. `callback` gets the events of all runs, with labels if there are several; `track`
    names trackers (see `tpl.bench.trackers`) for every run. In a group of processes all train, and the first one does
    everything else. Without `keep_model` no model is stored, and an interrupted run begins again.
    """
    check_trackers(track)
    for spec in specs:
        spec.check()
    labels = _labels(specs, places)
    processes = current()
    kind = OpenRun if processes.leads else FollowedRun
    with ExitStack() as open_runs:
        with processes.first_before_others():
            runs = [
                open_runs.enter_context(kind(*pair, resume, keep_model)) for pair in zip(specs, places, strict=True)
            ]
        going = [run for run in runs if not run.finished]
        for number, run in enumerate(runs):
            if run in going:
                run.begin(labelled(callback, labels[number]), track)
        if processes.leads:
            for number, run in enumerate(going):
                run.evaluator.beside = [earlier.evaluator for earlier in going[:number]]
        failed: dict[OpenRun, Exception] = {}
        for stage in range(max((len(run.stream) for run in going), default=0)):
            active = [run for run in going if stage < len(run.stream) and run not in failed]
            tasks = [run.next_task() for run in active]
            pairs = [pair for pair in zip(active, tasks, strict=True) if stage >= pair[0].learned]
            failed |= _learn_stage(stage, pairs)
            for run in active:
                if run not in failed:
                    run.evaluate(stage)
    with processes.first_before_others():
        results = [run.result() for run in runs if run not in failed]
    if failed:
        raise _error_of(failed, runs)
    return results


def _learn_stage(stage: int, pairs: list[tuple[OpenRun, Task]]) -> dict[OpenRun, Exception]:
    """Learn a task in every run, side by side; if that fails, each run tries alone. Returns the errors of runs."""
    error = _learn_all_or_none(stage, pairs)
    if error is None:
        return {}
    if len(pairs) == 1:
        return {pairs[0][0]: error}
    failed = {run: error for pair in pairs for run, error in _learn_stage(stage, [pair]).items()}
    for run, error in failed.items():
        run.emit(Event("warning", {"text": f"This run ends here: {error}"}))
    return failed


def _learn_all_or_none(stage: int, pairs: list[tuple[OpenRun, Task]]) -> Exception | None:
    """Learn a task in every run, and store it; returns the error if that fails."""
    if not pairs:
        return None
    started = time.perf_counter()
    runs, tasks = zip(*pairs, strict=True)
    shares, callbacks = [run.spec.held_out for run in runs], [run.emit for run in runs]
    try:
        learn_side_by_side([run.learner for run in runs], tasks, shares, callbacks)
    except Exception as error:
        if not current().alone:  # the other processes would wait for this one
            raise
        return error
    for run, task in pairs:
        if task.more is not None and run.learner.method.can_update:  # other methods do without these images
            run.learner.update(task.more, held_out=run.spec.held_out)
    for run in runs:
        run.keep(stage, seconds=(time.perf_counter() - started) / len(runs), together=len(runs))
    return None


def _error_of(failed: dict[OpenRun, Exception], runs: Sequence[OpenRun]) -> Exception:
    """What to raise for runs that failed: the error of one run, or all of them in words; a defect as it is."""
    first = next((error for error in failed.values() if not isinstance(error, TplError)), next(iter(failed.values())))
    if len(runs) == 1:
        return first
    finished = ", ".join(str(run.out) for run in runs if run not in failed) or "none"
    if not isinstance(first, TplError):
        first.add_note(f"Finished runs: {finished}.")
        return first
    reasons = [f"{run.out}: {error}" for run, error in failed.items()]
    return RunError("\n".join([f"{len(failed)} of {len(runs)} runs failed.", *reasons, f"Finished runs: {finished}."]))


class OpenRun:
    """A run in progress: its stream, its learner and its files."""

    learner: Learner
    emit: Callback

    def __init__(self, spec: RunSpec, out: Path, resume: bool, keep_model: bool = True) -> None:
        self.spec, self.out, self.keep_model = spec, out, keep_model
        self.check_directory(resume)
        self.stream, self.learner = spec.stream(), spec.learner()
        if not current().alone:
            self.learner.method.check_splits()
        self.store = ModelStore(out / "model")
        self.skipped = self.learner.method.first_stage(len(self.stream))  # stages before it are left out
        self.learned = 0  # number of stages that were left out, or that an earlier process has learned
        self.trained: dict[str, Any] = {}
        self.losses: list[list[float]] = []  # of every training of the task, one number an epoch
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.enter_context(self.store.writing())
            _write_description(self.spec, self.out, self.stream, self.learner)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()
        # Networks and test images may fill a GPU: free them now, not with the last reference to this run.
        for name in ("learner", "evaluator", "emit"):
            self.__dict__.pop(name, None)
        gc.collect()

    @property
    def finished(self) -> bool:
        """Whether the run has its results."""
        return (self.out / "results.json").exists()

    def check_directory(self, resume: bool) -> None:
        """Create the run's directory; refuse one that holds a run, unless that is to be resumed."""
        if (self.out / "run.json").exists() and not resume:
            raise RunError(
                f"{self.out} already holds a run. Continue it with --resume, or choose another place with --out."
            )
        try:
            (self.out / "stages").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.out} cannot be made: {error}.") from error

    def take_up(self) -> None:
        """Load what an earlier process has learned."""
        spec = self.spec
        commits = int(self.store.header()["commits"]) if self.store.exists() else 0
        self.learned = self.skipped + commits
        if commits:
            self.learner = Learner.load(self.store.path, spec.weights, spec.device, spec.precision, spec.compile)
        self.tasks = enumerate(self.stream.once())

    def begin(self, callback: Callback, track: Sequence[str] = ()) -> None:
        """Load what an earlier process has learned, open the event log, and emit the first event."""
        self.take_up()
        spec = self.spec
        self.learner.method.compute.forget_peak_memory()
        self.evaluator = Evaluator(self.stream, self.learner.method)
        events = self.out / "events.jsonl"
        tracked = self._tracked(events) if track else None
        log = self._open.enter_context(EventLog(events, callback))
        tracking = Tracking(track, tracked, log) if tracked else None
        if tracking:
            self._open.callback(tracking.close)

        def emit(event: Event) -> None:
            if event.kind == "task":
                self.trained, self.losses = {}, []
            elif event.kind == "epoch":
                if event.data["epoch"] == 1 or not self.losses:
                    self.losses.append([])
                self.losses[-1].append(event.data["loss"])
            elif event.kind == "trained":  # some methods train twice a task
                before = {"images": 0, "steps": 0, "seconds": 0.0} | self.trained
                self.trained = event.data | {k: before[k] + event.data[k] for k in ("images", "steps", "seconds")}
            log(event)
            if tracking:
                tracking(event)

        self.emit = emit
        emit(Event("run", _plan(spec, self.out, self.stream, self.learner, self.learned)))
        _warn_about_contamination(spec, emit)

    def _tracked(self, events: Path) -> TrackedRun:
        """What trackers know of this run before it begins."""
        description = read_description(self.out)
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        return TrackedRun(self.out, flat(description), self.learned, epochs_of(lines, self.learned), bool(lines))

    def next_task(self) -> Task:
        """The task of the next stage; for a cumulative method, the union of all tasks up to it."""
        stage, task = next(self.tasks)
        return self.stream.union(stage) if self.learner.method.cumulative else task

    def keep(self, stage: int, seconds: float, together: int) -> None:
        """Save what was learned; `seconds` is this run's share of the time that `together` runs took."""
        content = {"seconds_learning": seconds, "together": together, "trained": self.trained, "losses": self.losses}
        # Before the model's commit: whenever the run is interrupted, every task in the model has its stage file.
        write_stage(self.out, stage, content)
        if self.keep_model:
            self.learner.save(self.store.path, versions=0)

    def evaluate(self, stage: int) -> None:
        """Measure a stage, unless it is left out or was measured before the run was interrupted."""
        if stage < self.skipped:
            return
        content = json.loads(stage_file(self.out, stage).read_text(encoding="utf-8"))
        if "cil" in content:
            return
        started, method = time.perf_counter(), self.learner.method
        content |= dataclasses.asdict(self.evaluator.stage(stage))
        content["seconds_evaluation"] = time.perf_counter() - started
        content["memory_images"] = len(method.memory) if method.memory else 0
        content["memory_bytes"] = method.memory_bytes
        content["parameters"], content["network_bytes"] = method.size()
        content["capacity"] = method.capacity()
        content["weighting"] = method.weighting()
        content["covariance_estimators"] = method.covariance_estimators()
        content["peak_device_bytes"] = method.compute.peak_memory()
        write_stage(self.out, stage, content)
        so_far = {"stages": len(self.stream), "so_far": numbers_so_far(self.out, stage)}
        self.emit(Event("stage", {"stage": stage} | {kind: content[kind] for kind in ("cil", "til", "tp")} | so_far))

    def result(self) -> RunResult:
        """The result of the finished run; it is written if it is not there yet."""
        if self.finished:
            return RunResult.read(self.out)
        result = summarise(self.out)
        result.write(self.out)
        return result


class FollowedRun(OpenRun):
    """A run in one of several processes that train together: the first one writes files, measures and emits events."""

    emit = staticmethod(no_callback)

    def __enter__(self) -> Self:
        return self

    def check_directory(self, resume: bool) -> None:
        """Done by the first process."""

    def begin(self, callback: Callback, track: Sequence[str] = ()) -> None:
        """Load what an earlier process has learned."""
        self.take_up()

    def keep(self, stage: int, seconds: float, together: int) -> None:
        """Done by the first process."""

    def evaluate(self, stage: int) -> None:
        """Done by the first process, with the same network."""

    def result(self) -> RunResult:
        """The result that the first process has written."""
        return RunResult.read(self.out)


def _labels(specs: Sequence[RunSpec], places: Sequence[Path]) -> list[RunLabel]:
    """Labels for runs side by side: by method and class order where these differ, else by directory name."""
    count = len(specs)
    if count == 1:
        return [RunLabel()]
    differing = [column for column in zip(*((s.method, s.order) for s in specs), strict=True) if len(set(column)) > 1]
    names = [", ".join(parts) for parts in zip(*differing, strict=True)]
    if len(set(names)) < count:
        names = [place.name for place in places]
    return [RunLabel(name, number, count, together=count) for number, name in enumerate(names)]


def _plan(spec: RunSpec, out: Path, stream: Stream, learner: Learner, learned: int) -> dict[str, Any]:
    """The content of the `run` event: what this process is about to do, and where."""
    images = [len(task.train) for task in stream]
    if learner.method.cumulative:
        first = learner.method.first_stage(len(images))
        images = [sum(images[: t + 1]) if t >= first else 0 for t in range(len(images))]
    environment = describe_environment(learner.method.compute.device)
    work = {"directory": str(out), "method": spec.method, "images": images, "learned": learned}
    return work | {"environment": environment}


def _warn_about_contamination(spec: RunSpec, emit: Callback) -> None:
    if shared := spec.contamination():
        what = f"{spec.encoder} was pre-trained on {' and '.join(shared)}"
        text = f"{what}, which contains or closely resembles these images: do not compare."
        emit(Event("warning", {"text": text}))


class EventLog:
    """An event callback that appends events to a file, one JSON object a line, and passes them on."""

    def __init__(self, file: Path, callback: Callback) -> None:
        self.file, self.callback = file, callback

    def __enter__(self) -> Callback:
        self.stream = self.file.open("a", encoding="utf-8")
        return self._write

    def __exit__(self, *problem: object) -> None:
        self.stream.close()

    def _write(self, event: Event) -> None:
        if event.kind not in FREQUENT:
            self.stream.write(json.dumps({"time": time.time(), "kind": event.kind} | event.data) + "\n")
            self.stream.flush()
        self.callback(event)


def _write_description(spec: RunSpec, out: Path, stream: Stream, learner: Learner) -> None:
    """Write run.json, or check that a run to be resumed has these settings."""
    encoder = learner.method.encoder
    what = {
        "benchmark": spec.benchmark,
        "method": spec.method,
        "options": spec.all_options(),
        "benchmark_options": spec.benchmark_options(),  # those of them that the benchmark set
        "seed": spec.seed,
        "order": spec.order,
        "classes": [list(task.classes) for task in stream],
        "test_images": [len(task.test) if task.test is not None else 0 for task in stream],
        "validation": spec.validation,
        "held_out": spec.held_out,
        "encoder": {"name": encoder.name, "sha256": encoder.sha256},
        "encoder_weights": weights_status(encoder.name, encoder.sha256),  # known by their hash, or unverified
        "contamination": spec.contamination(),  # data sets of its pre-training that share these classes
        "data": data_hashes(stream),
        "precision": "bf16" if learner.method.compute.bf16 else "fp32",
    }
    file = out / "run.json"
    if file.exists():
        before = {"held_out": 0.0} | read_description(out)  # earlier versions held nothing out
        for key in ("contamination", "encoder_weights"):  # and did not record these
            before.setdefault(key, what[key])
        before["benchmark_options"] = what["benchmark_options"]  # not in older files; `options` says what was run
        differing = [k for k in what if before.get(k) != json.loads(json.dumps(what[k]))]
        if differing:
            raise RunError(f"{out} was started with other settings ({', '.join(differing)}); it cannot be resumed so.")
        return
    what["environment"] = describe_environment(learner.method.compute.device)
    replace_atomically(file, json.dumps(what, indent=2) + "\n")


def data_hashes(stream: Stream) -> dict[str, str]:
    """Hashes of the training and of the test images of all tasks."""
    return {"train": fingerprint([t.train for t in stream]), "test": fingerprint([t.test for t in stream])}
