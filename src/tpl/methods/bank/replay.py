"""A bank with a replay memory: what TPL, MORE and ROW have in common.

Every task is trained with one more class, `others`, for the images of earlier tasks in the memory (Eq. 2). What each
task's model says of the memory is kept, and brought up to date after every task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpl.config import option
from tpl.engine import Compute, Listener, Recipe, Samples
from tpl.errors import TplError
from tpl.memory import POLICIES, Memory
from tpl.methods.bank.asking import Question
from tpl.methods.bank.bank import Bank, Outputs
from tpl.methods.bank.lessons import Lesson
from tpl.methods.bank.method import BankMethod, HeldOut
from tpl.methods.bank.models import TaskModel
from tpl.methods.bank.protect import ProtectConfig
from tpl.methods.bank.techniques import Technique
from tpl.methods.base import task_of_class
from tpl.nets import Encoder
from tpl.state import State, beginning_with
from tpl.stream import Task

ADAPTERS = "adapters."


@dataclass(frozen=True)
class MemoryConfig(ProtectConfig, Recipe):
    """Training, network, and a memory of images."""

    memory: int = option(2000, "images kept for replay, all classes together", minimum=0)
    memory_policy: str = option("random", "which images of a class are kept", tuple(POLICIES))
    turned_classes: bool = option(
        False, "also train on new images turned by 90, 180 or 270 degrees, as classes that no answer names"
    )


class MemoryBank(BankMethod):
    """A bank, a memory of images, and what every task's model says of them."""

    config: MemoryConfig
    memory: Memory

    def __init__(
        self,
        encoder: Encoder,
        config: MemoryConfig,
        compute: Compute,
        seed: int = 0,
        technique: type[Technique] = Technique,
    ) -> None:
        super().__init__(encoder, config, compute, seed)
        if config.turned_classes:
            self.check_square("turned_classes=true")
        self.memory = Memory(self.memory_budget, config.memory_policy, seed)
        self.bank = Bank(self.encoder, config, compute, self.normalise, self.generator("adapters"), technique)
        self.held_: list[HeldOut] = []
        self.memory_outputs_: list[Outputs] = []  # the memory as each task's model sees it

    def check_splits(self) -> None:
        """As every method; and the training technique has a say."""
        super().check_splits()
        if not self.bank.technique.splits:
            raise TplError(
                f"technique={self.bank.technique.name} looks at a whole batch, so several processes cannot share one. "
                "Start one process, or choose another technique."
            )

    @property
    def memory_budget(self) -> int:
        """How many images the memory may keep."""
        return self.config.memory

    def outputs_of_newest(self, samples: Samples) -> Outputs:
        """What the model just trained says of its training images."""
        outputs = self.bank.outputs(samples.pixels, len(self.bank.tasks) - 1)
        if not bool(outputs.features.isfinite().all()):
            raise TplError("Training ended with features that are not numbers: lower the learning rate (--lr).")
        return outputs

    def remember(self, task: Task) -> None:
        """Keep some images of a task that was just trained, and show the memory to every task's model."""
        nobody = torch.zeros(0, self.encoder.dim, device=self.compute.device)
        self.held_.append(HeldOut(nobody, torch.zeros(0, dtype=torch.long, device=self.compute.device)))
        self._held_scores = None
        kept = self.memory.add(task.train, len(task.classes), self.preprocess, self.compute.device)
        self._see_memory(kept)

    def memory_tasks(self, task_classes: list[tuple[str, ...]]) -> Tensor:
        """The task of every image in the memory."""
        return task_of_class(task_classes).to(self.compute.device)[self.memory.labels.to(self.compute.device)]

    def memory_features(self, task: int) -> Tensor | None:
        """What one task's model sees of the memory."""
        return self.memory_outputs_[task].features

    def new_lesson(self, samples: Samples, replay: Samples | None, own: int, outputs: int, listen: Listener) -> Lesson:
        """A lesson for the bank by this method's own recipe."""
        training, turned = self.generator("training"), self.config.turned_classes
        return Lesson(self.bank, samples, replay, own, outputs, self.config, training, listen, turned)

    def replay_samples(self, label: int) -> Samples | None:
        """The memory's images, all with one label; None while it is empty."""
        labels = torch.full((len(self.memory),), label, device=self.compute.device)
        return Samples(self.memory.pixels(self.preprocess, self.compute.device), labels) if len(labels) else None

    def _see_memory(self, kept: Tensor) -> None:
        """Show the memory to every task's model; `kept` are the rows that were there before.

        What an old model said of an old exemplar stays true where outputs are final.
        """
        pixels = self.memory.pixels(self.preprocess, self.compute.device)
        if self.outputs_are_final:
            rows = kept.to(self.compute.device)
            fresh = pixels[len(kept) :]
            told = self.answers(fresh, [Question(t) for t in range(len(self.memory_outputs_))])
            for t, (seen, new) in enumerate(zip(self.memory_outputs_, told, strict=True)):
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
                for column, fresh in zip(moved, self.outputs_of(t, pixels), strict=True):
                    column[new] = fresh
            self.memory_outputs_[t] = moved

    # Storage

    def shared_state(self) -> dict[str, Tensor]:
        """What a method has learned beyond the bank and the memory, by name."""
        return {}

    def task_state(self, task: int) -> dict[str, Tensor]:
        """What it has learned for one task, by name."""
        return {}

    def load_own_state(self, shared: dict[str, Tensor], tasks: list[dict[str, Tensor]]) -> None:
        """Take up what `shared_state` and `task_state` gave; bank and memory are in place."""

    def state(self) -> State:
        """Adapters and the memory's features are shared; masks, norms, heads and statistics are a task's own."""
        shared = {ADAPTERS + k: v.detach() for k, v in self.bank.adapters.state_dict().items()}
        for t, seen in enumerate(self.memory_outputs_):
            shared[f"memory.{t}.features"], shared[f"memory.{t}.logits"] = seen
        if self.bank.retired is not None:
            shared["retired"] = self.bank.retired
        tasks = []
        for t, (model, held) in enumerate(zip(self.bank.tasks, self.held_, strict=True)):
            own = {k: v.detach() for k, v in model.state_dict().items()} | self.task_state(t)
            tasks.append(own | {f"held.{k}": v for k, v in held.tensors().items()})
        return State(shared | self.shared_state(), tasks)

    def load_state(self, state: State) -> None:
        """Rebuild bank and memory, then what the method has beyond them; the encoder is not asked."""
        device = self.compute.device
        shared = {k: v.to(device) for k, v in state.shared.items()}
        tasks = [{k: v.to(device) for k, v in own.items()} for own in state.tasks]
        self.bank.adapters.load_state_dict(beginning_with(ADAPTERS, shared))
        self.bank.restart(shared.get("retired"))
        self.held_, self.memory_outputs_, self._held_scores = [], [], None
        for t, (own, classes) in enumerate(zip(tasks, self.task_classes_, strict=True)):
            model = TaskModel(len(classes), *(own[k] for k in ("embedding", "norms", "head_weight", "head_bias")))
            model.turned_classes = self.config.turned_classes
            self.bank.add(model)
            features = own.get("held.features", own["head_weight"][:0])  # early versions held nothing out
            labels = own.get("held.labels", torch.zeros(0, dtype=torch.long, device=device))
            self.held_.append(HeldOut(features, labels, own.get("held.common")))
            self.memory_outputs_.append(Outputs(*(shared[f"memory.{t}.{k}"] for k in ("features", "logits"))))
        self.load_own_state(shared, tasks)


class ReplayBank(MemoryBank):
    """A bank whose tasks are trained with one more class, `others`, for the memory's images."""

    def lesson(self, task: Task, samples: Samples, listen: Listener) -> Lesson:
        """The task's own classes, and `others` for what is replayed."""
        own = len(task.classes)
        replay = self.replay_samples(own)
        outputs = own + (replay is not None)
        return self.new_lesson(samples, replay, own, outputs, listen)
