"""Distillation: a network is trained to repeat a teacher's output, at a temperature.

p = softmax(teacher / T) and q = softmax(student / T), over the given columns. A high temperature T shows how the
teacher ranks the classes that it does not predict. Gradients shrink with 1/T^2; the factor T^2 that some papers put
against it is up to the caller, and so are weights between terms, and which rows count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import IGNORED, masked_mean
from tpl.methods.parts.network import CrossEntropy, Network

Teacher = tuple[Network, Sequence[slice]]  # a frozen network, and the groups of classes that are distilled from it


def soft_cross_entropy(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """-sum_c p_c log q_c of every row, `[n]`."""
    p = (teacher_logits / temperature).softmax(dim=1)
    return -(p * (student_logits / temperature).log_softmax(dim=1)).sum(dim=1)


def kd(student_logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL(p || q) = sum_c p_c log(p_c / q_c) of every row, `[n]`: the same gradient, and zero where they agree."""
    log_p = (teacher_logits / temperature).log_softmax(dim=1)
    log_q = (student_logits / temperature).log_softmax(dim=1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)


def class_slices(sizes: Sequence[int]) -> list[slice]:
    """The columns of consecutive groups of classes of these sizes."""
    return [slice(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


class Distillation(CrossEntropy):
    """Cross-entropy over all classes so far, and T^2 KL(p || q) for every group of classes of every teacher.

    A group has a softmax of its own, on every image of the batch, and weighs as much as its share of all distilled
    classes. `class_weights` `[classes]` weigh the cross-entropy alone, by the image's label.
    """

    def __init__(
        self, network: Network, teachers: Sequence[Teacher], temperature: float, class_weights: Tensor | None = None
    ) -> None:
        super().__init__(network)
        self.teachers, self.temperature, self.class_weights = teachers, temperature, class_weights
        self.distilled = sum(_width(columns) for _, groups in teachers for columns in groups)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Both terms, as means over the rows that count."""
        with torch.no_grad():
            taught = [(teacher(images), groups) for teacher, groups in self.teachers]
        logits, counted = self.network(images), labels != IGNORED
        entropies = F.cross_entropy(logits, labels, reduction="none")
        if self.class_weights is not None:
            entropies = entropies * self.class_weights[labels.clamp_min(0)]
        loss = masked_mean(entropies, counted)
        for teacher_logits, groups in taught:
            for columns in groups:
                divergence = masked_mean(kd(logits[:, columns], teacher_logits[:, columns], self.temperature), counted)
                loss = loss + self.temperature**2 * _width(columns) / self.distilled * divergence
        return loss


def _width(columns: slice) -> int:
    return int(columns.stop - columns.start)
