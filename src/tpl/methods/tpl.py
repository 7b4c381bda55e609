"""TPL: class-incremental learning by likelihood-ratio-based task prediction (Lin et al., ICLR 2024).

Training: every task is learned under HAT masks with one more class, `others`, for the replay memory
(Eq. 2). Inference: each task's model scores an image by a likelihood ratio composed with its maximum
logit; the scores become P(task | image), and times the within-task probability P(class | image) (Eq. 3).

With `memory_kind=features` or `none` no image is stored: tasks are trained on their own classes alone, and stored
statistics replace the memory at inference (`tpl.methods.bank.imageless`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.errors import TplError
from tpl.methods.bank import Outputs, TaskModel, within_tasks
from tpl.methods.bank.bank import TTA
from tpl.methods.bank.imageless import FEATURES, IMAGES, KINDS, StoredStatistics, some_rows
from tpl.methods.bank.method import BankMethod, MemoryConfig
from tpl.methods.bank.training import TrainingJob
from tpl.methods.base import register, task_of_class
from tpl.nets import Encoder
from tpl.scores import LikelihoodRatio, RatioConfig
from tpl.scores.calibration import (
    CALIBRATIONS,
    calibrate_probabilities,
    calibrate_scores,
    calibrate_shifts,
    equal_shares,
)
from tpl.scores.ratio import memory_scores, use_memory
from tpl.store import under_prefix
from tpl.stream import Task


@dataclass(frozen=True)
class TPLConfig(RatioConfig, MemoryConfig):
    """TPL's options: training, network, score, and what turns scores into probabilities."""

    others: str = option(
        "single", "single: one class for all replayed images (paper); per_class: one each (public code)",
        ("single", "per_class"), group="training",
    )  # fmt: skip
    gamma: float = option(0.05, "temperature of P(task | image), Eq. 11", above=0, group="task prediction")
    calibration: str = option(
        "score",
        "fitted on the memory after every task; without images, any but none weighs the evidence",
        CALIBRATIONS,
        group="task prediction",
    )
    memory_kind: str = option(
        "images",
        "what is kept of old images: some of them; statistics of the encoder's features; none",
        KINDS,
        group="memory",
    )
    tta: str = option(
        "none",
        "test-time augmentation: answers are averaged over the image and its horizontal flip, its three rotations "
        "(with rotation_classes), or both (eight passes)",
        tuple(TTA),
        group="test time",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_kind != IMAGES and self.in_task == "knn":
            raise TplError(f"in_task=knn compares with stored images; memory_kind={self.memory_kind} keeps none.")
        if any(view.rotation for view in TTA[self.tta]) and not self.rotation_classes:
            raise TplError(
                f"tta={self.tta} reads the outputs for rotated images: train with rotation_classes=true, or choose "
                "tta=none or flip."
            )


@register
class TPL(BankMethod):
    """Likelihood-ratio task prediction over a bank of task models."""

    name = "tpl"
    summary = "task models under HAT masks; the task is predicted by a likelihood ratio (the paper's method)"
    paper = "Lin et al., Class Incremental Learning via Likelihood Ratio Based Task Prediction, ICLR 2024"
    keeps = "a class-balanced memory (see memory_kind); a task's mask, norms, head, means and covariance"
    cost = "training: as many replayed images as new ones, so two passes; prediction: one pass per task"
    splits = True
    config_class = TPLConfig
    from_scratch = True
    config: TPLConfig
    # Options that can change on a trained model: all of the score except the covariance, whose data are not stored.
    rescorable: ClassVar[set[str]] = {f.name for f in fields(RatioConfig)} - {"shrinkage"} | {"gamma", "calibration"}

    def __init__(self, encoder: Encoder, config: TPLConfig, compute: Compute, seed: int = 0) -> None:
        if config.memory_kind == FEATURES and not encoder.pretrained:
            raise TplError(
                f"memory_kind=features stores features of a pre-trained encoder, and '{encoder.name}' is trained from "
                "scratch: use memory_kind=none or images."
            )
        super().__init__(encoder, config, compute, seed)
        self.bank.views = TTA[config.tta]
        self.statistics = (
            StoredStatistics(config.memory_kind, config.shrinkage) if config.memory_kind != IMAGES else None
        )
        self._weights: dict[bool, Tensor] = {}  # of the scores, with and without the encoder's own features
        self.scores_: list[LikelihoodRatio] = []
        self.calibration_: Tensor | None = None  # scale and shift per task, [2, tasks]
        self._has_others = False  # whether the memory has images of other tasks for every task

    @property
    def memory_budget(self) -> int:
        """Number of images the memory may store; 0 where statistics replace them."""
        return self.config.memory if self.config.memory_kind == IMAGES else 0

    @property
    def memory_bytes(self) -> int:
        """Size of the memory's images, or of the statistics that replace them and the features of held-out images."""
        if self.statistics is None:
            return super().memory_bytes
        held = sum(part.numel() * part.element_size() for each in self.held_ for part in each.tensors().values())
        return self.statistics.bytes_used + held

    def covariance_estimators(self) -> list[str]:
        """How each task's covariance was estimated."""
        return [score.centres.estimator for score in self.scores_]

    @property
    def needs_encoder_features(self) -> bool:
        """Whether a prediction needs the encoder's own features."""
        return self.config.memory_kind == FEATURES

    @property
    def models(self) -> list[TaskModel]:
        """All models that a prediction may run: the task models, in the order of the tasks."""
        return self.bank.tasks

    def training_job(self, task: Task, samples: Samples, callback: Callback) -> TrainingJob:
        """The job of `BankMethod`; with `others=per_class`, the head has an output for each replayed class."""
        job = super().training_job(task, samples, callback)
        if job.replay is None or self.config.others == "single":
            return job
        labels = self.memory.labels.to(self.compute.device) + job.own
        replay = Samples(job.replay.pixels, labels)
        return dataclasses.replace(job, replay=replay, outputs=job.own + len(self.classes_))

    def conclude(self, task: Task, samples: Samples) -> None:
        """Fit the task's score, store some of its images, then update kNN banks and calibration."""
        z, logits = self.outputs_of_newest(samples)
        self.scores_.append(LikelihoodRatio(self.config).fit_features(z, logits, samples.labels))
        self.remember(task, z)
        task_classes = [*self.task_classes_, task.classes]
        if self.statistics is not None:
            self._keep_statistics(self.statistics, samples, Outputs(z, logits), task_classes)
        self._use_memory(task_classes, calibrate=True)

    def common_features(self, pixels: Tensor) -> Tensor | None:
        """The encoder's own features, if statistics of them replace the memory."""
        return self.encoder_features(pixels) if self.needs_encoder_features else None

    def join_common(self, encoder: Tensor, models: Sequence[Tensor]) -> Tensor | None:
        """`common_features` from the encoder's own features and those under each of `models`."""
        return encoder if self.needs_encoder_features else None

    def task_scores(self, outputs: list[Outputs], common: Tensor | None = None) -> Tensor:
        """S_TPL of every task before calibration, `[n, tasks]`."""
        contrast = self.contrast(common)
        return torch.stack([self.score_of(t, each, contrast) for t, each in enumerate(outputs)], dim=1)

    def score_of(self, task: int, outputs: Outputs, contrast: Tensor | None) -> Tensor:
        """S_TPL of one task; `contrast` are the scores of `contrast` for the same images, if there are any."""
        score = self.scores_[task]
        if not self._weights:
            plain = score.score_features(*outputs)
            return plain if contrast is None else plain + contrast[:, task]
        evidence = score.evidence(*outputs)
        if contrast is not None:
            evidence = torch.cat([evidence, contrast[:, task : task + 1]], dim=1)
        return evidence @ self._weights[contrast is not None]

    def contrast(self, common: Tensor | None) -> Tensor | None:
        """How much closer an image is to a task's classes than to others', in encoder features, `[n, tasks]`."""
        left_out = self.config.out_of_task == "constant" or self.config.in_task == "none"
        if self.statistics is None or self.statistics.space is None or common is None or left_out:
            return None
        return self.statistics.contrast(common, self.task_classes_)

    def in_distribution_score(self, task: int, outputs: Outputs) -> Tensor:
        """S_MD, the part of S_TPL that depends on the task's own statistics alone."""
        return self.scores_[task].in_distribution_score(*outputs)

    def log_probabilities_of(
        self, outputs: list[Outputs], scores: Tensor | None = None, common: Tensor | None = None
    ) -> Tensor:
        """log P(class | image) from every task's outputs."""
        scores = self.task_scores(outputs, common) if scores is None else scores
        within = within_tasks(outputs)
        owner = task_of_class(self.task_classes_).to(scores.device)
        if self.calibration_ is not None and self.config.calibration == "probability":
            scale, shift = self.calibration_
            raw: Tensor = (scale * scores)[:, owner] * within.exp() + shift[owner]
            return raw.log_softmax(dim=1)
        return within + self.task_log_probabilities(scores)[:, owner]

    def task_log_probabilities(self, scores: Tensor) -> Tensor:
        """log P(task | image) from task scores `[n, tasks]`; a task with score -inf has probability 0."""
        if self.calibration_ is not None:  # a fitted scale may be 0 or negative: -inf stays what it is
            left_out = scores == -torch.inf
            scores = (scores * self.calibration_[0] + self.calibration_[1]).masked_fill(left_out, -torch.inf)
        answer: Tensor = (scores / self.config.gamma).log_softmax(dim=1)  # Eq. 11
        return answer

    def rescore(self, **changes: Any) -> None:
        """Change score, temperature or calibration of the trained model, without training."""
        fixed = [
            name for name in changes if name not in self.rescorable and changes[name] != getattr(self.config, name)
        ]
        if fixed:
            raise TplError(f"{', '.join(fixed)} cannot change once a task is learned; start a new model.")
        self.config, self._held_scores = self.config.replace(**changes), None
        self.scores_ = [LikelihoodRatio(self.config).load_state(s.state()) for s in self.scores_]
        self._use_memory(self.task_classes_, calibrate=True)

    # Updating and removing classes

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Update the statistics of the classes' own tasks, the memory, kNN banks and calibration.

        Nothing is trained: adapters, masks, norms and heads do not change by a bit, nor do other tasks' statistics.
        """
        self._held_scores = None
        places = [self.place_of(name) for name in task.classes]
        owner, own = (torch.tensor(column, device=samples.labels.device) for column in zip(*places, strict=True))
        numbers = [self.classes_.index(name) for name in task.classes]
        counts = {n: int(self.scores_[t].counted(c)) for n, (t, c) in zip(numbers, places, strict=True)}
        for t in sorted({t for t, _ in places}):
            for part, add in ((samples, self._merge), (held, self._extend_held_out)):
                mine = owner[part.labels] == t
                if bool(mine.any()):
                    add(t, Samples(part.pixels[mine.to(part.pixels.device)], own[part.labels[mine]]))
        labels = task.train.labels
        more = {n: task.train.select(labels == i) for i, n in enumerate(numbers)}
        self._rearrange_memory(self.memory.redraw(more, counts, self.preprocess))
        if self.statistics is not None and self.statistics.space is not None and len(samples):
            self.statistics.space.merge(self.encoder_features(samples.pixels), self.numbers_of(task, samples))
        self._use_memory(self.task_classes_, calibrate=True)

    def _merge(self, task: int, samples: Samples) -> None:
        z, logits = self.bank.outputs(samples.pixels, task)
        self.scores_[task].merge(z, logits, samples.labels)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Remove the class's head row, mean, held-out images and exemplars, and everything computed from these.

        What was trained or pooled over several classes stays (adapters, norms, covariance), so predictions for other
        classes only change where the exemplars were used. A task without classes is removed; its units stay in use.
        """
        had_others, self._held_scores = self._has_others, None
        if self.config.others == "per_class":
            for later in self.bank.tasks[task + 1 :]:
                if number < later.others:  # none, if nothing was replayed
                    later.drop(later.own + number)
        if self.bank.tasks[task].own == 1:
            self.bank.retire(task)
            del self.scores_[task], self.held_[task], self.memory_outputs_[task]
            if self.calibration_ is not None:
                kept = [t for t in range(len(self.bank.tasks) + 1) if t != task]
                self.calibration_ = self.calibration_[:, kept]
        else:
            self.bank.tasks[task].drop(own)
            self.scores_[task].centres.forget(own)
            self.held_[task] = self.held_[task].without(own)
            features, logits = self.memory_outputs_[task]
            columns = torch.arange(logits.shape[1], device=logits.device) != own
            self.memory_outputs_[task] = Outputs(features, logits[:, columns])
        self._rearrange_memory(self.memory.remove(number))
        if self.statistics is not None and self.statistics.space is not None:
            self.statistics.space.forget(number)
        # The calibration is only fitted again if the kNN term is dropped or added: other predictions should not change.
        self._use_memory(self.task_classes_, calibrate=False)
        if self._has_others != had_others:
            self._use_memory(self.task_classes_, calibrate=True)

    # Memory, calibration, storage

    def _keep_statistics(
        self, statistics: StoredStatistics, samples: Samples, newest: Outputs, task_classes: list[tuple[str, ...]]
    ) -> None:
        """Add a new task's images to the statistics: encoder features, and all tasks' scores for some of them."""
        if statistics.space is not None:
            encoded = self.encoder_features(samples.pixels)
            statistics.space.learn(encoded, samples.labels)
        if len(task_classes) == 1:
            return
        rows = some_rows(len(samples)).to(self.compute.device)
        pixels = samples.pixels[rows.to(samples.pixels.device)]
        outputs = [self.outputs_of(t, pixels) for t in range(len(task_classes) - 1)]
        outputs.append(Outputs(*(column[rows] for column in newest)))
        evidence = torch.stack([s.evidence(*o) for s, o in zip(self.scores_, outputs, strict=True)], dim=1)
        if statistics.space is not None:
            contrast = statistics.contrast(encoded[rows], task_classes)
            evidence = torch.cat([evidence, contrast.unsqueeze(2)], dim=2)
        statistics.weigh(evidence)

    def _use_memory(self, task_classes: list[tuple[str, ...]], calibrate: bool) -> None:
        """Update every score's kNN banks from the memory, and fit the calibration on it if `calibrate`."""
        owner = task_of_class(task_classes).to(self.compute.device)
        labels = self.memory.labels.to(self.compute.device)
        tasks = owner[labels]
        self._has_others = use_memory(self.scores_, self.memory_outputs_, tasks, labels)
        self._weights = {}
        if self.statistics is not None and self.config.calibration != "none":
            sides = (False,) if self.statistics.space is None else (False, True)
            self._weights = {s: self.statistics.weights(self.config, s).to(self.compute.device) for s in sides}
        if calibrate:
            wanted = self.config.calibration != "none" and self._has_others and len(task_classes) > 1
            self.calibration_ = self._calibrate(labels, tasks, owner) if wanted else None

    def _calibrate(self, labels: Tensor, tasks: Tensor, owner: Tensor) -> Tensor:
        scores = memory_scores(self.scores_, self.memory_outputs_, tasks)
        if self.config.calibration == "score":
            return calibrate_scores(scores, tasks, equal_shares(labels))
        if self.config.calibration == "shift":
            return calibrate_shifts(scores, tasks, self.config.gamma, equal_shares(labels))
        within = torch.cat([each.logits.double().softmax(dim=1) for each in self.memory_outputs_], dim=1)
        return calibrate_probabilities(
            within, scores, owner, labels, self.generator("calibration", len(self.bank.tasks))
        )

    def shared_state(self) -> dict[str, Tensor]:
        """The calibration, and the statistics that replace the memory, if any."""
        calibration = {} if self.calibration_ is None else {"calibration": self.calibration_}
        return calibration | ({} if self.statistics is None else self.statistics.state())

    def task_state(self, task: int) -> dict[str, Tensor]:
        """The score's statistics."""
        return {f"score.{k}": v for k, v in self.scores_[task].state().items()}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Restore scores and calibration, without running the encoder."""
        self.scores_ = [LikelihoodRatio(self.config).load_state(under_prefix("score.", own)) for own in tasks]
        self.calibration_ = shared.get("calibration")
        if self.statistics is not None:
            self.statistics.load_state(shared)
        self._use_memory(self.task_classes_, calibrate=False)
