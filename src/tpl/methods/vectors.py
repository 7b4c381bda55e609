"""TPL over feature vectors: the same bank, jobs, scores and calibration, with vectors in the place of images.

Not a `Method`: those learn streams of image sets. `tpl.estimator` is its public face.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Samples, choose_compute, no_callback
from tpl.errors import TplError
from tpl.memory import Memory
from tpl.methods.bank import ENOUGH_TO_HOLD_OUT, Bank, HeldOut, Outputs
from tpl.methods.bank.training import TrainingJob, run_jobs
from tpl.methods.base import owners, seeded
from tpl.methods.tpl import TPLConfig
from tpl.nets import Encoder
from tpl.nets.vectors import VectorEncoder
from tpl.scores import LikelihoodRatio
from tpl.scores.calibration import calibrate_scores, equal_shares
from tpl.scores.conformal import unknown_scores
from tpl.scores.ratio import memory_scores, oppose

Array = NDArray[Any]

BLOCK = 4096  # vectors at a time through the network
FARTHEST = 10.0  # deviations at which a standardised feature is cut off


@dataclass(frozen=True)
class VectorConfig(TPLConfig):
    """TPL's options, and what the network over vectors has beyond them."""

    width: int = option(32, "frozen random units beside the vectors", minimum=0)
    depth: int = option(1, "adapters in a row", minimum=1)
    standardise: str = option("features", "by the first task's statistics", ("features", "global", "none"))
    held_out: float = option(0.1, "share of every class kept out of training, for what is unknown", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out >= 1:
            raise TplError(f"held_out must be below 1; got {self.held_out}.")
        if self.augment != "none":
            raise TplError(f"augment={self.augment} is for images; vectors are taken as they are.")


@dataclass
class LearnedTask:
    """What is kept of a task beside its model in the bank."""

    own: int  # classes
    score: LikelihoodRatio
    held: HeldOut
    samples: int  # trained on
    updates: int = 0  # samples that came later


class VectorBank(Bank):
    """A bank whose answers are computed in double precision.

    An answer then depends on the rest of its batch by 1e-15 at most, where kernels for other sizes round differently.
    """

    def __init__(
        self, encoder: VectorEncoder, config: VectorConfig, compute: Compute, generator: torch.Generator
    ) -> None:
        # Of an encoder, a bank and its jobs use `dim`, the two `new_` methods, `fingerprint`, the two flags and the
        # call itself.
        super().__init__(cast(Encoder, encoder), config, compute, from_bytes, generator)

    def outputs(self, pixels: Tensor, task: int) -> Outputs:
        """Features and own-class logits of vectors under a finished task's model."""
        model = self.tasks[task]
        with torch.no_grad():
            weights = [weight.double() for weight in self.weights(task)]
            blocks = pixels.to(self.compute.device).double().split(BLOCK)
            features = torch.cat([self.encoder(block, model.norms.double(), weights) for block in blocks])
            return Outputs(features, self.logits(features, task))

    def logits(self, features: Tensor, task: int) -> Tensor:
        """Own-class logits of features under a finished task's head."""
        model = self.tasks[task]
        return features @ model.head_weight[: model.own].double().T + model.head_bias[: model.own].double()


class VectorMemory:
    """A few vectors of every class, within a budget.

    Every sample ever seen draws a random key, and a class keeps those with the smallest: a nested, uniform choice among
    all its samples, whichever call brought them.
    """

    def __init__(self, budget: int) -> None:
        self.quotas = Memory(budget).quotas  # the same shares as images get
        self.keys: list[Tensor] = []
        self.vectors: list[Tensor] = []

    def take(self, number: int, vectors: Tensor, generator: torch.Generator) -> None:
        """Offer samples of one class; `number` counts classes by arrival. Call `settle` when all are offered."""
        keys = torch.rand(len(vectors), generator=generator, dtype=torch.float64).to(vectors.device)
        if number == len(self.keys):
            self.keys.append(keys[:0])
            self.vectors.append(vectors[:0])
        self.keys[number] = torch.cat([self.keys[number], keys])
        self.vectors[number] = torch.cat([self.vectors[number], vectors])

    def settle(self) -> None:
        """Keep every class to its quota."""
        for c, quota in enumerate(self.quotas(len(self.keys))):
            best = self.keys[c].argsort()[:quota]
            self.keys[c], self.vectors[c] = self.keys[c][best], self.vectors[c][best]

    def all(self) -> tuple[Tensor, Tensor]:
        """All vectors, class by class, and the number of each one's class."""
        return torch.cat(self.vectors), owners([len(keys) for keys in self.keys]).to(self.keys[0].device)


class VectorTPL:
    """Learns tasks of vectors one by one and tells all their classes apart; classes are numbered by arrival."""

    def __init__(self, first: Array, config: VectorConfig, device: str, seed: int) -> None:
        self.config, self.device, self.seed = config, device, seed
        compute = compute_on(device)
        self.shift, self.scale = standardisation(first, config.standardise)
        features = first.shape[1]
        encoder = VectorEncoder(features, config.width, config.depth, self.generator("encoder", 0))
        self.bank = VectorBank(encoder.to(compute.device), config, compute, self.generator("adapters", 0))
        self.memory = VectorMemory(config.memory)
        self.tasks: list[LearnedTask] = []
        self.calibration: Tensor | None = None  # scale and shift per task, [2, tasks]

    def generator(self, purpose: str, number: int) -> torch.Generator:
        """Random numbers that depend on the seed, a running number and the purpose alone."""
        return seeded(self.seed, number, purpose)

    def standardised(self, vectors: Array) -> Tensor:
        """Vectors as the network takes them, float32; far-off values are cut where a unit could not tell them apart."""
        scaled = (vectors.astype(np.float64) - self.shift) * self.scale
        if self.config.standardise != "none":
            scaled = scaled.clip(-FARTHEST, FARTHEST)
        return torch.from_numpy(scaled.astype(np.float32)).to(self.bank.compute.device)

    # Learning

    def learn(self, vectors: Tensor, labels: Tensor, own: int) -> None:
        """One more task of `own` new classes; `labels` count from 0 in it."""
        number, known = len(self.tasks), len(self.memory.keys)
        labels = labels.to(vectors.device)
        held = self._hold_out(labels, self.generator("held out", number))
        train, train_labels = vectors[~held], labels[~held]
        replay = None
        if known:
            remembered, _ = self.memory.all()
            others = torch.full((len(remembered),), own, device=vectors.device)
            replay = Samples(to_bytes(remembered), others) if len(remembered) else None
        outputs = own + (replay is not None)
        samples = Samples(to_bytes(train), train_labels)
        training = self.generator("training", number)
        run_jobs([TrainingJob(self.bank, samples, replay, own, outputs, self.config, training, no_callback)])
        if outputs == 1:
            # A single class and nothing to tell it from: an untrained logit would vary without a meaning.
            self.bank.tasks[number].head_weight.zero_()
            self.bank.tasks[number].head_bias.fill_(1)
        seen = self.bank.outputs(train, number)
        if not bool(seen.features.isfinite().all()):
            raise TplError("Training ended with features that are not numbers: lower the learning rate (lr).")
        score = LikelihoodRatio(self.config).fit_features(*seen, train_labels)
        unseen = HeldOut(self.bank.outputs(vectors[held], number).features, labels[held])
        self.tasks.append(LearnedTask(own, score, unseen, len(train)))
        for c in range(own):
            self.memory.take(known + c, train[train_labels == c], self.generator("memory", known + c))
        self._refresh()

    def update(self, vectors: Tensor, labels: Tensor) -> None:
        """More samples of known classes, `labels` by arrival: statistics and memory move, no weight does."""
        labels = labels.to(vectors.device)
        call = int(sum(task.samples + task.updates for task in self.tasks))  # another number at every call
        held = self._hold_out(labels, self.generator("held out again", call))
        for t, task in enumerate(self.tasks):
            first = sum(earlier.own for earlier in self.tasks[:t])
            mine = (labels >= first) & (labels < first + task.own)
            if not bool(mine.any()):
                continue
            rows = mine & ~held
            task.score.merge(*self.bank.outputs(vectors[rows], t), labels[rows] - first)
            rest = mine & held
            unseen = HeldOut(self.bank.outputs(vectors[rest], t).features, labels[rest] - first)
            task.held = task.held.extended(unseen)
            task.updates += int(rows.sum())
        for c in labels.unique().tolist():
            purpose = f"memory again {c}"
            self.memory.take(c, vectors[(labels == c) & ~held], self.generator(purpose, call))
        self._refresh()

    def _hold_out(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Which rows are kept out of training: at least one of every class that has enough."""
        held = torch.zeros_like(labels, dtype=torch.bool)
        if self.config.held_out == 0:
            return held
        for c in labels.unique():
            rows = torch.nonzero(labels == c).squeeze(1)
            if len(rows) >= ENOUGH_TO_HOLD_OUT:
                chosen = torch.randperm(len(rows), generator=generator)[
                    : max(1, round(self.config.held_out * len(rows)))
                ]
                held[rows[chosen.to(rows.device)]] = True
        return held

    def _refresh(self) -> None:
        """Give every score the others' memory, and calibrate on it: both change with every task."""
        self.memory.settle()
        vectors, classes = self.memory.all()
        tasks, seen, scores = self.owner[classes], self._outputs(vectors), [task.score for task in self.tasks]
        opposed = oppose(scores, seen, tasks, classes)
        wanted = self.config.calibration == "score" and opposed and len(self.tasks) > 1
        self.calibration = None
        if wanted:
            self.calibration = calibrate_scores(memory_scores(scores, seen, tasks), tasks, equal_shares(classes))

    # Answers

    @property
    def owner(self) -> Tensor:
        """The number of the task that brought each class."""
        return owners([task.own for task in self.tasks]).to(self.bank.compute.device)

    def log_probabilities(self, vectors: Tensor) -> Tensor:
        """log P(class | x), `[n, classes]`, classes by arrival (Eq. 3)."""
        outputs = self._outputs(vectors)
        within = torch.cat([o.logits.log_softmax(dim=1) for o in outputs], dim=1)
        return within + self._task_log_probabilities(outputs)[:, self.owner]

    def task_log_probabilities(self, vectors: Tensor) -> Tensor:
        """log P(task | x), `[n, tasks]`."""
        return self._task_log_probabilities(self._outputs(vectors))

    def unknown(self, vectors: Tensor) -> Tensor:
        """One minus the largest conformal p-value of any task."""
        asked, own = [], []
        for t, task in enumerate(self.tasks):
            asked.append(task.score.in_distribution_score(*self.bank.outputs(vectors, t)))
            held = Outputs(task.held.features, self.bank.logits(task.held.features, t))
            own.append(task.score.in_distribution_score(*held).sort().values)
        return unknown_scores(asked, own)

    def _outputs(self, vectors: Tensor) -> list[Outputs]:
        return [self.bank.outputs(vectors, t) for t in range(len(self.tasks))]

    def _task_log_probabilities(self, outputs: list[Outputs]) -> Tensor:
        scores = [task.score.score_features(*o) for task, o in zip(self.tasks, outputs, strict=True)]
        stacked = torch.stack(scores, dim=1)
        if self.calibration is not None:
            stacked = stacked * self.calibration[0] + self.calibration[1]
        return (stacked / self.config.gamma).log_softmax(dim=1)  # Eq. 11

    # Copies and pickles: tensors come back on whatever device there is

    def __getstate__(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(self.__dict__, buffer)
        return {"device": self.device, "content": buffer.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            compute = compute_on(state["device"])
        except TplError:
            warnings.warn(f"Device '{state['device']}' is not available here: computing on the CPU.", stacklevel=2)
            compute = compute_on("cpu")
        content = torch.load(io.BytesIO(state["content"]), map_location=compute.device, weights_only=False)
        self.__dict__.update(content)
        self.bank.compute = compute


def compute_on(device: str) -> Compute:
    """A device in full precision: the network is too small to gain from less."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise TplError(f"Device '{device}' cannot be used here: there is no CUDA GPU, or torch was built without CUDA.")
    return choose_compute(device, "fp32", "off")


def standardisation(vectors: Array, kind: str) -> tuple[Array, Array]:
    """Shift and scale of every feature; where it did not vary, or for all ("global"), the average scale."""
    vectors = vectors.astype(np.float64)
    if kind == "none":
        return np.zeros(vectors.shape[1]), np.ones(vectors.shape[1])
    deviation = vectors.std(axis=0)
    varies = deviation > 1e-9 * np.abs(vectors).max(axis=0)
    usual = np.sqrt(np.square(deviation[varies]).mean()) if varies.any() else 1.0
    alone = varies & (kind == "features")
    return vectors.mean(axis=0), 1 / np.where(alone, deviation, usual)


def to_bytes(vectors: Tensor) -> Tensor:
    """Float32 vectors as the engine stores samples: bytes, whose meaning only `from_bytes` knows."""
    return vectors.contiguous().view(torch.uint8)


def from_bytes(pixels: Tensor) -> Tensor:
    """The vectors back, bit for bit."""
    return pixels.view(torch.float32)
