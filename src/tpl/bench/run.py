"""A run: one method on one benchmark, in a directory that tells everything and can be resumed.

run.json        what was run: benchmark, method, options, seed, class order, encoder and data hashes, machine
events.jsonl    what happened, one event a line
stages/000.json accuracies after task 0, and so on
model/          the model directory after the newest task
results.json    the metrics and accuracy matrices of a finished run (cil.csv, til.csv, tp.csv beside it)
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tpl.bench.benchmarks import Benchmark, find_benchmark
from tpl.bench.environment import describe_environment
from tpl.bench.evaluate import Evaluator
from tpl.bench.results import RunResult, numbers_so_far, summarise
from tpl.bench.trackers import TrackedRun, Tracking, check_trackers, epochs_of, flat
from tpl.engine import Event, Listener, current, silent
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods import find_method, learn_together
from tpl.methods.bank import BankMethod
from tpl.nets import is_resnet
from tpl.nets.compact import NAME as COMPACT
from tpl.store import ModelStore, replace_text
from tpl.stream import Stream, Task, fingerprint

ELSEWHERE = ("data", "download", "weights", "compile")  # what tells runs apart by no number of theirs


SMALL = "small"  # in the place of a memory's size: that of the paper's small-buffer experiments


class RunError(TplError):
    """A run cannot start or go on."""


@dataclass(frozen=True)
class RunSpec:
    """What to run. Everything that can change a number is in here."""

    benchmark: str
    method: str = "tpl"
    encoder: str = COMPACT
    weights: Path | None = None
    data: Path | None = None
    download: bool = False
    order: str = "natural"
    seed: int = 0
    per_task: int | tuple[int, ...] | None = None  # classes a task; None = the benchmark's own
    tasks: int | None = None
    validation: float | None = None
    device: str = "auto"
    precision: str = "auto"
    compile: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    def all_options(self) -> dict[str, Any]:
        """The benchmark's options for this method and encoder, overridden by those given."""
        config = find_method(self.method).config_class
        fields = {f.name for f in dataclasses.fields(config)}
        benchmark = self._benchmark()
        scratch = benchmark.from_scratch if is_resnet(self.encoder) else {}
        prescribed = benchmark.options | benchmark.by_method.get(self.method, {}) | scratch
        merged = {k: v for k, v in prescribed.items() if k in fields} | self.options
        if merged.get("memory") == SMALL:
            merged["memory"] = benchmark.smaller_memory()
        return config.parse(merged).to_dict()

    def stream(self) -> Stream:
        """The benchmark's tasks as this run meets them."""
        return self._benchmark().stream(
            self.data, self.order, self.download, self.per_task, self.tasks, self.validation, self.seed
        )

    def learner(self) -> Learner:
        """A learner that knows nothing yet."""
        return Learner(
            self.method,
            self.encoder,
            self.weights,
            self.device,
            self.precision,
            self.seed,
            self.compile,
            **self.all_options(),
        )

    def directory_name(self) -> str:
        """A name that says what the run is and differs with its settings (not with where data and weights lie)."""
        content = {k: str(v) for k, v in dataclasses.asdict(self).items() if k not in ELSEWHERE}
        content["options"] = json.dumps(self.all_options(), sort_keys=True)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.benchmark}-{self.method}-{self.encoder}-{digest}".replace("/", "_").replace(":", "_")

    def _benchmark(self) -> Benchmark:
        return find_benchmark(self.benchmark)


def execute(
    spec: RunSpec, out: Path, resume: bool = False, listen: Listener = silent, track: Sequence[str] = ()
) -> RunResult:
    """Run `spec` in the directory `out`; an interrupted run goes on where its last task ended."""
    return execute_together([spec], [out], resume, listen, track)[0]


def execute_together(
    specs: Sequence[RunSpec],
    places: Sequence[Path],
    resume: bool = False,
    listen: Listener = silent,
    track: Sequence[str] = (),
) -> list[RunResult]:
    """Several runs in step, e.g. the class orders that a protocol averages over: on a GPU they share its passes.

    Every run has a directory of its own, as if it had run alone. `listen` hears the first of those still to be done,
    and every warning. `track` names trackers (see `tpl.bench.trackers`), which hear every run. Of several processes,
    all train, and the first one does the rest.
    """
    check_trackers(track)
    processes = current()
    kind = OpenRun if processes.leads else FollowedRun
    with ExitStack() as open_runs:
        with processes.first_before_others():
            runs = [open_runs.enter_context(kind(*pair, resume)) for pair in zip(specs, places, strict=True)]
        going = [run for run in runs if not run.finished]
        for run in going:
            run.begin(listen if run is going[0] else _only_warnings(listen), track)
        for stage in range(max((len(run.stream) for run in going), default=0)):
            active = [run for run in going if stage < len(run.stream)]
            tasks = [run.next_task() for run in active]
            _learn_stage(stage, [pair for pair in zip(active, tasks, strict=True) if stage >= pair[0].learned])
            for run in active:
                run.evaluate(stage)
    with processes.first_before_others():
        return [run.result() for run in runs]


