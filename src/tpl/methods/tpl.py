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
from tpl.methods.bank import Bank, BankMethod, HatConfig, HeldOut, Outputs, TaskModel
from tpl.methods.base import register, task_of_class
from tpl.methods.lessons import Lesson
from tpl.nets import Encoder
from tpl.scores import LikelihoodRatio, RatioConfig
from tpl.scores.calibration import CALIBRATIONS, calibrate_probabilities, calibrate_scores, calibrate_shifts
from tpl.scores.ratio import memory_scores, oppose
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
        self.held_: list[HeldOut] = []
        self.memory_outputs_: list[Outputs] = []  # the memory as each task's model sees it
        self.calibration_: Tensor | None = None  # scale and shift per task, [2, tasks]
        self._opposed = False  # whether every task meets memory of others

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
        self.held_.append(HeldOut(z[:0], samples.labels[:0]))
        self._held_scores = None
        kept = self.memory.add(task.train, len(task.classes), self.preprocess, self.compute.device)
        self._see_memory(kept)
        self._use_memory([*self.task_classes_, task.classes], calibrate=True)

    def task_scores(self, outputs: list[Outputs]) -> Tensor:
        """S_TPL of every task before calibration, `[n, tasks]`."""
        return torch.stack([s.score_features(*o) for s, o in zip(self.scores_, outputs, strict=True)], dim=1)

    def knownness(self, task: int, outputs: Outputs) -> Tensor:
        """The part of S_TPL that rests on the task's features alone: MD."""
        return self.scores_[task].knownness(*outputs)

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

    # More images of known classes, and classes that go

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """Refresh the statistics of the classes' own tasks, and what is derived from the memory.

        Nothing is trained: adapters, masks, norms and heads keep every bit, and so do other tasks' statistics.
        """
        self._held_scores = None
        places = [self.place_of(name) for name in task.classes]
        owner, own = (torch.tensor(column, device=samples.labels.device) for column in zip(*places, strict=True))
        numbers = [self.classes_.index(name) for name in task.classes]
        seen = {n: int(self.scores_[t].counted(c)) for n, (t, c) in zip(numbers, places, strict=True)}
        for t in sorted({t for t, _ in places}):
            for part, take in ((samples, self._merge), (held, self._extend_held_out)):
                mine = owner[part.labels] == t
                if bool(mine.any()):
                    take(t, Samples(part.pixels[mine.to(part.pixels.device)], own[part.labels[mine]]))
        labels = task.train.labels
        more = {n: task.train.select(labels == i) for i, n in enumerate(numbers)}
        self._rearrange_memory(self.memory.redraw(more, seen, self.preprocess))
        self._use_memory(self.task_classes_, calibrate=True)

    def _merge(self, task: int, samples: Samples) -> None:
        z, logits = self.bank.outputs(samples.pixels, task)
        self.scores_[task].merge(z, logits, samples.labels)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's head row, mean, held-out images and exemplars, and all that was computed from these.

        What was trained or pooled over several classes stays (adapters, norms, covariance): so do the others' answers,
        but for what the exemplars said about other tasks. A task without classes goes; its units stay in use.
        """
        opposed, self._held_scores = self._opposed, None
        if self.config.others == "per_class":
            for later in self.bank.tasks[task + 1 :]:
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
            seen = self.memory_outputs_[task]
            columns = torch.arange(seen.logits.shape[1], device=seen.logits.device) != own
            self.memory_outputs_[task] = Outputs(seen.features, seen.logits[:, columns])
        self._rearrange_memory(self.memory.remove(number))
        # The calibration stays, as the other answers should, unless what it was fitted with is no more.
        self._use_memory(self.task_classes_, calibrate=False)
        if self._opposed != opposed:
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

    def _rearrange_memory(self, origin: Tensor) -> None:
        """Follow a change of the memory; `origin` is the row that each exemplar was in before, -1 if it is new."""
        if not self.outputs_are_final:
            self._see_memory(origin[:0])
            return
        origin = origin.to(self.compute.device)
        new = origin < 0
        pixels = self.memory.pixels(self.preprocess, self.compute.device)[new]
        for t, seen in enumerate(self.memory_outputs_):
            moved = Outputs(*(column[origin.clamp_min(0)] for column in seen))
            if bool(new.any()):
                for column, fresh in zip(moved, self.bank.outputs(pixels, t), strict=True):
                    column[new] = fresh
            self.memory_outputs_[t] = moved

    def _use_memory(self, task_classes: list[tuple[str, ...]], calibrate: bool) -> None:
        """Give every score the others' memory, and calibrate on it: both change with every task."""
        owner = task_of_class(task_classes).to(self.compute.device)
        labels = self.memory.labels.to(self.compute.device)
        tasks = owner[labels]
        self._opposed = oppose(self.scores_, self.memory_outputs_, tasks, labels)
        if calibrate:
            wanted = self.config.calibration != "none" and self._opposed and len(task_classes) > 1
            self.calibration_ = self._calibrate(labels, tasks, owner) if wanted else None

    def _calibrate(self, labels: Tensor, tasks: Tensor, owner: Tensor) -> Tensor:
        scores = memory_scores(self.scores_, self.memory_outputs_, tasks)
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
        if self.bank.retired is not None:
            shared["retired"] = self.bank.retired
        tasks = []
        for model, score, held in zip(self.bank.tasks, self.scores_, self.held_, strict=True):
            own = {k: v.detach() for k, v in model.state_dict().items()}
            own |= {f"score.{k}": v for k, v in score.state().items()}
            tasks.append(own | {f"held.{k}": v for k, v in held._asdict().items()})
        return State(shared, tasks)

    def load_state(self, state: State) -> None:
        """Rebuild bank, scores and calibration; nothing is computed through the encoder."""
        device = self.compute.device
        prefix = "adapters."
        adapters = {k.removeprefix(prefix): v for k, v in state.shared.items() if k.startswith(prefix)}
        self.bank.adapters.load_state_dict(adapters)
        self.bank.restart(state.shared["retired"].to(device) if "retired" in state.shared else None)
        self.scores_, self.held_, self.memory_outputs_ = [], [], []
        self._held_scores = None
        for t, (own, classes) in enumerate(zip(state.tasks, self.task_classes_, strict=True)):
            model = [own[k] for k in ("embedding", "norms", "head_weight", "head_bias")]
            self.bank.add(TaskModel(len(classes), *model))
            learned = {k.removeprefix("score."): v.to(device) for k, v in own.items() if k.startswith("score.")}
            self.scores_.append(LikelihoodRatio(self.config).load_state(learned))
            features = own.get("held.features", own["head_weight"][:0])  # early versions held nothing out
            labels = own.get("held.labels", torch.zeros(0, dtype=torch.long))
            self.held_.append(HeldOut(features.to(device), labels.to(device)))
            seen = (state.shared[f"memory.{t}.{k}"].to(device) for k in ("features", "logits"))
            self.memory_outputs_.append(Outputs(*seen))
        self.calibration_ = state.shared["calibration"].to(device) if "calibration" in state.shared else None
        self._use_memory(self.task_classes_, calibrate=False)
