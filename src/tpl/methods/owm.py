"""OWM: weights change only orthogonally to old tasks' inputs (Zeng et al., Nature Machine Intelligence 2019).

Every linear layer has a projector P, the identity at first. While a task is learned, the gradient G of the layer's
weights becomes G P. After the task, P is updated with the mean input r of every batch of it, one after the other:

    k = P r,   P <- P - k k^T / (alpha + r^T k),   that is   P = (I + sum of r r^T / alpha)^-1

So directions of old inputs are blocked, G P r being nearly 0, and the layer's output for them is kept. Within a
task alpha goes from 1 to the option `alpha`, step by step over its shuffled batches, as published. No replay.

How strong a given alpha is depends on the squared length of inputs, and on how many batches come: each blocks one more
direction. A ViT's features are 40 to 60 long, so that an alpha of 0.1 leaves its head nothing to learn with after five
tasks; 10, the head's default, keeps both old and new classes (docs/baselines.md has the numbers).

Adapted to adapters: both layers of each adapter and the head have projectors; r is a mean over images and tokens; a
bias is one more weight with an input of 1, protected with the others. The layer norms have no projector, so they are
left as they are (`train_norms=true` trains them, unprotected).

Differences from the public code: it updates P in every step of the task being learned, which blocks that task's own
inputs, and chooses its best model by test accuracy. Weight decay would bypass the projector and is refused. Momentum
is made of projected gradients only, and starts from zero with each task. P is float64 and stays symmetric to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import Callback, Compute, Inference, Samples
from tpl.errors import TplError
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network, NetworkConfig, NetworkMethod
from tpl.nets import Adapters, AdapterStack, Encoder, as_vit
from tpl.nets.vit import adapter_inputs
from tpl.store import State
from tpl.stream import Task

BATCHES = 16  # computed at a time, so that blocks of images are well filled
PREFIX = "projector."


@dataclass(frozen=True)
class OWMConfig(NetworkConfig):
    """OWM's options."""

    train_norms: bool = option(False, "whether the layer norms are trained; nothing protects them", group="encoder")
    alpha: float = option(
        1e-4,
        "adapters' alpha at a task's end (public code: 1e-5 to 1e-2); small blocks more",
        above=0,
        group="gradient projection",
    )
    alpha_head: float = option(
        10.0, "the same for the head (public code: 0.1, for shorter features)", above=0, group="gradient projection"
    )
    clip: ClassVar[float] = 10.0  # the largest norm of all projected gradients together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay:
            raise TplError("OWM projects gradients; weight decay would move weights past the projector. Leave it at 0.")


class Layer(NamedTuple):
    """Weights `[..., out, in]` and biases `[..., out]` of layers of one kind."""

    weight: nn.Parameter
    bias: nn.Parameter


def adapters_of(network: Network) -> Adapters:
    """The network's adapters, with their type."""
    assert isinstance(network.adapters, Adapters)
    return network.adapters


def layers_of(network: Network) -> dict[str, Layer]:
    """The layers that have projectors."""
    adapters = adapters_of(network)
    return {
        "down": Layer(adapters.down_weight, adapters.down_bias),
        "up": Layer(adapters.up_weight, adapters.up_bias),
        "head": Layer(network.head_weight, network.head_bias),
    }


def update_projector(projector: Tensor, inputs: Tensor, alpha: float) -> Tensor:
    """The projector `[..., in + 1, in + 1]` after mean inputs `[batches, ..., in]`, one after the other."""
    for number, mean in enumerate(F.pad(inputs, (0, 1), value=1.0), start=1):  # the bias's input is 1
        gain = (projector @ mean.unsqueeze(-1)).squeeze(-1)
        strength = alpha ** (number / len(inputs)) + (mean * gain).sum(dim=-1)
        outer = gain.unsqueeze(-1) * gain.unsqueeze(-2)
        projector = projector - outer / strength[..., None, None]
    return projector


