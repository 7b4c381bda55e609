"""A network that grows: one feature extractor a task, over one frozen trunk.

An extractor is a set of adapters and layer norms, or all kernels and norms of a network without a trunk. While a task
is learned, the newest extractor is trained and all older ones are frozen; the classifier takes their concatenated
features, `[n, extractors * dim]`. So old features are never forgotten, and every image takes one pass for each task.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.engine import Compute
from tpl.errors import TplError
from tpl.methods.parts.network import Network, NetworkConfig, new_rows
from tpl.methods.parts.rehearsal import RehearsalMethod
from tpl.nets import Encoder
from tpl.store import State

HEAD = ("head_weight", "head_bias")


class Extractor(NamedTuple):
    """What one task adds to the trunk: its norms, and its weights by name, in the order that the encoder expects."""

    norms: Tensor
    named: dict[str, Tensor]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights alone."""
        return tuple(self.named.values())

    def copy(self) -> Extractor:
        """A copy of the tensors, without gradients."""
        return Extractor(self.norms.detach().clone(), {k: w.detach().clone() for k, w in self.named.items()})

    def state(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {"norms": self.norms.detach()} | {k: w.detach() for k, w in self.named.items()}

    @classmethod
    def of(cls, network: Network) -> Extractor:
        """The extractor of a network: its adapters or kernels, and norms."""
        return cls(network.norms, dict(network.adapters.named_parameters()))


class Head(NamedTuple):
    """A linear classifier that is trained beside a network."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Logits of features `[n, dim]`."""
        return F.linear(features, self.weight, self.bias)

    def detached(self) -> Head:
        """The head without gradients."""
        return Head(self.weight.detach(), self.bias.detach())

    @classmethod
    def new(cls, outputs: int, network: Network, generator: torch.Generator, extractors: int = 1) -> Head:
        """An untrained head over the concatenated features of some extractors."""
        dim, device = extractors * network.trunk[0].dim, network.norms.device
        rows = new_rows(outputs, dim, generator)
        return cls(rows.to(device).requires_grad_(), torch.zeros(outputs, device=device).requires_grad_())


class ExpandedNetwork(Network):
    """A `Network` whose own adapters and norms are the newest extractor; older ones are kept frozen."""

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, generator: torch.Generator) -> None:
        super().__init__(encoder, config, compute, generator)
        self.dim = encoder.dim
        self.frozen: list[Extractor] = []  # no parameters: nothing may train them

    @property
    def extractors(self) -> list[Extractor]:
        """All extractors, in the order of their tasks."""
        return [*self.frozen, Extractor.of(self)]

    def expand(self, generator: torch.Generator) -> None:
        """Freeze the newest extractor and add a trainable copy of it, with new columns of the classifier.

        The classifier's other columns are unchanged.
        """
        self.frozen.append(self.extractors[-1].copy())
        bound = (self.dim * len(self.extractors)) ** -0.5
        columns = torch.empty(len(self.head_bias), self.dim).uniform_(-bound, bound, generator=generator)
        self.head_weight = nn.Parameter(torch.cat([self.head_weight.detach(), columns.to(self.head_weight)], dim=1))

    @torch.no_grad()
    def restart(self, extractor: Extractor) -> None:
        """Initialise the newest extractor from this one."""
        self.norms.copy_(extractor.norms)
        for name, own in self.adapters.named_parameters():
            own.copy_(extractor.named[name])

    def newest_features(self, images: Tensor) -> Tensor:
        """Features of normalised images by the newest extractor alone, `[n, dim]`."""
        return super().features(images)

    def features(self, images: Tensor) -> Tensor:
        """Features by all extractors, the newest last; gradients flow into that one."""
        with torch.no_grad():
            fixed = [self.trunk[0](images, e.norms, e.weights, dtype=self.compute.dtype) for e in self.frozen]
        return torch.cat([*fixed, self.newest_features(images)], dim=1)


class ExpansionMethod(RehearsalMethod):
    """A method with an extractor a task, one classifier over all of them, and a memory of images."""

    network: ExpandedNetwork

    def new_network(self) -> ExpandedNetwork:
        """One extractor, and a classifier without classes."""
        return ExpandedNetwork(self.encoder, self.config, self.compute, self.generator("adapters", task=0))

    def features(self, pixels: Tensor) -> Tensor:
        """Concatenated features of uint8 images by all extractors, `[n, extractors * dim]`."""
        return torch.cat([self.adapted_features(pixels, e.norms, *e.weights) for e in self.network.extractors], dim=1)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax over all classes so far.

        The product is in float64: the result for an image then does not depend on the batch.
        """
        network = self.network
        with torch.no_grad():
            logits = F.linear(self.features(pixels).double(), network.head_weight.double(), network.head_bias.double())
            return logits.log_softmax(dim=1)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Not supported: the classifier also needs the extractor of a task without classes."""
        raise TplError(f"The method '{self.name}' cannot remove a class.")

    def state(self) -> State:
        """An extractor for every task; the classifier is shared."""
        extractors = self.network.extractors[: len(self.task_classes_)]  # before the first task there is an unused one
        shared = {name: getattr(self.network, name).detach() for name in HEAD}
        return State(shared, [extractor.state() for extractor in extractors])

    def load_state(self, state: State) -> None:
        """Rebuild the extractors and the classifier."""
        self.network = network = self.new_network()
        names, device = [name for name, _ in network.adapters.named_parameters()], self.compute.device
        extractors = [
            Extractor(own["norms"].to(device), {name: own[name].to(device) for name in names}) for own in state.tasks
        ]
        if extractors:
            network.frozen = [extractor.copy() for extractor in extractors[:-1]]
            network.restart(extractors[-1])
        network.load_head(*(state.shared[name] for name in HEAD))
