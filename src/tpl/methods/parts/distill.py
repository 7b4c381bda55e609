"""Distillation: a network is asked to say what a teacher says, at a temperature.

p = softmax(teacher / T) and q = softmax(student / T), over the columns handed over. A high temperature T shows how the
teacher ranks the classes that it does not choose. Gradients shrink with 1/T^2; the factor T^2 that some papers put
against it is the caller's, as are weights between terms, and which rows count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED
from tpl.methods.parts.network import CrossEntropy, Network

Teacher = tuple[Network, Sequence[slice]]  # a frozen network, and the groups of classes it is asked about


def soft_cross_entropy(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """-sum_c p_c log q_c of every row, `[n]`."""
    p = (teacher_logits / temperature).softmax(dim=1)
    return -(p * (student_logits / temperature).log_softmax(dim=1)).sum(dim=1)


def kd(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL(p || q) = sum_c p_c log(p_c / q_c) of every row, `[n]`: the same gradient, and zero where they agree."""
    log_p = (teacher_logits / temperature).log_softmax(dim=1)
    log_q = (student_logits / temperature).log_softmax(dim=1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)


def mean_of(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of the values `[n]` of those rows that count; 0 if none does. What the others hold does not matter."""
    return values.masked_fill(~counted, 0.0).sum() / counted.sum().clamp_min(1)


def rows_that_count(labels: Tensor) -> Tensor:
    """Which rows are samples at all: the others only fill a batch up."""
    return labels != IGNORED


def side_by_side(sizes: Sequence[int]) -> list[slice]:
    """The columns of groups of classes that come one after the other."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


class Distillation(CrossEntropy):
    """Cross-entropy over all classes so far, and T^2 KL(p || q) for every group of classes a teacher is asked about.

    A group is judged by a softmax of its own, on every image of the batch, and weighs as much as its share of all
    classes that are distilled. `class_weights` `[classes]` weigh the cross-entropy alone, by the image's label.
    """

    def __init__(
        self, network: Network, teachers: Sequence[Teacher], temperature: float, class_weights: Tensor | None = None
    ) -> None:
        super().__init__(network)
        self.teachers, self.temperature, self.class_weights = teachers, temperature, class_weights
        self.distilled = sum(width(columns) for _, groups in teachers for columns in groups)

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """Both terms, as means over the rows that count; there is one network."""
        with torch.no_grad():
            says = [(teacher(images), groups) for teacher, groups in self.teachers]
        return self.of_logits(self.network(images), labels[0], says).unsqueeze(0)

    def of_logits(self, logits: Tensor, labels: Tensor, says: Sequence[tuple[Tensor, Sequence[slice]]]) -> Tensor:
        """The loss, given the network's logits and what each teacher `says`, with the groups it is asked about."""
        counted = rows_that_count(labels)
        wrong = F.cross_entropy(logits, labels, reduction="none")
        if self.class_weights is not None:
            wrong = wrong * self.class_weights[labels.clamp_min(0)]
        loss = mean_of(wrong, counted)
        for taught, groups in says:
            for columns in groups:
                apart = mean_of(kd(logits[:, columns], taught[:, columns], self.temperature), counted)
                loss = loss + self.temperature**2 * width(columns) / self.distilled * apart
        return loss


def width(columns: slice) -> int:
    """How many columns there are."""
    return int(columns.stop - columns.start)
