"""One adapted network with one growing head: what the single-model methods share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import Compute, Inference, Listener, Recipe, Samples, train
from tpl.methods.base import Method
from tpl.nets import Encoder
from tpl.state import State
from tpl.stream import Task


@dataclass(frozen=True)
class NetworkConfig(Recipe):
    """Options of a method that trains one network with adapters."""

    latent: int = option(64, "hidden units of an adapter", minimum=1)
    train_norms: bool = option(True, "whether the layer norms are trained along with the adapters")


class Network(nn.Module):
    """Frozen encoder, adapters without masks, layer norms, and a linear head that grows."""

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, generator: torch.Generator) -> None:
        super().__init__()
        self.trunk = [encoder]  # in a list: the frozen trunk is not part of this module's state
        self.compute = compute
        self.adapters = encoder.new_adapters(config.latent, generator)
        self.norms = nn.Parameter(encoder.new_norms(), requires_grad=config.train_norms)
        self.head_weight = nn.Parameter(torch.zeros(0, encoder.dim))
        self.head_bias = nn.Parameter(torch.zeros(0))
        self.to(compute.device)

    def grow(self, outputs: int, generator: torch.Generator) -> None:
        """Add head rows for new classes; old rows and biases stay as they are."""
        dim = self.head_weight.shape[1]
        rows = torch.empty(outputs, dim).uniform_(-(dim**-0.5), dim**-0.5, generator=generator)
        self.head_weight = nn.Parameter(torch.cat([self.head_weight.detach(), rows.to(self.head_weight)]))
        self.head_bias = nn.Parameter(torch.cat([self.head_bias.detach(), self.head_bias.new_zeros(outputs)]))

    def drop(self, row: int) -> None:
        """Remove one class's row of the head."""
        kept = torch.arange(len(self.head_bias), device=self.head_bias.device) != row
        self.head_weight = nn.Parameter(self.head_weight.detach()[kept])
        self.head_bias = nn.Parameter(self.head_bias.detach()[kept])

    def features(self, images: Tensor) -> Tensor:
        """Features of normalised images."""
        z: Tensor = self.trunk[0](images, self.norms, self.adapters.weights, dtype=self.compute.dtype)
        return z

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

    def __init__(self, encoder: Encoder, config: NetworkConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        self.network = self.new_network()
        self._logits = Inference(  # of any weights: the network is made anew, and its head grows
            lambda images, head, bias, *network: F.linear(
                encoder.unpacked(images, *network, dtype=compute.dtype), head, bias
            ),
            compute,
            self.normalise,
        )

    def new_network(self) -> Network:
        """A network that knows no class yet."""
        return Network(self.encoder, self.config, self.compute, self.generator("adapters", task=0))

    def learn_task(self, task: Task, samples: Samples, listen: Listener) -> None:
        """Grow the head and train everything trainable on the task's data alone."""
        self.network.grow(len(task.classes), self.generator("head"))
        labels = samples.labels + len(self.classes_)
        self.fit(Samples(samples.pixels, labels), listen)

    def fit(self, samples: Samples, listen: Listener) -> None:
        """Cross-entropy training on `samples`, labelled by class number."""
        config = self.config
        trainable = [p for p in self.network.parameters() if p.requires_grad]
        batches = config.batches(samples, None, self.generator("training"))
        objective, optimiser = CrossEntropy(self.network), config.optimiser(trainable)
        train(objective, optimiser, [batches], config, self.normalise, [listen])

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
        return State({k: v.detach() for k, v in self.network.state_dict().items()}, [{} for _ in self.task_classes_])

    def load_state(self, state: State) -> None:
        """Rebuild the network."""
        self.network = self.new_network()
        self.network.grow(len(state.shared["head_bias"]), torch.Generator())
        self.network.load_state_dict(state.shared)
