"""HAT for class-incremental learning: task models under masks, and any OOD detector to choose among them.

No replay: every task's head has outputs for its own classes alone (Serra et al., 2018; the paper's HAT_CIL uses MSP).
At test time each task's model scores the image, and the task with the largest raw score predicts the class:
t = argmax_j S_j(x). `task_choice=calibrated` makes the scores comparable on stored images first, which the paper does
not.

The detector is one of the twelve post-hoc ones in `tpl.scores`; the training technique is one of
`tpl.methods.bank.techniques`. Together they are the paper's study of twenty detectors as task predictors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Inference, Samples
from tpl.errors import TplError
from tpl.methods.bank import Outputs, Query, within_tasks
from tpl.methods.bank.method import BankMethod, MemoryConfig
from tpl.methods.bank.techniques import TECHNIQUES, swapped_quarters
from tpl.methods.bank.training import TrainingJob
from tpl.methods.base import register, task_of_class
from tpl.nets import Encoder
from tpl.scores import DETECTORS, Score
from tpl.scores.calibration import calibrate_together, equal_shares
from tpl.scores.logits import Odin, perturb
from tpl.store import under_prefix
from tpl.stream import Task

ALL = "all"
CERTAIN = 1 - 1e-9  # probability of the chosen task under a hard choice: below 1, so that logarithms are finite


@dataclass(frozen=True)
class HATConfig(MemoryConfig):
    """HAT's options: detector, training technique, and what a memory is kept for."""

    memory: int = option(
        2000, "images kept where kNN, outliers or calibration need them, else none", minimum=0, group="memory"
    )
    score: str = option("msp", "the detector whose score chooses the task", tuple(DETECTORS), group="task prediction")
    technique: str = option("none", "how a task is trained", tuple(TECHNIQUES), group="training")
    first_outliers: str = option(
        "misplaced",
        "what technique=oe shows the first task, when nothing is stored yet; none: nothing; misplaced: its own images, "
        "with their quarters in other places",
        ("misplaced", "none"),
        group="training",
    )
    task_choice: str = option(
        "hard",
        "hard: the task with the largest raw score (paper); calibrated: on the memory",
        ("hard", "calibrated"),
        group="task prediction",
    )
    extra_scores: str = option(
        "", "further detectors to fit, joined by commas, or all: for `rescore` and studies", group="task prediction"
    )
    keep_images: bool = option(
        False, "keep images even where nothing needs them yet, e.g. to calibrate later", group="memory"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.fitted if name not in DETECTORS]
        if unknown:
            raise TplError(f"There is no detector '{unknown[0]}'; there are {', '.join(DETECTORS)}.")
        if self.rotation_classes and self.technique != "none":
            raise TplError(f"rotation_classes=true and technique={self.technique} are two ways to train: choose one.")
        if self.memory_needed and not self.memory:
            raise TplError(f"{self.memory_needed}: give it a memory, e.g. memory=2000.")

    @property
    def memory_needed(self) -> str:
        """The reason why a memory is needed; empty where none is kept."""
        needs = {
            "score=knn compares with stored images": "knn" in self.fitted,
            f"technique={self.technique} trains against stored images": TECHNIQUES[self.technique].outliers,
            "task_choice=calibrated is fitted on stored images": self.task_choice == "calibrated",
            "keep_images=true keeps images": self.keep_images,
        }
        return next((why for why, needed in needs.items() if needed), "")

    @property
    def fitted(self) -> list[str]:
        """The detectors that are fitted to every task."""
        further = (
            list(DETECTORS) if self.extra_scores == ALL else [name for name in self.extra_scores.split(",") if name]
        )
        return list(dict.fromkeys([self.score, *further]))


