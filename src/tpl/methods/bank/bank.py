"""The bank: all task models in one network, kept apart by a protection such as HAT's masks.

The encoder is shared, and so are the weights trained in it: adapters, or all of a network that starts from scratch. A
task owns its mask, its norms and its head. While it is trained, the protection holds still every weight that an earlier
task uses, so an old task's features never change: with binary masks not by a single bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tpl.engine import Event, Listener
from tpl.methods.bank.asking import Asking, Question, asking
from tpl.methods.bank.looks import UPRIGHT, Looks
from tpl.methods.bank.models import TaskModel, TaskModels

NEARLY_FULL = 0.95


class Outputs(NamedTuple):
    """What one task's model says of some images."""

    features: Tensor  # [n, dim]
    logits: Tensor  # [n, own classes]


class Bank(TaskModels):
    """The set of task models in one network: what it grows by, and what it answers."""

    used: Tensor | None = None  # units that some finished task holds
    retired: Tensor | None = None  # units of tasks that are gone: their weights are never trained again
    same_as: Bank | None = None  # the bank that every task here was copied from, if there is one
    looks: Looks = UPRIGHT  # at an image that is asked about

    @cached_property
    def _ask(self) -> Asking:
        return asking(self, self.encoder, self.compute)

    def outputs(self, pixels: Tensor, task: int) -> Outputs:
        """Features and own-class logits of uint8 images under a finished task's model."""
        return self.answers(pixels, [Question(task)])[0]

    def answers(self, pixels: Tensor, questions: Sequence[Question]) -> list[Outputs]:
        """The same for several tasks, each of its own choice of the images: quicker than one by one.

        On a GPU the answers have the same bits as one by one, on a CPU they are the same up to rounding.
        """
        with torch.no_grad():
            told = [self._ask(look.at(pixels), questions) for look in self.looks]
            return [self._joined(task, seen) for (task, _), *seen in zip(questions, *told, strict=True)]

    def _joined(self, task: int, seen: list[Tensor]) -> Outputs:
        """What one task says of images after all looks at them, the upright ones first."""
        by_turn: dict[int, list[Tensor]] = {}
        for look, features in zip(self.looks, seen, strict=True):
            by_turn.setdefault(look.quarters, []).append(features)
        means = {quarters: _mean(features) for quarters, features in by_turn.items()}
        upright = means.pop(0)
        read = [self.logits(upright, task), *(self._turned_logits(z, task, q) for q, z in means.items())]
        return Outputs(upright, _mean(read))

    def logits(self, features: Tensor, task: int) -> Tensor:
        """What a finished task's head says of its own classes.

        Computed in float64: to float32, the number of images that share the product then makes no difference.
        """
        return self._turned_logits(features, task, 0)

    def _turned_logits(self, features: Tensor, task: int, quarters: int) -> Tensor:
        with torch.no_grad():
            return self.technique.logits(features, *self.tasks[task].own_head(quarters)).float()

    def restart(self, retired: Tensor | None) -> None:
        """Hold no task, with the units of tasks long gone in use."""
        self.tasks, self.used, self.retired = [], retired, retired

    def add(self, model: TaskModel) -> None:
        """Take up a finished task: freeze it and claim its units."""
        self.same_as = None
        self.tasks.append(model.requires_grad_(False).to(self.compute.device))
        self.used = _united(self.used, self.unit_mask(len(self.tasks) - 1))

    @torch.no_grad()
    def copy_newest(self, other: Bank) -> None:
        """Take up the newest task of a bank that was the same as this one before."""
        followed = not self.tasks or self.same_as is other
        for own, trained in zip(self.adapters.weights, other.adapters.weights, strict=True):
            own.copy_(trained)
        self.add(copy.deepcopy(other.tasks[-1]))
        self.same_as = other if followed else None

    def retire(self, task: int) -> None:
        """Let a task go. Its units stay in use: other tasks may share them, and none may move them."""
        self.retired = _united(self.retired, self.unit_mask(task))
        self.same_as = None
        del self.tasks[task]

    def capacity(self) -> dict[str, float]:
        """How full the network is: the share of units in use, and of shared weights that are frozen."""
        return self.protection.capacity(self.adapters, self.used)

    def new_task(self, own: int, outputs: int, generator: torch.Generator, turned_classes: bool = False) -> TaskModel:
        """An untrained task with `outputs` head outputs: the first `own` its classes, the last for turned ones."""
        dim = self.encoder.dim
        bound = dim**-0.5  # torch's own initialisation of a linear layer
        head = torch.empty(outputs, dim).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator)
        embedding = self.protection.initial(self.adapters, generator)
        model = TaskModel(own, embedding, self.encoder.new_norms(), head, bias)
        model.turned_classes = turned_classes
        return model.to(self.compute.device)

    def warn_if_full(self, listen: Listener) -> None:
        """Tell that hardly any weight is left to learn with."""
        frozen = self.capacity()["frozen"]
        if frozen >= NEARLY_FULL:
            text = (
                f"{frozen:.1%} of the shared weights belong to earlier tasks. A new task still gets its own norms, "
                f"mask and head, but hardly any free weights; a model with a larger latent size (a wider network, if "
                f"it is trained from scratch) has more room."
            )
            listen(Event("warning", {"text": text}))


def within_tasks(outputs: list[Outputs]) -> Tensor:
    """log P(class | image, task) of every task, side by side, `[n, classes]`."""
    return torch.cat([seen.logits.double().log_softmax(dim=1) for seen in outputs], dim=1)


def _mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else sum(parts[1:], parts[0]) / len(parts)


def _united(used: Tensor | None, claim: Tensor | None) -> Tensor | None:
    return claim if used is None or claim is None else torch.maximum(used, claim)
