"""What MORE and ROW compute on frozen features: distances to every task's classes, and heads trained afterwards.

A head is a softmax classifier on the features of its own task. Many heads are trained at once: they are the first axis
of all tensors, so one matrix product computes them all. One after the other, launching kernels would take most time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tpl.engine import CapturedFunction, Compute
from tpl.methods.bank.bank import Outputs, TaskModel
from tpl.scores import Mahalanobis
from tpl.store import under_prefix

STEPS = 16  # of training heads in one block, which on a GPU is one CUDA graph


class TaskCentres:
    """Class means and a shared covariance of every task, for Mahalanobis distances."""

    def __init__(self, shrinkage: str | float = "auto") -> None:
        self.shrinkage = shrinkage  # of the covariance
        self.tasks: list[Mahalanobis] = []

    def __getitem__(self, task: int) -> Mahalanobis:
        return self.tasks[task]

    def add(self, outputs: Outputs, labels: Tensor) -> None:
        """Fit one more task, from its model's outputs for its training images."""
        self.tasks.append(Mahalanobis(self.shrinkage).fit_features(*outputs, labels))

    def estimators(self) -> list[str]:
        """How each task's covariance was estimated."""
        return [task.estimator for task in self.tasks]

    def closeness(self, outputs: list[Outputs]) -> Tensor:
        """max_c 1 / d_M(z_j, mu_c) of every task j, `[n, tasks]`."""
        squares = [centre.score_features(*each) for centre, each in zip(self.tasks, outputs, strict=True)]
        return torch.stack(squares, dim=1).sqrt()

    def state(self, task: int) -> dict[str, Tensor]:
        """One task's statistics, for storage."""
        return {"score." + k: v for k, v in self.tasks[task].state().items()}

    def load_state(self, tasks: list[dict[str, Tensor]]) -> None:
        """Restore the statistics of all tasks."""
        self.tasks = [Mahalanobis(self.shrinkage).load_state(under_prefix("score.", own)) for own in tasks]


class Heads(NamedTuple):
    """Several heads with equally many outputs: weights `[heads, outputs, dim]`, biases `[heads, outputs]`."""

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Logits of each head for its own features `[heads, n, dim]`, float64."""
        return features.double() @ self.weight.double().mT + self.bias.double().unsqueeze(1)

    def apart(self) -> list[Heads]:
        """A list of the single heads."""
        return [Heads(*parts) for parts in zip(self.weight.split(1), self.bias.split(1), strict=True)]

    def own_probabilities(self, features: Tensor, own: int, temperature: float) -> Tensor:
        """Softmax of a single head's outputs for features `[n, dim]`; the columns of its `own` classes."""
        return (self.logits(features.unsqueeze(0))[0] / temperature).softmax(dim=1)[:, :own]


def joined(heads: list[Heads]) -> Heads:
    """Heads with equally many outputs as one set."""
    return Heads(*(torch.cat(parts) for parts in zip(*heads, strict=True)))


