"""A run: one method on one benchmark, in a directory that tells everything and can be resumed.

run.json        what was run: benchmark, method, options, seed, class order, encoder and data hashes, machine
events.jsonl    what happened, one event a line
stages/000.json accuracies after task 0, and so on
model/          the model directory after the newest task
results.json    the metrics and accuracy matrices of a finished run (cil.csv, til.csv, tp.csv beside it)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpl.bench.benchmarks import Benchmark, find_benchmark
from tpl.bench.environment import describe_environment
from tpl.bench.evaluate import Evaluator
from tpl.bench.results import RunResult, summarise
from tpl.engine import Event, Listener, silent
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods import find_method
from tpl.methods.bank import BankMethod
from tpl.nets.compact import NAME as COMPACT
from tpl.store import ModelStore, replace_text
from tpl.stream import Stream, Task, fingerprint


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
    options: dict[str, Any] = field(default_factory=dict)

    def all_options(self) -> dict[str, Any]:
        """The benchmark's options for this method, overridden by those given."""
        config = find_method(self.method).config_class
        fields = {f.name for f in dataclasses.fields(config)}
        benchmark = self._benchmark()
        prescribed = benchmark.options | benchmark.by_method.get(self.method, {})
        merged = {k: v for k, v in prescribed.items() if k in fields} | self.options
        return config.parse(merged).to_dict()

    def stream(self) -> Stream:
        """The benchmark's tasks as this run meets them."""
        return self._benchmark().stream(
            self.data, self.order, self.download, self.per_task, self.tasks, self.validation, self.seed
        )

    def learner(self) -> Learner:
        """A learner that knows nothing yet."""
        return Learner(
            self.method, self.encoder, self.weights, self.device, self.precision, self.seed, **self.all_options()
        )

    def directory_name(self) -> str:
        """A name that says what the run is and differs with its settings (not with where data and weights lie)."""
        content = {k: str(v) for k, v in dataclasses.asdict(self).items() if k not in ("data", "download", "weights")}
        content["options"] = json.dumps(self.all_options(), sort_keys=True)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.benchmark}-{self.method}-{self.encoder}-{digest}".replace("/", "_").replace(":", "_")

    def _benchmark(self) -> Benchmark:
        return find_benchmark(self.benchmark)


def execute(spec: RunSpec, out: Path, resume: bool = False, listen: Listener = silent) -> RunResult:
    """Run `spec` in the directory `out`; an interrupted run goes on where its last task ended."""
    _check_directory(out, resume)
    stream, learner = spec.stream(), spec.learner()
    store = ModelStore(out / "model")
    with store.writing():
        _write_description(spec, out, stream, learner)
        if (out / "results.json").exists():
            return RunResult.read(out)
        learned = int(store.header()["commits"]) if store.exists() else 0
        if learned:
            learner = Learner.load(store.path, spec.weights, spec.device, spec.precision)
        evaluator = Evaluator(stream, learner.method)
        with EventLog(out / "events.jsonl", listen) as tell:
            tell(Event("run", _plan(spec, out, stream, learner, learned)))
            _warn_about_leaks(spec, tell)
            for t, task in enumerate(stream.once()):
                if t >= learned:
                    _learn_stage(out, t, stream.union(t) if learner.method.cumulative else task, learner, tell)
                _evaluate_stage(out, t, evaluator, tell)
    result = summarise(out)
    result.write(out)
    return result


def _learn_stage(out: Path, stage: int, task: Task, learner: Learner, tell: Listener) -> None:
    started = time.perf_counter()
    learner.learn(dataclasses.replace(task, test=None), tell)  # a method never gets test images
    # Before the commit: what the model holds, a stage file tells of, whenever the run is cut short.
    _write_stage(out, stage, {"seconds_learning": time.perf_counter() - started})
    learner.save(out / "model")


def _evaluate_stage(out: Path, stage: int, evaluator: Evaluator, tell: Listener) -> None:
    """Measure, unless that was done before the run was interrupted."""
    content = json.loads(_stage_file(out, stage).read_text(encoding="utf-8"))
    if "cil" in content:
        return
    started, method = time.perf_counter(), evaluator.method
    content |= dataclasses.asdict(evaluator.stage(stage))
    content["seconds_evaluation"] = time.perf_counter() - started
    content["memory_images"] = len(method.memory) if method.memory else 0
    content["memory_bytes"] = method.memory.bytes_used if method.memory else 0
    content["parameters"] = method.parameters()
    content["capacity"] = method.bank.capacity() if isinstance(method, BankMethod) else None
    _write_stage(out, stage, content)
    tell(Event("stage", {"stage": stage} | {kind: content[kind] for kind in ("cil", "til", "tp")}))


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


def _check_directory(out: Path, resume: bool) -> None:
    if (out / "run.json").exists() and not resume:
        raise RunError(f"{out} already holds a run. Continue it with --resume, or choose another place with --out.")
    try:
        (out / "stages").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out} cannot be made: {error}.") from error


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
        "data": {"train": fingerprint([t.train for t in stream]), "test": fingerprint([t.test for t in stream])},
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


def _stage_file(out: Path, stage: int) -> Path:
    return out / "stages" / f"{stage:03d}.json"


def _write_stage(out: Path, stage: int, content: dict[str, Any]) -> None:
    replace_text(_stage_file(out, stage), json.dumps(content, indent=2) + "\n")
