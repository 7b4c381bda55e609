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
from tpl.engine import Callback, Compute, GatedSGD, Inference, Recipe, Samples, batches_of_images, train
from tpl.methods.base import Method
from tpl.nets import Encoder, unstacked
from tpl.store import State
from tpl.stream import Task


@dataclass(frozen=True)
class NetworkConfig(Recipe):
    """Options of a method that trains one network with adapters."""

    latent: int = option(
        64,
        "hidden units of an adapter; resnet18 has a width in its name instead",
        minimum=1,
        group="encoder",
        maximum=2048,
    )
    train_norms: bool = option(True, "whether the norms are trained along with adapters or kernels", group="encoder")


@dataclass(frozen=True)
class CosineScheduleConfig(NetworkConfig):
    """The same for a method that was published with a falling rate and weight decay."""

    schedule: str = option(
        "cosine",
        "constant: the rate stays; cosine: it falls to zero by the last step (as published)",
        ("constant", "cosine"),
        group="training",
    )
    weight_decay: float = option(5e-4, "weight decay of SGD", minimum=0, group="training")


def new_rows(outputs: int, dim: int, generator: torch.Generator) -> Tensor:
    """Initial head weights, distributed like those of torch's own linear layer."""
    return torch.empty(outputs, dim).uniform_(-(dim**-0.5), dim**-0.5, generator=generator)


class GrowingHead(nn.Module):
    """A linear head with a row for every class, to inherit from; `new_head` starts it without classes."""

    head_weight: nn.Parameter
    head_bias: nn.Parameter

    def new_head(self, dim: int) -> None:
        """An empty head over features of size `dim`."""
        self.head_weight, self.head_bias = nn.Parameter(torch.zeros(0, dim)), nn.Parameter(torch.zeros(0))

    def grow(self, outputs: int, generator: torch.Generator) -> None:
        """Add rows for new classes; old rows and biases are unchanged."""
        rows = new_rows(outputs, self.head_weight.shape[1], generator)
        self.head_weight = nn.Parameter(torch.cat([self.head_weight.detach(), rows.to(self.head_weight)]))
        self.head_bias = nn.Parameter(torch.cat([self.head_bias.detach(), self.head_bias.new_zeros(outputs)]))

    def load_head(self, weight: Tensor, bias: Tensor) -> None:
        """Replace the whole head by a copy of another."""
        device = self.head_bias.device
        self.head_weight = nn.Parameter(weight.detach().clone().to(device))
        self.head_bias = nn.Parameter(bias.detach().clone().to(device))

    def drop(self, row: int) -> None:
        """Remove one class's row."""
        kept = torch.arange(len(self.head_bias), device=self.head_bias.device) != row
        self.head_weight = nn.Parameter(self.head_weight.detach()[kept])
        self.head_bias = nn.Parameter(self.head_bias.detach()[kept])