@torch.no_grad()
def fit_heads(heads: Heads, features: Tensor, labels: Tensor, rows: Tensor, lr: float, momentum: float = 0.9) -> Heads:
    """SGD on the cross-entropy of every head: one step for each of `rows`, `[steps, heads, batch]`.

    `features` are `[heads, n, dim]`, `labels` `[heads, n]`; a row of -1 is ignored. The gradient in closed form: with
    p the softmax and y the label as a vector, dCE/dW = (p - y) z^T and dCE/db = p - y.

    A step is so small that launching its kernels takes most of the time. So weights and biases are one vector, what
    does not depend on them is computed for a block of steps at once, and on a GPU a block is a replay of a CUDA graph.
    """
    device, sizes = heads.weight.device, [part.numel() for part in heads]
    which = torch.arange(len(labels), device=device).unsqueeze(1)
    outputs = torch.arange(heads.bias.shape[1], device=device)

    def parts(vector: Tensor) -> Heads:
        """Views of the weights and biases in a vector."""
        return Heads(*(part.view_as(like) for part, like in zip(vector.split(sizes), heads, strict=True)))

    def block(state: Tensor, rows: Tensor) -> Tensor:
        """The vector and its velocity, `[2, parameters]`, after one step for each of `rows`."""
        vector, velocity = state.clone().unbind()
        (weight, bias), gradient = parts(vector), torch.empty_like(vector)
        by_weight, by_bias = parts(gradient)
        places, counted = rows.clamp_min(0), (rows >= 0).to(state)
        seen, targets = features[which, places], (labels[which, places].unsqueeze(3) == outputs).to(state)
        shares = (counted / counted.sum(dim=2, keepdim=True).clamp_min(1)).unsqueeze(3)
        for z, y, share in zip(seen.unbind(), targets.unbind(), shares.unbind(), strict=True):
            logits = torch.bmm(z, weight.mT).add_(bias.unsqueeze(1))
            error = logits.softmax(dim=2).sub_(y).mul_(share)
            torch.bmm(error.mT, z, out=by_weight)
            torch.sum(error, dim=1, out=by_bias)
            velocity = velocity.mul_(momentum).add_(gradient) if momentum else gradient
            vector.sub_(velocity, alpha=lr)
        return torch.stack([vector, velocity])

    vector = torch.cat([part.flatten() for part in heads])
    state = torch.stack([vector, torch.zeros_like(vector)])
    captured = CapturedFunction(block, Compute(device, bf16=False))
    for some in rows.to(device).split(STEPS):
        state = captured(state, some) if len(some) == STEPS else block(state, some)
    return Heads(*(part.clone() for part in parts(state[0])))


def epoch_of(counts: list[int], length: int, batch: int, generator: torch.Generator) -> Tensor:
    """Row numbers of one epoch: `length` of each of several sets, shuffled and repeated, `[steps, sets, batch]`.

    The last step is padded with -1; a set without rows is -1 throughout.
    """
    steps = -(-length // batch)
    columns = []
    for count in counts:
        rounds = [torch.randperm(count, generator=generator) for _ in range(-(-length // count))] if count else []
        drawn = torch.cat(rounds)[:length] if rounds else torch.full((length,), -1)
        columns.append(torch.nn.functional.pad(drawn, (0, steps * batch - length), value=-1).view(steps, batch))
    return torch.stack(columns, dim=1)


def head_with_others(model: TaskModel, generator: torch.Generator) -> Heads:
    """A copy of a task's head with an output for others; the first task, trained without it, gets a new one."""
    weight, bias = model.upright_head()
    if len(bias) == model.own:
        bound = weight.shape[1] ** -0.5
        row = torch.empty(1, weight.shape[1] + 1).uniform_(-bound, bound, generator=generator).to(weight.device)
        weight, bias = torch.cat([weight, row[:, :-1]]), torch.cat([bias, row[:, -1]])
    return Heads(weight.unsqueeze(0).clone(), bias.unsqueeze(0).clone())


def train_heads(
    heads: list[Heads],
    data: Callable[[int], tuple[Tensor, Tensor]],
    rows: Callable[[list[int]], Tensor],
    lr: float,
    momentum: float,
) -> list[Heads]:
    """All heads after training; those with equally many outputs are trained at once.

    `data` returns features `[n, dim]` and labels `[n]` for the number of a head, `rows` the row numbers of all steps,
    `[steps, heads, batch]`, for the numbers of a group of heads.
    """
    trained = list(heads)
    for group in alike(heads):
        features, labels = zip(*map(data, group), strict=True)
        start = joined([heads[t] for t in group])
        found = fit_heads(start, torch.stack(features), torch.stack(labels), rows(group), lr, momentum)
        for t, head in zip(group, found.apart(), strict=True):
            trained[t] = head
    return trained


def alike(heads: list[Heads]) -> list[list[int]]:
    """Groups of head numbers with equally many outputs, which can be trained at once."""
    groups: dict[int, list[int]] = {}
    for t, head in enumerate(heads):
        groups.setdefault(head.bias.shape[1], []).append(t)
    return list(groups.values())
