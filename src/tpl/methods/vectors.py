"""TPL over feature vectors: options, a memory of vectors, and pickling of a trained model.

If the first task has few samples, the bank's prediction is multiplied by that of classifiers in closed form over the
standardised vectors, with exponents fitted on held-out samples, as in tpl-plus.

It is not a registered method, since those learn from images; `tpl.estimator` is its public interface.
"""

from __future__ import annotations

import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples, choose_compute
from tpl.errors import TplError
from tpl.memory import Memory
from tpl.methods.bank import Outputs
from tpl.methods.base import seeded
from tpl.methods.parts.closed_form import ClosedForm
from tpl.methods.plus import BALANCE, CLOSED, MANY_IMAGES, Balance
from tpl.methods.tpl import TPL, TPLConfig
from tpl.migrate import current_options
from tpl.nets.vectors import VectorEncoder, random_units
from tpl.store import State, under_prefix
from tpl.stream import ImageSet, Preprocess, Task
from tpl.stream.vectors import LIMIT, VectorSet, standardisation

Array = NDArray[Any]

FOR_IMAGES = ("augment", "rotation_classes", "tta")  # options that do not apply to vectors
VERSION = 2  # of what is pickled
RANDOM_FEATURES = 512  # of the closed form


@dataclass(frozen=True)
class VectorConfig(TPLConfig):
    """TPL's options, and those of the network over vectors."""

    width: int = option(32, "number of frozen random features added to the vectors", minimum=0, group="encoder")
    depth: int = option(1, "adapters in a row", minimum=1, group="encoder")
    standardise: str = option(
        "features", "by the first task's statistics", ("features", "global", "none"), group="encoder"
    )
    held_out: float = option(
        0.1, "share of every class held out of training, for unknown scores", minimum=0, group="training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out >= 1:
            raise TplError(f"held_out must be below 1; got {self.held_out}.")
        for name in FOR_IMAGES:
            if getattr(self, name) != getattr(TPLConfig, name):
                raise TplError(f"{name}={getattr(self, name)} is for images; vectors are not augmented.")


class Exemplar(NamedTuple):
    """A vector in the memory, and the random key it was selected by."""

    key: float
    vector: Tensor  # [features], standardised, on the CPU


class VectorMemory(Memory):
    """A few vectors of every class, within a budget.

    Every sample draws a random key, and a class keeps the samples with the smallest keys: a nested, uniform selection
    among all its samples, whichever call they came in.
    """

    seen = 0  # samples learned before a `redraw`, part of its seed

    @property
    def bytes_used(self) -> int:
        """Size of the vectors."""
        return sum(e.vector.numel() * e.vector.element_size() for class_ in self.exemplars for e in class_)

    def add(
        self,
        images: ImageSet,
        classes: int,
        preprocess: Preprocess,
        device: torch.device | str | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Add a new task's classes and shrink the old ones; returns which rows of the old memory stayed."""
        first = len(self.exemplars)
        self.exemplars += [[] for _ in range(classes)]
        offers = {first + c: images.select(images.labels == c) for c in range(classes)}
        origin = self._offer(offers, preprocess, lambda c: seeded(self.seed, c, "memory"))
        return origin[origin >= 0]

    def redraw(self, images: dict[int, ImageSet], counts: dict[int, int], preprocess: Preprocess) -> Tensor:
        """Select again among stored and new vectors; returns each stored vector's row before, -1 if it is new."""
        return self._offer(images, preprocess, lambda c: seeded(self.seed, self.seen, f"memory again {c}"))

    def _offer(
        self, offers: dict[int, ImageSet], preprocess: Preprocess, generator: Callable[[int], torch.Generator]
    ) -> Tensor:
        rows = self._rows()
        for c, quota in enumerate(self.quotas(len(self.exemplars))):
            pool = list(zip(self.exemplars[c], rows[c], strict=True))
            if c in offers:
                keys = torch.rand(len(offers[c]), generator=generator(c), dtype=torch.float64)
                best = keys.argsort()[:quota]
                vectors = preprocess.batch(offers[c].select(best.numpy()))
                fresh = zip(keys[best].tolist(), vectors.unbind(), strict=True)
                pool = sorted(pool + [(Exemplar(*each), -1) for each in fresh], key=lambda pair: pair[0].key)
            self.exemplars[c], rows[c] = [e for e, _ in pool[:quota]], [row for _, row in pool[:quota]]
        self._prepared = None
        return torch.tensor([row for own in rows for row in own], dtype=torch.long)

    def pixels(self, preprocess: Preprocess, device: torch.device | str | None = None) -> Tensor:
        """All vectors, standardised, `[n, features]`, class by class."""
        if self._prepared is None:
            vectors = [exemplar.vector for class_ in self.exemplars for exemplar in class_]
            self._prepared = torch.stack(vectors) if vectors else torch.zeros(0, preprocess.width)
        return super().pixels(preprocess, device)

    def state(self) -> dict[str, Tensor]:
        """All keys, all vectors, and the count per class."""
        flat = [exemplar for class_ in self.exemplars for exemplar in class_]
        return {
            "keys": torch.tensor([exemplar.key for exemplar in flat], dtype=torch.float64),
            "vectors": torch.stack([exemplar.vector for exemplar in flat]) if flat else torch.zeros(0, 0),
            "counts": torch.tensor([len(class_) for class_ in self.exemplars], dtype=torch.long),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        sizes = state["counts"].tolist()
        columns = zip(state["keys"].split(sizes), state["vectors"].cpu().split(sizes), strict=True)
        self.restore([[Exemplar(*e) for e in zip(keys.tolist(), rows.unbind(), strict=True)] for keys, rows in columns])


class VectorTPL(TPL):
    """TPL for vectors instead of images."""

    config_class = VectorConfig
    config: VectorConfig
    encoder: VectorEncoder
    memory: VectorMemory
    device = "cpu"  # as the user wrote it
    closed_: ClosedForm | None = None  # if the first task has few samples
    balance_: Balance

    def __init__(self, encoder: VectorEncoder, config: VectorConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.balance_ = Balance()

    @classmethod
    def new(cls, first: Array, config: VectorConfig, device: str, seed: int) -> Self:
        """An untrained method; `first` are the vectors that standardise all inputs."""
        units = random_units(first.shape[1], config.width, seeded(seed, 0, "encoder"))
        encoder = VectorEncoder(*units, config.depth, standardisation(first, config.standardise))
        method = cls(encoder, config, compute_on(device), seed)
        method.device = device
        return method

    def new_memory(self) -> VectorMemory:
        """A memory of vectors."""
        return VectorMemory(self.memory_budget, self.config.memory_policy, self.seed)

    def prepared(self, vectors: Array) -> Tensor:
        """Standardised vectors on the compute device."""
        return self.preprocess.batch(VectorSet(vectors), device=self.compute.device)

    @property
    def samples_seen(self) -> list[int]:
        """Number of samples in each task's statistics."""
        return [int(score.centres.pooled_) for score in self.scores_]

    def conclude(self, task: Task, samples: Samples) -> None:
        """Finish a task; the logit of a single class without replay, which was not trained, is set to a constant."""
        model = self.bank.tasks[-1]
        if len(model.head_bias) == 1:
            model.head_weight.zero_()
            model.head_bias.fill_(1)
        super().conclude(task, samples)
        if len(self.bank.tasks) == 1 and len(samples) < MANY_IMAGES and self.statistics is None:
            drawn = self.generator("closed form", task=0)
            self.closed_ = ClosedForm.drawn(samples.pixels.shape[1] + 1, RANDOM_FEATURES, drawn, self.compute.device)
        if self.closed_ is not None:
            self.closed_.learn(self._with_length(samples.pixels), samples.labels + len(self.classes_))

    def hold_out(self, held: Samples) -> None:
        """Also fit the exponents of bank and closed form; the latter then learns these samples as well."""
        super().hold_out(held)
        if self.closed_ is None:
            return
        numbers, common = held.labels + len(self.classes_) - self.bank.tasks[-1].own, self._with_length(held.pixels)
        if len(self.classes_) > 1:
            bank = super().log_probabilities_of(self.outputs(held.pixels))
            self.balance_ = self.balance_.updated(bank, self.closed_.log_probabilities(common), numbers)
        self.closed_.update(common, numbers)

    def common_features(self, pixels: Tensor) -> Tensor | None:
        """The input of the closed form."""
        return super().common_features(pixels) if self.closed_ is None else self._with_length(pixels)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """log P(class | sample) of the bank, times that of the closed form."""
        bank = super().log_probabilities_of(outputs, scores)
        if self.closed_ is None or common is None:
            return bank
        a, w = self.balance_.exponents
        return (a * bank + w * self.closed_.log_probabilities(common)).log_softmax(dim=1)

    @staticmethod
    def _with_length(vectors: Tensor) -> Tensor:
        """Vectors with a constant as long as a usual one: scaled to length 1, they still tell how long they were."""
        return F.pad(vectors, (0, 1), value=vectors.shape[1] ** 0.5)

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Update statistics, memory and closed form; no weight changes."""
        self.memory.seen = sum(self.samples_seen)
        super().update_classes(task, samples, held)
        for part in (samples, held):
            if self.closed_ is not None and len(part):
                self.closed_.update(self._with_length(part.pixels), self.numbers_of(task, part))

    def shared_state(self) -> dict[str, Tensor]:
        """Also the closed form, and the likelihoods behind the exponents."""
        if self.closed_ is None:
            return super().shared_state()
        own = {CLOSED + k: v for k, v in self.closed_.state().items()}
        return super().shared_state() | own | {BALANCE + k: v for k, v in self.balance_.state().items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore scores, calibration and closed form."""
        super().load_own_state(shared, tasks)
        closed = under_prefix(CLOSED, shared)
        self.closed_ = ClosedForm.from_state(closed) if closed else None
        self.balance_ = Balance.from_state(under_prefix(BALANCE, shared))

    # Copies and pickles: plain values and tensors, which can be loaded on any device

    def __getstate__(self) -> dict[str, Any]:
        state, data = self.state(), self.encoder.data_config
        content = {
            "options": self.config.to_dict(),
            "seed": self.seed,
            "classes": [list(names) for names in self.task_classes_],
            "units": [self.encoder.mix_weight, self.encoder.mix_bias],
            "standardisation": [torch.from_numpy(data["mean"]), torch.from_numpy(data["scale"]), data["limit"]],
            "memory": self.memory.state(),
            "shared": state.shared,
            "tasks": state.tasks,
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return {"version": VERSION, "device": self.device, "content": buffer.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            compute = compute_on(state["device"])
        except TplError:
            warnings.warn(f"Device '{state['device']}' is not available here: computing on the CPU.", stacklevel=2)
            compute = compute_on("cpu")
        stored = io.BytesIO(state["content"])
        if "version" in state:
            content = torch.load(stored, map_location=compute.device, weights_only=True)
        else:
            content = _version_1(stored, compute.device)
        mean, scale, limit = content["standardisation"]
        data = {"input_size": tuple(mean.shape), "mean": mean.cpu().numpy(), "scale": scale.cpu().numpy()}
        config = VectorConfig(**content["options"])
        weight, bias = content["units"]
        encoder = VectorEncoder(weight, bias, config.depth, data | {"limit": limit})
        VectorTPL.__init__(self, encoder, config, compute, content["seed"])
        self.device = state["device"]
        self.task_classes_ = [tuple(names) for names in content["classes"]]
        learned = State(content["shared"], content["tasks"])
        if "version" in state:
            self.memory.load_state(content["memory"])
            self.load_state(learned)
        else:  # the task models' outputs on the memory were not stored
            self.load_state(learned)
            self.memory.load_state(content["memory"])
            self.memory_outputs_ = []
            self._update_memory_outputs(torch.zeros(0, dtype=torch.long))
            self._use_memory(self.task_classes_, calibrate=False)


def compute_on(device: str) -> Compute:
    """A device, in full precision: the network is too small to gain from half precision."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TplError(f"Device '{device}' cannot be used here: there is no CUDA GPU, or torch was built without CUDA.")
    return choose_compute(device, "fp32", "off")


# Models of version 1, which were pickled object by object


class _Record:
    """Replaces any object of this package in such a pickle: its attributes, or its constructor's arguments."""

    quotas = None  # a memory's method was pickled, too

    parts: tuple[Any, ...]

    def __new__(cls, *parts: Any) -> Self:
        record = super().__new__(cls)
        record.parts = parts
        return record


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Record if module.partition(".")[0] == "tpl" else super().find_class(module, name)


def _version_1(stored: io.BytesIO, device: torch.device) -> dict[str, Any]:
    """The content of such a pickle as `VectorTPL` stores it now."""
    readers = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
    old = torch.load(stored, map_location=device, weights_only=False, pickle_module=readers)
    bank, memory, known = old["bank"], old["memory"], {field.name for field in fields(VectorConfig)}
    shared = {f"adapters.{name}": tensor.detach() for name, tensor in bank.adapters._parameters.items()}
    if old["calibration"] is not None:
        shared["calibration"] = old["calibration"]
    tasks = []
    for t, (model, task) in enumerate(zip(bank.tasks, old["tasks"], strict=True)):
        statistics = {name: value for name, value in vars(task.score.centres).items() if name.endswith("_")}
        kept = {f"score.{name}": value for name, value in (statistics | {"scales_": task.score.scales_}).items()}
        features, labels = task.held.parts[:2]
        kept |= {"held.features": features, "held.labels": labels}
        tasks.append(kept | {name: tensor.detach() for name, tensor in model._parameters.items()})
        shared[f"memory.{t}.features"] = shared[f"memory.{t}.logits"] = torch.zeros(0, features.shape[1])
    limit = None if old["config"].standardise == "none" else LIMIT
    numbers = np.cumsum([0, *(task.own for task in old["tasks"])]).tolist()
    return {
        "options": {
            name: value for name, value in current_options("tpl", vars(old["config"])).items() if name in known
        },
        "seed": old["seed"],
        "classes": [[str(c) for c in range(a, b)] for a, b in itertools.pairwise(numbers)],
        "units": list(bank.encoder._buffers.values()),
        "standardisation": [torch.from_numpy(old["shift"]), torch.from_numpy(old["scale"]), limit],
        "memory": {
            "keys": torch.cat(memory.keys),
            "vectors": torch.cat(memory.vectors),
            "counts": torch.tensor([len(keys) for keys in memory.keys]),
        },
        "shared": shared,
        "tasks": tasks,
    }
