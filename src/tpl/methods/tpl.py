"""TPL: class-incremental learning by likelihood-ratio-based task prediction (Lin et al., ICLR 2024).

Training: every task is learned under HAT masks with one more class, `others`, for the replay memory
(Eq. 2). Inference: each task's model scores an image by a likelihood ratio composed with its maximum
logit; the scores become P(task | image), and times the within-task probability P(class | image) (Eq. 3).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Listener, Recipe, Samples
from tpl.errors import TplError
from tpl.memory import POLICIES, Memory
from tpl.methods.bank import Bank, BankMethod, HatConfig, Outputs, TaskModel
from tpl.methods.base import register, task_of_class
from tpl.methods.lessons import Lesson
from tpl.nets import Encoder
from tpl.scores import LikelihoodRatio, RatioConfig
from tpl.scores.calibration import CALIBRATIONS, calibrate_probabilities, calibrate_scores, calibrate_shifts
from tpl.state import State
from tpl.stream import Task


@dataclass(frozen=True)
class TPLConfig(RatioConfig, HatConfig, Recipe):
    """TPL's options: training, network, score, and what turns scores into probabilities."""

    memory: int = option(2000, "images kept for replay, all classes together", minimum=0)
    memory_policy: str = option("random", "which images of a class are kept", tuple(POLICIES))
    others: str = option(
        "single", "single: one class for all replayed images (paper); per_class: one each (public code)",
        ("single", "per_class"),
    )  # fmt: skip
    gamma: float = option(0.05, "temperature of P(task | image), Eq. 11", above=0)
    calibration: str = option("score", "fitted on the memory after every task", CALIBRATIONS)


# What may change on a trained model: the whole score but the covariance, which is fitted on data long gone.
RESCORABLE = {f.name for f in fields(RatioConfig)} - {"shrinkage"} | {"gamma", "calibration"}