class ProjectedCrossEntropy(CrossEntropy):
    """Cross-entropy over all classes so far, with projected gradients."""

    def __init__(self, network: Network, projectors: dict[str, Tensor], clip: float) -> None:
        super().__init__(network)
        self.pairs = [(layer, projectors[name].float()) for name, layer in layers_of(network).items()]
        self.moving = [p for p in network.parameters() if p.requires_grad]
        self.clip = clip

    def after_backward(self, progress: Tensor) -> None:
        """Remove from every gradient what would change the output for old inputs."""
        for (weight, bias), projector in self.pairs:
            assert weight.grad is not None and bias.grad is not None
            free = torch.cat([weight.grad, bias.grad.unsqueeze(-1)], dim=-1) @ projector
            weight.grad.copy_(free[..., :-1])
            bias.grad.copy_(free[..., -1])
        nn.utils.clip_grad_norm_(self.moving, self.clip)


@register
class OWM(NetworkMethod):
    """One network whose gradients avoid the inputs of old tasks."""

    name = "owm"
    summary = "gradients projected away from old tasks' inputs (orthogonal weight modification); no replay"
    paper = "Zeng et al., Continual learning of context-dependent processing in neural networks, Nature MI 2019"
    keeps = "a projector for every trained layer"
    cost = "one pass a training image and epoch, one more at the end; one an answer"
    splits = True
    config_class = OWMConfig
    config: OWMConfig

    def __init__(self, encoder: Encoder, config: OWMConfig, compute: Compute, seed: int = 0) -> None:
        super().__init__(encoder, config, compute, seed)
        vit = as_vit(encoder)
        self.projectors = {name: self.new_projectors(layer.weight) for name, layer in layers_of(self.network).items()}
        self._inputs = Inference(
            lambda images, norms, *weights: torch.cat(
                [part.flatten(1) for part in adapter_inputs(vit, images, norms, AdapterStack(*weights), compute.dtype)],
                dim=1,
            ),
            compute,
            self.normalise,
        )

    def new_projectors(self, weight: Tensor) -> Tensor:
        """Identity projectors for layers with weights of this shape."""
        *stack, _, inputs = weight.shape
        identity = torch.eye(inputs + 1, dtype=torch.float64, device=weight.device)
        return identity.expand(*stack, -1, -1).clone()

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train with projected gradients; then block the task's own inputs."""
        own = self.grow(task, samples)
        self.fit(own, callback, ProjectedCrossEntropy(self.network, self.projectors, self.config.clip))
        means = self.mean_inputs(samples.pixels)
        for name, inputs in means.items():
            alpha = self.config.alpha_head if name == "head" else self.config.alpha
            self.projectors[name] = update_projector(self.projectors[name], inputs, alpha)

    def mean_inputs(self, pixels: Tensor) -> dict[str, Tensor]:
        """The mean input of every layer in every batch of a shuffled pass, `[batches, ..., in]`, float64."""
        network, size = self.network, self.config.batch_size
        means: list[Tensor] = []
        for rows in torch.randperm(len(pixels), generator=self.generator("projectors")).split(BATCHES * size):
            part = pixels[rows]
            inside = self._inputs(part, network.norms, *network.adapters.weights)
            seen = torch.cat([inside, self.features(part)], dim=1)
            means += [batch.double().mean(dim=0) for batch in seen.split(size)]
        adapters = adapters_of(network)
        shapes = {"down": (adapters.count, adapters.dim), "up": (adapters.count, adapters.latent), "head": (-1,)}
        widths = [adapters.count * adapters.dim, adapters.count * adapters.latent, adapters.dim]
        parts: Sequence[Tensor] = torch.stack(means).split(widths, dim=1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def state(self) -> State:
        """The network and its projectors."""
        network = super().state()
        return State(network.shared | {PREFIX + name: p for name, p in self.projectors.items()}, network.tasks)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        shared, device = state.shared, self.compute.device
        super().load_state(State({k: v for k, v in shared.items() if not k.startswith(PREFIX)}, state.tasks))
        self.projectors = {name: shared[PREFIX + name].to(device) for name in layers_of(self.network)}
