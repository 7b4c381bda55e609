"""APER, first published as ADAM: adapt to the first task, freeze, compare with class prototypes (Zhou et al., 2024).

The first task alone trains adapters, under a cosine head with a learned scale s:

    loss = cross-entropy of s cos(w_c, f(x))

Then head and training are finished. An image's embedding concatenates its features under the original and the adapted
encoder; a class's prototype p_c is the mean embedding of its training images, and

    P(c | x) = softmax_c of s cos(p_c, z(x)),   z(x) = (f_plain(x), f_adapted(x))

No replay, no forgetting: later tasks add prototypes. How much adaptation helps depends on the first task's size.

Adapted to this toolkit: its adapters, behind attention and MLP, replace the paper's parallel one beside each MLP, and
layer norms are trained as well (`train_norms=false` leaves them). Weight decay and a learning rate that falls to zero
are as published. Prototypes are means over images without augmentation; the first task's are computed after the
adaptation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import Callback, Compute, Samples
from tpl.methods.base import register
from tpl.methods.parts.cosine import CosineHeadMethod, cosines
from tpl.methods.parts.fixed_features import FixedFeatures
from tpl.methods.parts.network import CosineScheduleConfig, NetworkMethod
from tpl.nets import Encoder
from tpl.stream import Task


@dataclass(frozen=True)
class APERConfig(CosineScheduleConfig):
    """APER's options; all of them matter for the first task alone."""


@register
class APER(FixedFeatures, CosineHeadMethod):
    """Prototypes in the features of the encoder, plain and adapted to the first task."""

    name = "aper"
    summary = "adapters trained on the first task, then class prototypes of plain and adapted features (ADAM)"
    paper = (
        "Zhou et al., Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and Adaptivity "
        "are All You Need, IJCV 2024"
    )
    keeps = "a mean of plain and adapted features a class"
    cost = "training on the first task alone, then two forward passes an image, once; two an answer"
    splits = True
    config_class = APERConfig
    config: APERConfig
    extra_state = ("scale", "sums", "counts")

    def __init__(self, encoder: Encoder, config: APERConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        device = compute.device
        self.scale = torch.ones((), device=device)
        self.sums = torch.zeros(0, 2 * encoder.dim, dtype=torch.float64, device=device)  # of the classes' embeddings
        self.counts = torch.zeros(0, dtype=torch.float64, device=device)

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Adapt to a first task; then add the classes' prototypes."""
        if not len(self.counts):
            self.scale = self.train_features(task, samples, callback)
        new, first = len(task.classes), len(self.classes_)
        self.sums, self.counts = F.pad(self.sums, (0, 0, 0, new)), F.pad(self.counts, (0, new))
        self.add_to_prototypes(self.encode(samples, callback, self.features), samples.labels + first)

    def add_to_prototypes(self, z: Tensor, numbers: Tensor) -> None:
        """Add embeddings, labelled by class number, to the sums behind the prototypes."""
        member = F.one_hot(numbers, len(self.counts)).double()
        self.sums = self.sums + member.T @ z
        self.counts = self.counts + member.sum(dim=0)

    @property
    def prototypes(self) -> Tensor:
        """The mean embedding of every class, `[classes, 2 dim]`."""
        return self.sums / self.counts.unsqueeze(1)

    def features(self, pixels: Tensor) -> Tensor:
        """An image's embedding: features of the original and of the adapted encoder, `[n, 2 dim]`, float64."""
        return torch.cat([self.encoder_features(pixels), NetworkMethod.features(self, pixels)], dim=1).double()

    def classify(self, z: Tensor) -> Tensor:
        """Softmax of scaled cosines with the prototypes."""
        return (self.scale * cosines(z, self.prototypes)).log_softmax(dim=1)

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes move their prototypes."""
        self.add_to_prototypes(self.features(samples.pixels), self.numbers_of(task, samples))

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's prototype."""
        kept = torch.arange(len(self.counts), device=self.counts.device) != number
        self.sums, self.counts = self.sums[kept], self.counts[kept]
