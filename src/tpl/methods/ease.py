"""EASE: an adapter and a feature space a task, with prototypes of every class in every space (Zhou et al., CVPR 2024).

Each task trains fresh adapters under a cosine head of its own classes, which is then dropped; the adapters are frozen.
An image has features f_1(x), ..., f_T(x), one for each adapter. A class has a prototype in every space. Where its own
images were at hand, in the spaces up to its task's, that is their mean. In a later space j it is put together from
classes that have prototypes in both spaces, weighed by how similar they are to class c in the space i of its own task:

    p_c,j = sum over k of softmax_k(cos(p_c,i, p_k,i)) p_k,j,      k: classes of task j and of those after it

A class answers by the cosines in all spaces, that of its own task's adapters first:

    logit_c(x) = cos(f_i(x), p_c,i) + alpha / (T - 1) sum over j != i of cos(f_j(x), p_c,j)

No replay; every adapter costs a pass.

As in the public code, which the published numbers come from: prototypes in later spaces are put together anew after
every task from all later classes (`donors=later`; by the paper's text, once, from the classes of task j: `newest`);
alpha = 0.1 is shared by the other spaces. Weight decay and a learning rate that falls to zero are as published. Adapted
to this toolkit: its adapters, behind attention and MLP, replace the paper's parallel one beside each MLP, and each task
has layer norms of its own, which are trained as well (`train_norms=false` leaves them). Logits are multiplied by the
mean of the heads' learned scales, which changes probabilities and no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.methods.base import owners, register
from tpl.methods.parts.cosine import CosineHeadMethod, cosines
from tpl.methods.parts.expansion import Extractor
from tpl.methods.parts.network import CosineScheduleConfig, Network
from tpl.nets import Encoder
from tpl.scores.distances import without_row
from tpl.store import State
from tpl.stream import Task


@dataclass(frozen=True)
class EASEConfig(CosineScheduleConfig):
    """EASE's options, beside those of training and network."""

    alpha: float = option(0.1, "weight of all other tasks' spaces together", minimum=0, group="classifier")
    donors: str = option(
        "later",
        "classes that old prototypes in a later space are put together from: all later ones (public code), "
        "or those of the space's own task (newest, paper)",
        ("later", "newest"),
        group="classifier",
    )


def completed(known: Sequence[Tensor], donors: str) -> Tensor:
    """Prototypes of all classes in all spaces, `[classes, tasks, dim]`.

    `known[i]` are those of task i's classes in the spaces up to its own, `[classes, i + 1, dim]`.
    """
    count, rows = len(known), []
    for i, own in enumerate(known):
        spaces = list(own.unbind(1))
        for j in range(i + 1, count):
            group = known[j:] if donors == "later" else known[j : j + 1]
            here, there = torch.cat([k[:, i] for k in group]), torch.cat([k[:, j] for k in group])
            spaces.append(cosines(own[:, i], here).softmax(dim=1) @ there)
        rows.append(torch.stack(spaces, dim=1))
    return torch.cat(rows)


