"""What to run: a benchmark, a method, an encoder, and every setting that can change a number."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpl.bench.benchmarks import Benchmark, find_benchmark
from tpl.engine import choose_compute
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods import find_method
from tpl.nets import check_encoder_name, import_compiler_ahead, is_resnet
from tpl.pretraining import DEIT_611, RESNET, contamination, pretrained_on
from tpl.stream import Stream

ELSEWHERE = ("data", "download", "weights", "compile", "accept_contaminated_encoder")  # settings that change no number
SMALL = "small"  # instead of a memory size: that of the paper's small-buffer experiments


@dataclass(frozen=True)
class RunSpec:
    """What to run. Everything that can change a number is in here."""

    benchmark: str
    method: str = "tpl"
    encoder: str = ""  # empty: the benchmark's own
    weights: Path | None = None
    data: Path | None = None
    download: bool = False
    order: str = "natural"
    seed: int = 0
    per_task: int | tuple[int, ...] | None = None  # classes a task; None = the benchmark's own
    tasks: int | None = None
    validation: float | None = None
    held_out: float = 0.0  # share of every class not trained on, but used to fit weights and unknown scores
    device: str = "auto"
    precision: str = "auto"
    compile: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    accept_contaminated_encoder: bool = False  # run an encoder that was pre-trained on the benchmark's classes

    def __post_init__(self) -> None:
        if not self.encoder:
            object.__setattr__(self, "encoder", self._benchmark().encoder)

    def all_options(self) -> dict[str, Any]:
        """Every option of the method: its own defaults, replaced by the benchmark's, replaced by those given."""
        merged = self._prescribed() | self.options
        if merged.get("memory") == SMALL:
            merged["memory"] = self._benchmark().smaller_memory()
        return find_method(self.method).config_class.parse(merged).to_dict()

    def benchmark_options(self) -> dict[str, Any]:
        """The options that the benchmark sets for this method and encoder; those that were given are left out."""
        options = self.all_options()
        return {name: options[name] for name in self._prescribed() if name not in self.options}

    def benchmark_note(self) -> str:
        """One line that names the options set by the benchmark, as `--set` takes them; empty if there are none.

        Where a method keeps its own values whatever a benchmark sets, they are named as well.
        """
        options = self.all_options()
        own = {name: options[name] for name in find_method(self.method).own_options if name not in self.options}
        parts = {
            f"{self.benchmark} with {self.encoder} sets for {self.method}": self.benchmark_options(),
            f"{self.method} has its own": own,
        }
        found = [
            f"{who}: {', '.join(f'{name}={_as_typed(value)}' for name, value in values.items())}"
            for who, values in parts.items()
            if values
        ]
        return f"{'; '.join(found)} (change with --set)" if found else ""

    def check(self) -> None:
        """Report mistakes that can be found before any data is read."""
        if not 0 <= self.held_out < 1:
            raise TplError(f"held_out takes a share of at least 0 and below 1; got {self.held_out:g}.")
        self.all_options()
        self.check_encoder()
        compute = choose_compute(self.device, self.precision, self.compile)
        if compute.compiled and not is_resnet(self.encoder):
            import_compiler_ahead()

    def check_encoder(self) -> None:
        """Refuse an unknown encoder; one pre-trained on this benchmark's classes needs to be accepted."""
        check_encoder_name(self.encoder)
        if not self.contamination() or self.accept_contaminated_encoder:
            return
        benchmark = self._benchmark()
        seen = " and ".join(pretrained_on(self.encoder))
        raise TplError(
            f"'{self.encoder}' was pre-trained on {seen}, which contains or closely resembles the data of "
            f"{self.benchmark} ({benchmark.source}): its accuracy would not say how well that is learned. Choose "
            f"another --encoder, such as {benchmark.encoder}{_where(benchmark.encoder)}, or {RESNET}, which starts "
            "from random weights. With --accept-contaminated-encoder it is run all the same, and the results say so."
        )

    def contamination(self) -> list[str]:
        """The data sets of the encoder's pre-training that share classes with this benchmark's data set."""
        return contamination(self.encoder, self._benchmark().source)

    def stream(self) -> Stream:
        """The benchmark's tasks, in this run's class order."""
        return self._benchmark().stream(
            self.data, self.order, self.download, self.per_task, self.tasks, self.validation, self.seed
        )

    def learner(self) -> Learner:
        """A new learner that has learned nothing yet."""
        learner = Learner(
            self.method,
            self.encoder,
            self.weights,
            self.device,
            self.precision,
            self.seed,
            self.compile,
            **self.all_options(),
        )
        learner.keeps_encoder = False  # a run is read where it was made
        return learner

    def directory_name(self) -> str:
        """A directory name that depends on all settings except the paths of data and weights."""
        content = {k: str(v) for k, v in dataclasses.asdict(self).items() if k not in ELSEWHERE}
        if not self.held_out:
            del content["held_out"]  # keeps the names of runs made before this setting existed
        content["options"] = json.dumps(self.all_options(), sort_keys=True)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.benchmark}-{self.method}-{self.encoder}-{digest}".replace("/", "_").replace(":", "_")

    def _prescribed(self) -> dict[str, Any]:
        """The benchmark's options for this method and encoder, those that the method has."""
        method = find_method(self.method)
        prescribed = self._benchmark().prescribed(self.method, pretrained=not is_resnet(self.encoder))
        known = {field.name for field in dataclasses.fields(method.config_class)} - set(method.own_options)
        return {name: value for name, value in prescribed.items() if name in known}

    def _benchmark(self) -> Benchmark:
        return find_benchmark(self.benchmark)


def _where(encoder: str) -> str:
    return " (with --weights FILE, MORE's public checkpoint)" if encoder == DEIT_611 else ""


def _as_typed(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