@register
class TPL(BankMethod):
    """Likelihood-ratio task prediction over a bank of task models."""

    name = "tpl"
    summary = "task models under HAT masks, told apart by a likelihood ratio (the paper's method)"
    paper = "Lin et al., Class Incremental Learning via Likelihood Ratio Based Task Prediction, ICLR 2024"
    config_class = TPLConfig
    config: TPLConfig
    memory: Memory

    def __init__(self, encoder: Encoder, config: TPLConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.memory = Memory(config.memory, config.memory_policy, seed)
        self.bank = Bank(self.encoder, config, compute, self.normalise, self.generator("adapters"))
        self.scores_: list[LikelihoodRatio] = []
        self.memory_outputs_: list[Outputs] = []  # the memory as each task's model sees it
        self.calibration_: Tensor | None = None  # scale and shift per task, [2, tasks]

    def lesson(self, task: Task, samples: Samples, listen: Listener) -> Lesson:
        """The task's own classes, and `others` for what is replayed."""
        own = len(task.classes)
        replay = self._replay(own)
        outputs = own
        if replay is not None:
            outputs += 1 if self.config.others == "single" else len(self.classes_)
        return Lesson(self.bank, samples, replay, own, outputs, self.config, self.generator("training"), listen)

    def conclude(self, task: Task, samples: Samples) -> None:
        """Keep the task's statistics, then update memory, kNN banks and calibration."""
        z, logits = self.bank.outputs(samples.pixels, len(self.bank.tasks) - 1)
        if not bool(z.isfinite().all()):
            raise TplError("Training ended with features that are not numbers: lower the learning rate (--lr).")
        self.scores_.append(LikelihoodRatio(self.config).fit_features(z, logits, samples.labels))
        kept = self.memory.add(task.train, len(task.classes), self.preprocess, self.compute.device)
        self._see_memory(kept)
        self._use_memory([*self.task_classes_, task.classes], calibrate=True)

    def task_scores(self, outputs: list[Outputs]) -> Tensor:
        """S_TPL of every task before calibration, `[n, tasks]`."""
        return torch.stack([s.score_features(*o) for s, o in zip(self.scores_, outputs, strict=True)], dim=1)

    def log_probabilities_of(self, outputs: list[Outputs], scores: Tensor | None = None) -> Tensor:
        """log P(class | image) from every task's outputs."""
        scores = self.task_scores(outputs) if scores is None else scores
        within = torch.cat([o.logits.double().log_softmax(dim=1) for o in outputs], dim=1)
        owner = task_of_class(self.task_classes_).to(scores.device)
        if self.calibration_ is not None:
            scale, shift = self.calibration_
            if self.config.calibration == "probability":
                raw: Tensor = (scale * scores)[:, owner] * within.exp() + shift[owner]
                return raw.log_softmax(dim=1)
            scores = scores * scale + shift
        task_log_p: Tensor = (scores / self.config.gamma).log_softmax(dim=1)  # Eq. 11
        return within + task_log_p[:, owner]

    def rescore(self, **changes: Any) -> None:
        """Change score, temperature or calibration of the trained model; nothing is trained anew."""
        fixed = [name for name in changes if name not in RESCORABLE and changes[name] != getattr(self.config, name)]
        if fixed:
            raise TplError(f"{', '.join(fixed)} cannot change once a task is learned; start a new model.")
        self.config = self.config.replace(**changes)
        self.scores_ = [LikelihoodRatio(self.config).load_state(s.state()) for s in self.scores_]
        self._use_memory(self.task_classes_, calibrate=True)

    # Memory, calibration, storage

    def _replay(self, own: int) -> Samples | None:
        labels = self.memory.labels
        if not len(labels):
            return None
        labels = torch.full_like(labels, own) if self.config.others == "single" else labels + own
        device = self.compute.device
        return Samples(self.memory.pixels(self.preprocess, device), labels.to(device))

    def _see_memory(self, kept: Tensor) -> None:
        """Show the memory to every task's model; `kept` are the rows that were there before.

        What an old model said of an old exemplar stays true where outputs are final.
        """
        pixels = self.memory.pixels(self.preprocess, self.compute.device)
        if self.outputs_are_final:
            rows = kept.to(self.compute.device)
            fresh = pixels[len(kept) :]
            for t, seen in enumerate(self.memory_outputs_):
                new = self.bank.outputs(fresh, t)
                self.memory_outputs_[t] = Outputs(*(torch.cat([a[rows], b]) for a, b in zip(seen, new, strict=True)))
        else:
            self.memory_outputs_ = []
        self.memory_outputs_ = self.outputs(pixels, known=self.memory_outputs_)

    def _use_memory(self, task_classes: list[tuple[str, ...]], calibrate: bool) -> None:
        """Give every score the others' memory, and calibrate on it: both change with every task."""
        owner = task_of_class(task_classes).to(self.compute.device)
        labels = self.memory.labels.to(self.compute.device)
        tasks = owner[labels]
        # A task that nobody else's memory opposes would stand out: then kNN is left out for all of them.
        opposed = all(bool((tasks != t).any()) for t in range(len(task_classes)))
        for t, (score, seen) in enumerate(zip(self.scores_, self.memory_outputs_, strict=True)):
            others = (tasks != t) if opposed else torch.zeros_like(tasks, dtype=torch.bool)
            score.refresh(seen.features[tasks == t], seen.features[others], labels[others])
        if calibrate:
            wanted = self.config.calibration != "none" and opposed and len(task_classes) > 1
            self.calibration_ = self._calibrate(labels, tasks, owner) if wanted else None

    def _calibrate(self, labels: Tensor, tasks: Tensor, owner: Tensor) -> Tensor:
        columns = []
        for t, (score, seen) in enumerate(zip(self.scores_, self.memory_outputs_, strict=True)):
            # Every sample is itself in one of this task's two kNN banks: it must not find itself.
            mine = tasks == t
            places = [torch.where(side, torch.cumsum(side, dim=0) - 1, -1) for side in (mine, ~mine)]
            columns.append(score.score_features(seen.features, seen.logits, *places))
        scores = torch.stack(columns, dim=1)
        if self.config.calibration == "score":
            return calibrate_scores(scores, tasks)
        if self.config.calibration == "shift":
            return calibrate_shifts(scores, tasks, self.config.gamma)
        within = torch.cat([seen.logits.double().softmax(dim=1) for seen in self.memory_outputs_], dim=1)
        return calibrate_probabilities(
            within, scores, owner, labels, self.generator("calibration", len(self.bank.tasks))
        )

    def state(self) -> State:
        """Adapters and the memory's features are shared; masks, norms, heads and statistics are a task's own."""
        shared = {f"adapters.{k}": v.detach() for k, v in self.bank.adapters.state_dict().items()}
        for t, seen in enumerate(self.memory_outputs_):
            shared[f"memory.{t}.features"], shared[f"memory.{t}.logits"] = seen
        if self.calibration_ is not None:
            shared["calibration"] = self.calibration_
        tasks = []
        for model, score in zip(self.bank.tasks, self.scores_, strict=True):
            own = {k: v.detach() for k, v in model.state_dict().items()}
            tasks.append(own | {f"score.{k}": v for k, v in score.state().items()})
        return State(shared, tasks)

    def load_state(self, state: State) -> None:
        """Rebuild bank, scores and calibration; nothing is computed through the encoder."""
        device = self.compute.device
        prefix = "adapters."
        adapters = {k.removeprefix(prefix): v for k, v in state.shared.items() if k.startswith(prefix)}
        self.bank.adapters.load_state_dict(adapters)
        self.bank.tasks, self.bank.used = [], None
        self.scores_, self.memory_outputs_ = [], []
        for t, (own, classes) in enumerate(zip(state.tasks, self.task_classes_, strict=True)):
            model = [own[k] for k in ("embedding", "norms", "head_weight", "head_bias")]
            self.bank.add(TaskModel(len(classes), *model))
            learned = {k.removeprefix("score."): v.to(device) for k, v in own.items() if k.startswith("score.")}
            self.scores_.append(LikelihoodRatio(self.config).load_state(learned))
            seen = (state.shared[f"memory.{t}.{k}"].to(device) for k in ("features", "logits"))
            self.memory_outputs_.append(Outputs(*seen))
        self.calibration_ = state.shared["calibration"].to(device) if "calibration" in state.shared else None
        self._use_memory(self.task_classes_, calibrate=False)