@register
class EASE(CosineHeadMethod):
    """Frozen adapters a task, and a prototype classifier over all their spaces."""

    name = "ease"
    summary = "an adapter a task; class prototypes in every space, those of old classes synthesised; no replay"
    paper = (
        "Zhou et al., Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning, CVPR 2024"
    )
    keeps = "adapters a task, and a mean a class in every space up to its task's"
    cost = "one pass an image and epoch, then one for every adapter; one an adapter and answer"
    splits = True
    config_class = EASEConfig
    config: EASEConfig

    def __init__(self, encoder: Encoder, config: EASEConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.extractors: list[Extractor] = []
        self.sums: list[Tensor] = []  # of features, of a task's classes in the spaces up to its own
        self.counts: list[Tensor] = []
        self.scales: list[Tensor] = []
        self._solve()

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train fresh adapters; then add prototypes of the new classes in all spaces."""
        self.network = Network(self.encoder, self.config, self.compute, self.generator("adapters"))
        self.scales = [*self.scales, self.train_features(task, samples, callback)]
        self.extractors = [*self.extractors, Extractor.of(self.network).copy()]
        self.network = self.new_network()
        member = F.one_hot(samples.labels, len(task.classes)).double()
        self.sums = [*self.sums, torch.einsum("nc,nsd->csd", member, self.spaces(samples.pixels))]
        self.counts = [*self.counts, member.sum(dim=0)]
        self._solve()

    def _solve(self) -> None:
        """Compute the prototypes of all classes in all spaces."""
        known = [sums / counts.view(-1, 1, 1) for sums, counts in zip(self.sums, self.counts, strict=True)]
        empty = torch.zeros(0, 0, self.encoder.dim, dtype=torch.float64, device=self.compute.device)
        self.prototypes = completed(known, self.config.donors) if known else empty

    def spaces(self, pixels: Tensor) -> Tensor:
        """Features of uint8 images in every task's space, `[n, tasks, dim]`, float64."""
        found = [self.adapted_features(pixels, e.norms, *e.weights) for e in self.extractors]
        return torch.stack(found, dim=1).double()

    def features(self, pixels: Tensor) -> Tensor:
        """Concatenated features of all spaces, `[n, tasks * dim]`."""
        return self.spaces(pixels).flatten(1)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax of weighed and scaled cosines in all spaces."""
        count = len(self.extractors)
        owner = owners([len(counts) for counts in self.counts]).to(self.compute.device)
        weights = torch.full((len(owner), count), self.config.alpha / max(count - 1, 1), dtype=torch.float64)
        weights = weights.to(owner.device).scatter(1, owner.unsqueeze(1), 1.0)
        prototypes = F.normalize(self.prototypes, dim=2) * weights.unsqueeze(2)
        logits = F.normalize(self.spaces(pixels), dim=2).flatten(1) @ prototypes.flatten(1).T
        return (torch.stack(self.scales).double().mean() * logits).log_softmax(dim=1)

    def update_classes(self, task: Task, samples: Samples, held: Samples) -> None:
        """More images of known classes move their prototypes in the spaces up to their task's."""
        member = F.one_hot(self.numbers_of(task, samples), len(self.classes_)).double()
        found = torch.einsum("nc,nsd->csd", member, self.spaces(samples.pixels))
        sizes = [len(counts) for counts in self.counts]
        groups = zip(found.split(sizes), member.sum(dim=0).split(sizes), strict=True)
        for t, (sums, counts) in enumerate(groups):
            self.sums[t], self.counts[t] = self.sums[t] + sums[:, : t + 1], self.counts[t] + counts
        self._solve()

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's prototypes; with a task's last class, its adapters and their space."""
        self.sums[task], self.counts[task] = without_row(self.sums[task], own), without_row(self.counts[task], own)
        if not len(self.counts[task]):
            for part in (self.extractors, self.sums, self.counts, self.scales):
                del part[task]
            later = self.sums[task:]
            self.sums[task:] = [torch.cat([sums[:, :task], sums[:, task + 1 :]], dim=1) for sums in later]
        self._solve()

    def state(self) -> State:
        """Adapters, sums and counts of every task."""
        own = zip(self.extractors, self.sums, self.counts, self.scales, strict=True)
        parts = [e.state() | {"sums": sums, "counts": counts, "scale": scale} for e, sums, counts, scale in own]
        return State({}, parts)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        self.network, device = self.new_network(), self.compute.device
        names = [name for name, _ in self.network.adapters.named_parameters()]
        tasks = [{name: part.to(device) for name, part in own.items()} for own in state.tasks]
        self.extractors = [Extractor(own["norms"], {name: own[name] for name in names}) for own in tasks]
        self.sums, self.counts, self.scales = ([own[name] for own in tasks] for name in ("sums", "counts", "scale"))
        self._solve()