class Network(GrowingHead):
    """An encoder, its adapters or kernels without masks, its norms, and a linear head that grows."""

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, generator: torch.Generator) -> None:
        super().__init__()
        self.trunk = [encoder]  # in a list: the frozen trunk is not part of this module's state
        self.compute = compute
        self.adapters = encoder.new_adapters(config.latent, generator)
        self.norms = nn.Parameter(encoder.new_norms(), requires_grad=config.train_norms)
        self.new_head(encoder.dim)
        self.to(compute.device)

    def copy(self) -> Self:
        """A frozen copy to distil from; the trunk is shared."""
        trunk = self.trunk[0]
        twin = deepcopy(self, {id(trunk): trunk, id(self.compute): self.compute})
        return twin.requires_grad_(False).eval()

    def features(self, images: Tensor) -> Tensor:
        """Features of normalised images: in training mode with batch statistics, in a frozen copy with stored ones."""
        dtype, learning = self.compute.dtype, self.training
        z: Tensor = self.trunk[0](images, self.norms, self.adapters.weights, dtype=dtype, learning=learning)
        return z

    @torch.no_grad()
    def estimate_batch_norms(self, images: Iterable[Tensor]) -> None:
        """Re-estimate batch-norm statistics from batches of training images; other networks have none."""
        encoder = self.trunk[0]
        if encoder.batch_norms:
            self.norms.copy_(encoder.reestimated_norms(self.norms, self.adapters.weights, images, self.compute.dtype))

    def logits(self, features: Tensor) -> Tensor:
        """Logits over all classes so far."""
        return F.linear(features, self.head_weight, self.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of normalised images."""
        return self.logits(self.features(images))


class Loss:
    """An `Objective` of the training loop for one network: a subclass defines `loss(images, labels)`.

    A loss that needs random numbers or the progress within the epoch overrides `losses`.
    """

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar, of normalised images `[b, 3, h, w]` with class numbers `[b]`.

        Rows labelled `IGNORED` only fill the batch up and must not count. Where a recipe replays as many images as it
        has new ones, these are the second half.
        """
        raise NotImplementedError

    def losses(self, images: Tensor, labels: Tensor, progress: Tensor, draws: Tensor) -> Tensor:
        """`loss` as the training loop takes it: with a first axis of networks, of which there is one."""
        return self.loss(images, labels[0]).unsqueeze(0)

    def after_backward(self, progress: Tensor) -> None:
        """Change gradients before the optimiser's step."""

    def after_step(self) -> None:
        """Change parameters after the optimiser's step."""


class CrossEntropy(Loss):
    """Plain cross-entropy over all classes so far."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def shown(self, images: Tensor) -> Tensor:
        """The images of a batch as the network sees them, for batch-norm statistics."""
        return images

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of one batch."""
        return F.cross_entropy(self.network(images), labels)


class NetworkMethod(Method):
    """A method that stores one `Network` and nothing else."""

    config_class = NetworkConfig
    config: NetworkConfig
    extra_state: ClassVar[tuple[str, ...]] = ()  # names of tensor attributes that are stored along with the network

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.network = self.new_network()
        features = unstacked(encoder, compute.dtype)
        self._logits = Inference(  # weights are arguments: the network may be replaced, and its head grows
            lambda images, head, bias, *network: F.linear(features(images, *network), head, bias),
            compute,
            self.normalise,
        )

    def new_network(self) -> Network:
        """A network without classes."""
        return Network(self.encoder, self.config, self.compute, self.generator("adapters", task=0))

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Grow the head and train all trainable parameters on the task's data alone."""
        self.fit(self.grow(task, samples), callback)

    def grow(self, task: Task, samples: Samples) -> Samples:
        """Add the task's classes to the head. Returns its samples, labelled by number among all classes."""
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
        """Train on `samples` and on `replay`, labelled by class number, in the batches that the recipe makes of them.

        The defaults: cross-entropy over all classes so far, the method's own recipe, all parameters of the network. An
        objective that needs random numbers gets `numbers` of them a step. `name` seeds the random numbers, so that two
        trainings of one task differ; all but the main one should be `no_callback`, as progress is reported once a task.
        """
        recipe, objective = recipe or self.config, objective or CrossEntropy(self.network)
        moving = list(self.network.parameters()) if trainable is None else trainable
        with frozen_except(moving, self.network.parameters()):
            batches = recipe.batches(samples, replay, self.generator(name), numbers, self.encoder.batch_norms)
            optimiser = self.optimiser(recipe, [p for p in moving if p.requires_grad])
            train(objective, optimiser, [batches], recipe, self.normalise, [callback])
            seen = batches_of_images(batches, self.normalise)
            objective.network.estimate_batch_norms(objective.shown(images) for images in seen)

    def optimiser(self, recipe: Recipe, parameters: Sequence[Tensor]) -> GatedSGD:
        """The optimiser of a training; the recipe's, unless parts of the network have rates of their own."""
        return recipe.optimiser(parameters)

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
        """The network and `extra_state`, all of it shared by the tasks."""
        network = {k: v.detach() for k, v in self.network.state_dict().items()}
        extra = {name: getattr(self, name) for name in self.extra_state}
        return State(network | extra, [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Rebuild the network and restore `extra_state`."""
        self.network = self.new_network()
        self.network.grow(len(state.shared["head_bias"]), torch.Generator())
        self.network.load_state_dict({k: v for k, v in state.shared.items() if k not in self.extra_state})
        for name in self.extra_state:
            setattr(self, name, state.shared[name].to(self.compute.device))


@contextmanager
def frozen_except(trainable: Iterable[Tensor], parameters: Iterable[Tensor]) -> Iterator[None]:
    """Switch off the gradients of all other parameters inside the context: they would be computed and never used."""
    chosen = {id(p) for p in trainable}
    frozen = [p for p in parameters if p.requires_grad and id(p) not in chosen]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)
