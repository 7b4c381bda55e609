"""One adapted network with one growing head: what the single-model methods share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import Callback, Compute, Inference, Recipe, Samples, batches_of_images, train
from tpl.methods.base import Method
from tpl.methods.parts.head import GrowingHead
from tpl.nets import Encoder, unstacked
from tpl.state import State
from tpl.stream import Task


@dataclass(frozen=True)
class NetworkConfig(Recipe):
    """Options of a method that trains one network with adapters."""

    latent: int = option(64, "hidden units of an adapter; resnet18 has a width in its name instead", minimum=1)
    train_norms: bool = option(True, "whether the norms are trained along with adapters or kernels")


class Network(GrowingHead):
    """An encoder, what is trained in it without masks, its norms, and a linear head that grows."""

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, generator: torch.Generator) -> None:
        super().__init__()
        self.trunk = [encoder]  # in a list: the frozen trunk is not part of this module's state
        self.compute = compute
        self.adapters = encoder.new_adapters(config.latent, generator)
        self.norms = nn.Parameter(encoder.new_norms(), requires_grad=config.train_norms)
        self.new_head(encoder.dim)
        self.to(compute.device)

    def copy(self) -> Self:
        """A frozen copy, to teach what this network says now; the trunk is shared."""
        trunk = self.trunk[0]
        twin = deepcopy(self, {id(trunk): trunk, id(self.compute): self.compute})
        return twin.requires_grad_(False).eval()

    def features(self, images: Tensor) -> Tensor:
        """Features of normalised images, in a training step; a copy gives its answers."""
        dtype, learning = self.compute.dtype, self.training
        z: Tensor = self.trunk[0](images, self.norms, self.adapters.weights, dtype=dtype, learning=learning)
        return z

    @torch.no_grad()
    def reestimate_norms(self, images: Iterable[Tensor]) -> None:
        """Give batch norms the statistics of the images just trained on, batch by batch; others do not look at them."""
        encoder = self.trunk[0]
        if encoder.batch_norms:
            self.norms.copy_(encoder.reestimated_norms(self.norms, self.adapters.weights, images, self.compute.dtype))

    def logits(self, features: Tensor) -> Tensor:
        """Logits over all classes so far."""
        return F.linear(features, self.head_weight, self.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of normalised images."""
        return self.logits(self.features(images))


class CrossEntropy:
    """Plain cross-entropy over all classes so far."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def shown(self, images: Tensor) -> Tensor:
        """The images of a batch as the network gets to see them."""
        return images

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """Cross-entropy of one batch; there is one network."""
        return F.cross_entropy(self.network(images), labels[0]).unsqueeze(0)

    def after_backward(self, progress: Tensor) -> None:
        """Nothing to do."""

    def after_step(self) -> None:
        """Nothing to do."""


class NetworkMethod(Method):
    """A method whose whole knowledge is one `Network`."""

    config_class = NetworkConfig
    config: NetworkConfig
    beside: ClassVar[tuple[str, ...]] = ()  # attributes, tensors all, that are stored beside the network

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.network = self.new_network()
        features = unstacked(encoder, compute.dtype)
        self._logits = Inference(  # of any weights: the network is made anew, and its head grows
            lambda images, head, bias, *network: F.linear(features(images, *network), head, bias),
            compute,
            self.normalise,
        )

    def new_network(self) -> Network:
        """A network that knows no class yet."""
        return Network(self.encoder, self.config, self.compute, self.generator("adapters", task=0))

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Grow the head and train everything trainable on the task's data alone."""
        self.fit(self.grow(task, samples), callback)

    def grow(self, task: Task, samples: Samples) -> Samples:
        """Add the task's classes to the head; its samples, labelled by their numbers among all classes."""
        self.network.grow(len(task.classes), self.generator("head"))
        return Samples(samples.pixels, samples.labels + len(self.classes_))

    def fit(
        self,
        samples: Samples,
        callback: Callback,
        objective: CrossEntropy | None = None,
        replay: Samples | None = None,
        recipe: Recipe | None = None,
        name: str = "training",
        trainable: Sequence[Tensor] | None = None,
        numbers: int = 0,
    ) -> None:
        """Train on `samples`, and on as many of `replay` beside them, labelled by class number.

        The objective is cross-entropy over all classes so far, the recipe the method's own, and all of the network is
        trained, unless said otherwise. An objective that draws lots gets `numbers` of them a step. `name` tells the
        random numbers of one training of a task from those of another; all but the main one should be `no_callback`, as
        progress and speed are told once a task.
        """
        recipe, objective = recipe or self.config, objective or CrossEntropy(self.network)
        moving = list(self.network.parameters()) if trainable is None else trainable
        with only(moving, self.network.parameters()):
            batches = recipe.batches(samples, replay, self.generator(name), numbers, self.encoder.batch_norms)
            optimiser = recipe.optimiser([p for p in moving if p.requires_grad])
            train(objective, optimiser, [batches], recipe, self.normalise, [callback])
            seen = batches_of_images(batches, self.normalise)
            objective.network.reestimate_norms(objective.shown(images) for images in seen)

    def features(self, pixels: Tensor) -> Tensor:
        """The network's features of uint8 images, `[n, dim]`."""
        return self.adapted_features(pixels, self.network.norms, *self.network.adapters.weights)

    def log_probabilities(self, pixels: Tensor) -> Tensor:
        """Softmax over all classes so far."""
        network = self.network
        logits = self._logits(pixels, network.head_weight, network.head_bias, network.norms, *network.adapters.weights)
        return logits.double().log_softmax(dim=1)

    def remove_class(self, task: int, own: int, number: int) -> None:
        """Drop the class's row of the head."""
        self.network.drop(number)

    def state(self) -> State:
        """Everything is shared: there is one network."""
        network = {k: v.detach() for k, v in self.network.state_dict().items()}
        return State(network | {name: getattr(self, name) for name in self.beside}, [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Rebuild the network, and put what is beside it back."""
        self.network = self.new_network()
        self.network.grow(len(state.shared["head_bias"]), torch.Generator())
        self.network.load_state_dict({k: v for k, v in state.shared.items() if k not in self.beside})
        for name in self.beside:
            setattr(self, name, state.shared[name].to(self.compute.device))


@contextmanager
def only(moving: Iterable[Tensor], parameters: Iterable[Tensor]) -> Iterator[None]:
    """No gradients for the other parameters: nobody would use them, or clear them away."""
    chosen = {id(p) for p in moving}
    still = [p for p in parameters if p.requires_grad and id(p) not in chosen]
    try:
        for p in still:
            p.requires_grad_(False)
        yield
    finally:
        for p in still:
            p.requires_grad_(True)