def _learn_stage(stage: int, pairs: list[tuple[OpenRun, Task]]) -> None:
    if not pairs:
        return
    started = time.perf_counter()
    runs, tasks = zip(*pairs, strict=True)
    tasks = tuple(dataclasses.replace(task, test=None) for task in tasks)  # a method never gets test images
    learn_together([run.learner.method for run in runs], tasks, [run.tell for run in runs])
    for run in runs:
        run.keep(stage, seconds=(time.perf_counter() - started) / len(runs), together=len(runs))


class OpenRun:
    """A run in progress: its stream, its learner, and the files that tell of it."""

    learner: Learner
    tell: Listener

    def __init__(self, spec: RunSpec, out: Path, resume: bool) -> None:
        self.spec, self.out = spec, out
        self.check_directory(resume)
        self.stream, self.learner = spec.stream(), spec.learner()
        if not current().alone:
            self.learner.method.check_splits()
        self.store = ModelStore(out / "model")
        self.learned = 0  # tasks that an earlier process has learned
        self.trained: dict[str, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.enter_context(self.store.writing())
            _write_description(self.spec, self.out, self.stream, self.learner)
            self._open = opening.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()
        # Networks and test images may fill a GPU: they go now, not when the last name for this run goes.
        for name in ("learner", "evaluator", "tell"):
            self.__dict__.pop(name, None)
        gc.collect()

    @property
    def finished(self) -> bool:
        """Whether all is done."""
        return (self.out / "results.json").exists()

    def check_directory(self, resume: bool) -> None:
        """Make the run's directory, unless another run is there."""
        if (self.out / "run.json").exists() and not resume:
            raise RunError(
                f"{self.out} already holds a run. Continue it with --resume, or choose another place with --out."
            )
        try:
            (self.out / "stages").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{self.out} cannot be made: {error}.") from error

    def take_up(self) -> None:
        """Know what an earlier process has learned."""
        spec = self.spec
        self.learned = int(self.store.header()["commits"]) if self.store.exists() else 0
        if self.learned:
            self.learner = Learner.load(self.store.path, spec.weights, spec.device, spec.precision, spec.compile)
        self.tasks = enumerate(self.stream.once())

    def begin(self, listen: Listener, track: Sequence[str] = ()) -> None:
        """Take up what an earlier process has learned, and tell what is to be done."""
        self.take_up()
        spec = self.spec
        self.learner.method.compute.forget_peak_memory()
        self.evaluator = Evaluator(self.stream, self.learner.method)
        events = self.out / "events.jsonl"
        tracked = self._tracked(events) if track else None
        log = self._open.enter_context(EventLog(events, listen))
        tracking = Tracking(track, tracked, log) if tracked else None
        if tracking:
            self._open.callback(tracking.close)

        def tell(event: Event) -> None:
            if event.kind == "trained":
                self.trained = event.data
            log(event)
            if tracking:
                tracking(event)

        self.tell = tell
        tell(Event("run", _plan(spec, self.out, self.stream, self.learner, self.learned)))
        _warn_about_leaks(spec, tell)

    def _tracked(self, events: Path) -> TrackedRun:
        """What trackers are told of this run before it begins."""
        description = json.loads((self.out / "run.json").read_text(encoding="utf-8"))
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        return TrackedRun(self.out, flat(description), self.learned, epochs_of(lines, self.learned), bool(lines))

    def next_task(self) -> Task:
        """The task of the next stage; a cumulative method gets all tasks up to it in one."""
        stage, task = next(self.tasks)
        return self.stream.union(stage) if self.learner.method.cumulative else task

    def keep(self, stage: int, seconds: float, together: int) -> None:
        """Write down what was learned: `seconds` is this run's share of the time of `together` runs."""
        content = {"seconds_learning": seconds, "together": together, "trained": self.trained}
        # Before the commit: what the model holds, a stage file tells of, whenever the run is cut short.
        _write_stage(self.out, stage, content)
        self.learner.save(self.store.path)

    def evaluate(self, stage: int) -> None:
        """Measure, unless that was done before the run was interrupted."""
        content = json.loads(_stage_file(self.out, stage).read_text(encoding="utf-8"))
        if "cil" in content:
            return
        started, method = time.perf_counter(), self.learner.method
        content |= dataclasses.asdict(self.evaluator.stage(stage))
        content["seconds_evaluation"] = time.perf_counter() - started
        content["memory_images"] = len(method.memory) if method.memory else 0
        content["memory_bytes"] = method.memory_bytes
        content["parameters"] = method.parameters()
        content["capacity"] = method.bank.capacity() if isinstance(method, BankMethod) else None
        content["peak_device_bytes"] = method.compute.peak_memory()
        _write_stage(self.out, stage, content)
        so_far = {"stages": len(self.stream), "so_far": numbers_so_far(self.out, stage)}
        self.tell(Event("stage", {"stage": stage} | {kind: content[kind] for kind in ("cil", "til", "tp")} | so_far))

    def result(self) -> RunResult:
        """The numbers of the finished run."""
        if self.finished:
            return RunResult.read(self.out)
        result = summarise(self.out)
        result.write(self.out)
        return result


class FollowedRun(OpenRun):
    """A run in a process that trains along with the first one, which keeps the files, measures and tells."""

    tell = staticmethod(silent)

    def __enter__(self) -> Self:
        return self

    def check_directory(self, resume: bool) -> None:
        """The first process has."""

    def begin(self, listen: Listener, track: Sequence[str] = ()) -> None:
        """Take up what an earlier process has learned."""
        self.take_up()

    def keep(self, stage: int, seconds: float, together: int) -> None:
        """The first process does."""

    def evaluate(self, stage: int) -> None:
        """The first process does, with the same network."""

    def result(self) -> RunResult:
        """What the first process has written."""
        return RunResult.read(self.out)


def _only_warnings(listen: Listener) -> Listener:
    return lambda event: listen(event) if event.kind == "warning" else None


def _plan(spec: RunSpec, out: Path, stream: Stream, learner: Learner, learned: int) -> dict[str, Any]:
    """What this process is about to do, and where."""
    images = [len(task.train) for task in stream]
    if learner.method.cumulative:
        images = [sum(images[: t + 1]) for t in range(len(images))]
    environment = describe_environment(learner.method.compute.device)
    work = {"directory": str(out), "method": spec.method, "images": images, "learned": learned}
    return work | {"environment": environment}


def _warn_about_leaks(spec: RunSpec, tell: Listener) -> None:
    if spec.encoder == COMPACT and find_benchmark(spec.benchmark).source == "cifar100":
        text = "The compact encoder was pre-trained on CIFAR-100: it has seen these classes, so do not compare."
        tell(Event("warning", {"text": text}))


class EventLog:
    """Writes events down, one JSON object a line, and passes them on."""

    def __init__(self, file: Path, listen: Listener) -> None:
        self.file, self.listen = file, listen

    def __enter__(self) -> Listener:
        self.stream = self.file.open("a", encoding="utf-8")
        return self._tell

    def __exit__(self, *problem: object) -> None:
        self.stream.close()

    def _tell(self, event: Event) -> None:
        if event.kind != "prepare":  # too many, and of no interest afterwards
            self.stream.write(json.dumps({"time": time.time(), "kind": event.kind} | event.data) + "\n")
            self.stream.flush()
        self.listen(event)


def _write_description(spec: RunSpec, out: Path, stream: Stream, learner: Learner) -> None:
    """Write run.json, or check that the run to be resumed is this one."""
    encoder = learner.method.encoder
    what = {
        "benchmark": spec.benchmark,
        "method": spec.method,
        "options": spec.all_options(),
        "seed": spec.seed,
        "order": spec.order,
        "classes": [list(task.classes) for task in stream],
        "test_images": [len(task.test) if task.test is not None else 0 for task in stream],
        "validation": spec.validation,
        "encoder": {"name": encoder.name, "sha256": encoder.sha256},
        "data": data_hashes(stream),
        "precision": "bf16" if learner.method.compute.bf16 else "fp32",
    }
    file = out / "run.json"
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        differing = [k for k in what if before.get(k) != json.loads(json.dumps(what[k]))]
        if differing:
            raise RunError(f"{out} was started with other settings ({', '.join(differing)}); it cannot be resumed so.")
        return
    what["environment"] = describe_environment(learner.method.compute.device)
    replace_text(file, json.dumps(what, indent=2) + "\n")


def data_hashes(stream: Stream) -> dict[str, str]:
    """What tells a run's images from others."""
    return {"train": fingerprint([t.train for t in stream]), "test": fingerprint([t.test for t in stream])}


def _stage_file(out: Path, stage: int) -> Path:
    return out / "stages" / f"{stage:03d}.json"


def _write_stage(out: Path, stage: int, content: dict[str, Any]) -> None:
    replace_text(_stage_file(out, stage), json.dumps(content, indent=2) + "\n")
