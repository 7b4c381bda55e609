"""OWM: weights change only orthogonally to old tasks' inputs (Zeng et al., Nature Machine Intelligence 2019).

Every linear layer has a projector P, the identity at first. While a task is learned, the gradient G of the layer's
weights becomes G P. After the task, P is updated with the inputs r of every batch of it, one after the other:

    k = P r,   P <- P - k k^T / (alpha + r^T k),   that is   P = (I + sum of r r^T / alpha)^-1

So directions of old inputs are blocked, G P r being nearly 0, and the layer's output for them is kept. Within a
task alpha goes from 1 to the option `alpha`, step by step over its shuffled batches, as published. No replay.

As published for convolutions, a layer that is applied at many positions has an r for each of them: the mean over the
batch's images at one token. A mean over the tokens as well would leave most differences between tokens unprotected.

How strong a given alpha is depends on the squared length of inputs, and on how many of them come: each blocks one more
direction. A ViT's features are 40 to 60 long, so that an alpha of 0.1 leaves its head nothing to learn with after five
tasks; 10, the head's default, keeps both old and new classes (docs/baselines.md has the numbers).

Adapted to adapters: both layers of each adapter and the head have projectors; a bias is one more weight with an input
of 1, protected with the others. The layer norms have no projector, so they are left as they are (`train_norms=true`
trains them, unprotected). Rows of the head for new classes start at zero: weights that start at random hide what a few
projected steps can learn.

Differences from the public code: it updates P in every step of the task being learned, which blocks that task's own
inputs, and chooses its best model by test accuracy. Weight decay would bypass the projector and is refused. Momentum
is made of projected gradients only, and starts from zero with each task. P is float64 and stays symmetric to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpl.config import option
from tpl.engine import Callback, Compute, Samples
from tpl.errors import TplError
from tpl.methods.base import register
from tpl.methods.parts.network import CrossEntropy, Network, NetworkConfig, NetworkMethod
from tpl.nets import Adapters, AdapterStack, Encoder, as_vit
from tpl.nets.vit import adapter_inputs
from tpl.store import State
from tpl.stream import Task

PREFIX = "projector."


@dataclass(frozen=True)
class OWMConfig(NetworkConfig):
    """OWM's options."""

    train_norms: bool = option(False, "whether the layer norms are trained; nothing protects them", group="encoder")
    alpha: float = option(
        1e-5,
        "adapters' alpha at a task's end (that of convolutions in the public code); small blocks more",
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
    """The projector `[..., in + 1, in + 1]` after the inputs `[..., positions, in]` of one batch.

    All positions at once: with R for the inputs, P - (P R^T) (alpha I + R P R^T)^-1 (R P). The result is that of one
    position after the other, up to rounding.
    """
    rows = F.pad(inputs.double(), (0, 1), value=1.0)  # the bias's input is 1
    gain = rows @ projector
    strength = alpha * torch.eye(rows.shape[-2]).to(rows) + gain @ rows.mT
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(strength), gain, upper=False)
    blocked: Tensor = half.mT @ half
    # Symmetric to the bit, in whatever order a product is summed.
    updated: Tensor = projector - (blocked + blocked.mT) / 2
    return updated


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
        self.vit = as_vit(encoder)
        self.projectors = {name: self.new_projectors(layer.weight) for name, layer in layers_of(self.network).items()}

    def new_projectors(self, weight: Tensor) -> Tensor:
        """Identity projectors for layers with weights of this shape."""
        *stack, _, inputs = weight.shape
        identity = torch.eye(inputs + 1, dtype=torch.float64, device=weight.device)
        return identity.expand(*stack, -1, -1).clone()

    def learn_task(self, task: Task, samples: Samples, callback: Callback) -> None:
        """Train with projected gradients; then block the task's own inputs."""
        own = self.grow(task, samples)
        with torch.no_grad():
            self.network.head_weight[len(self.classes_) :] = 0
        self.fit(own, callback, ProjectedCrossEntropy(self.network, self.projectors, self.config.clip))
        self.block(samples.pixels)

    @torch.no_grad()
    def block(self, pixels: Tensor) -> None:
        """Block the inputs of these images: one shuffled pass, batch by batch."""
        order = torch.randperm(len(pixels), generator=self.generator("projectors"))
        batches = order.split(self.config.batch_size)
        for number, rows in enumerate(batches, start=1):
            for name, inputs in self.inputs(pixels[rows.to(pixels.device)]).items():
                final = self.config.alpha_head if name == "head" else self.config.alpha
                alpha = final ** (number / len(batches))
                self.projectors[name] = update_projector(self.projectors[name], inputs, alpha)

    @torch.no_grad()
    def inputs(self, pixels: Tensor) -> dict[str, Tensor]:
        """The inputs of every layer at every position, means over these images, `[..., positions, in]`."""
        network, images = self.network, self.normalise(pixels.to(self.compute.device))
        adapters = AdapterStack(*network.adapters.weights)
        down, up, features = adapter_inputs(self.vit, images, network.norms, adapters, self.compute.dtype)
        return {"down": down, "up": up, "head": features.mean(dim=0, keepdim=True)}

    def state(self) -> State:
        """The network and its projectors."""
        network = super().state()
        return State(network.shared | {PREFIX + name: p for name, p in self.projectors.items()}, network.tasks)

    def load_state(self, state: State) -> None:
        """Restore what `state` returned."""
        shared, device = state.shared, self.compute.device
        super().load_state(State({k: v for k, v in shared.items() if not k.startswith(PREFIX)}, state.tasks))
        self.projectors = {name: shared[PREFIX + name].to(device) for name in layers_of(self.network)}