@register
class HAT(BankMethod):
    """Task models trained without other tasks' images, and a detector to choose among them."""

    name = "hat"
    summary = "task models under HAT masks without replay; an OOD detector (MSP) chooses the task"
    paper = "Serra et al., Overcoming Catastrophic Forgetting with Hard Attention to the Task, ICML 2018"
    keeps = "a task's mask, norms, head, and what its detector needs"
    cost = "one pass a training image and epoch; a pass a task and answer"
    splits = True
    config_class = HATConfig
    from_scratch = True
    config: HATConfig

    def __init__(self, encoder: Encoder, config: HATConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed, TECHNIQUES[config.technique])
        self.detectors_: list[dict[str, Score]] = []
        self.calibration_: Tensor | None = None  # scale and shift per task, [2, tasks]
        self._std = torch.tensor(encoder.data_config["std"], device=compute.device)  # not made during graph capture
        self._perturbed = Inference(self._perturbed_logits, compute, self.normalise)

    @property
    def memory_budget(self) -> int:
        """The `memory` option where stored images are needed, else 0: HAT itself needs none."""
        return self.config.memory if self.config.memory_needed else 0

    def training_job(self, task: Task, samples: Samples, callback: Callback) -> TrainingJob:
        """Train the task's own classes; with stored images only where the technique needs outliers."""
        own = len(task.classes)
        outliers = self._outliers(samples, own) if self.bank.technique.outliers else None
        return self.new_job(samples, outliers, own, own, callback)

    def _outliers(self, samples: Samples, label: int) -> Samples | None:
        """Stored images; before there are any, images of the task itself with swapped quarters, if so configured.

        A first task trained without outliers is more confident than later ones, and would win by raw scores.
        """
        stored = self.replay_samples(label)
        if stored is not None or self.config.first_outliers == "none" or not self.bank.technique.swaps_quarters:
            return stored
        generator = self.generator("first outliers")
        chosen = torch.randperm(len(samples), generator=generator)[: self.config.memory].to(samples.pixels.device)
        pixels = swapped_quarters(samples.pixels[chosen], generator).to(self.compute.device)
        return Samples(pixels, torch.full((len(pixels),), label, device=self.compute.device))

    def conclude(self, task: Task, samples: Samples) -> None:
        """Fit the detectors to the task's images, and store some of these."""
        outputs = self.outputs_of_newest(samples)
        self.detectors_.append({
            name: self._detector(name, len(self.bank.tasks) - 1).fit_features(*outputs, samples.labels)
            for name in self.config.fitted
        })  # fmt: skip
        self.remember(task, outputs.features)
        self._use_memory([*self.task_classes_, task.classes])

    def _detector(self, name: str, task: int) -> Score:
        return DETECTORS[name]().use_head(*self.bank.tasks[task].own_head())

    def _use_memory(self, task_classes: list[tuple[str, ...]], calibrate: bool = True) -> None:
        """Hand every detector the task's own stored images, and calibrate on all of them."""
        tasks = self.memory_tasks(task_classes)
        for t, (detectors, seen) in enumerate(zip(self.detectors_, self.memory_outputs_, strict=True)):
            for detector in detectors.values():
                detector.use_memory(seen.features[tasks == t])
        if calibrate:
            wanted = self.config.task_choice == "calibrated" and len(task_classes) > 1
            self.calibration_ = None
            if wanted:
                shares = equal_shares(self.memory.labels.to(tasks.device))
                self.calibration_ = calibrate_together(self.task_scores(self.memory_outputs_), tasks, shares)

    def rescore(self, **changes: Any) -> None:
        """Switch to another of the fitted detectors or another `task_choice`, without training."""
        fixed = [name for name in changes if name not in ("score", "task_choice")]
        if fixed:
            raise TplError(f"{', '.join(fixed)} cannot change once a task is learned; start a new model.")
        # Later tasks are learned as before: the same detectors are fitted, images are stored or not.
        also = ALL if self.config.extra_scores == ALL else ",".join(self.config.fitted)
        config = self.config.replace(**({"extra_scores": also, "keep_images": self.memory_budget > 0} | changes))
        if config.memory_needed and not self.memory_budget:
            raise TplError(f"{config.memory_needed}, and this model has none; keep_images=true would have kept some.")
        if self.detectors_ and config.score not in self.detectors_[0]:
            raise TplError(f"{config.score} was not fitted; the model has {', '.join(self.detectors_[0])}.")
        other_outputs = self._perturbs(config.score) != self._perturbs(self.config.score)
        self.config, self._held_scores = config, None
        if other_outputs:
            self.memory_outputs_ = self.outputs(self.memory.pixels(self.preprocess, self.compute.device))
        self._use_memory(self.task_classes_)

    # Inference

    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """Raw scores of every task's detector, `[n, tasks]`."""
        pairs = zip(self.detectors_, outputs, strict=True)
        return torch.stack([found[self.config.score].score_features(*seen) for found, seen in pairs], dim=1)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """Class probabilities within each task, times the probability of the task."""
        scores = self.task_scores(outputs) if scores is None else scores
        if self.calibration_ is not None:
            tasks = (scores * self.calibration_[0] + self.calibration_[1]).log_softmax(dim=1)
        else:
            chosen = F.one_hot(scores.argmax(dim=1), scores.shape[1]).double()
            tasks = (CERTAIN * chosen + (1 - CERTAIN) / scores.shape[1]).log()
        owner = task_of_class(self.task_classes_).to(scores.device)
        return (within_tasks(outputs) + tasks[:, owner]).log_softmax(dim=1)

    def in_distribution_score(self, task: int, outputs: Outputs) -> Tensor:
        """The detector's score; ODIN's needs the image, so the maximum softmax is used instead."""
        if self._perturbs(self.config.score):
            return outputs.logits.double().softmax(dim=1).amax(dim=1)
        return self.detectors_[task][self.config.score].score_features(*outputs)

    # ODIN: a query with a perturbed image

    @staticmethod
    def _perturbs(score: str) -> bool:
        return bool(getattr(DETECTORS[score], "perturbs", False))

    def query(self, pixels: Tensor, queries: Sequence[Query]) -> list[Outputs]:
        """Features and logits; for ODIN, the logits of the perturbed image in place of features."""
        outputs = super().query(pixels, queries)
        if not self._perturbs(self.config.score):
            return outputs
        for i, (task, rows) in enumerate(queries):
            images, model = pixels if rows is None else pixels[rows.to(pixels.device)], self.bank.tasks[task]
            perturbed = self._perturbed(images, *model.own_head(), model.norms, *self.bank.weights(task))
            outputs[i] = Outputs(perturbed, outputs[i].logits)
        return outputs

    def _perturbed_logits(self, images: Tensor, weight: Tensor, bias: Tensor, norms: Tensor, *rest: Tensor) -> Tensor:
        """Logits of normalised images, perturbed so that the predicted class becomes likelier."""
        odin = Odin()

        def logits(batch: Tensor) -> Tensor:
            return F.linear(self.encoder(batch, norms, rest, dtype=self.compute.dtype), weight, bias)

        with torch.enable_grad():
            inputs = images.detach().requires_grad_()
            clean = logits(inputs) / odin.temperature
            (gradient,) = torch.autograd.grad(F.cross_entropy(clean, clean.argmax(dim=1), reduction="sum"), inputs)
        return logits(perturb(images, gradient, odin.epsilon, self._std)).detach()

    # Storage

    def shared_state(self) -> dict[str, Tensor]:
        """The calibration."""
        return {} if self.calibration_ is None else {"calibration": self.calibration_}

    def task_state(self, task: int) -> dict[str, Tensor]:
        """The state of each detector."""
        found = self.detectors_[task].items()
        return {f"score.{name}.{k}": v for name, detector in found for k, v in detector.state().items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore detectors and calibration."""
        self.detectors_ = [
            {
                name: self._detector(name, t).load_state(under_prefix(f"score.{name}.", own))
                for name in self.config.fitted
            }
            for t, own in enumerate(tasks)
        ]
        self.calibration_ = shared.get("calibration")
        self._use_memory(self.task_classes_, calibrate=False)
