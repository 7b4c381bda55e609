"""Protections: how tasks share one set of adapters without interfering.

A task's own parameters under a protection are one flat tensor, here `own`: HAT's embedding, or the scores of a
supermask. In training, tensors have a first axis of networks that are trained together. To add a protection, write a
class here and name it in `PROTECTIONS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tpl.config import Config, option
from tpl.errors import TplError
from tpl.nets import Adapters, AdapterStack, Encoder, Trainable, Weights

SPREAD = 0.01  # of the initial scores: at the adapters' learning rates, ranks then change within an epoch
EMBEDDING_BOUND = 6.0  # after every step HAT's embedding is clamped to +-6
COSH_BOUND = 50.0  # cosh(50) still fits float32
ALL_BLOCKS = "all"

GROWTHS = NEVER, WHEN_FULL = "never", "when_full"  # of the adapters

Scale = float | Tensor


@dataclass(frozen=True)
class ProtectConfig(Config):
    """Options of the adapters and of the protection between tasks."""

    latent: int = option(
        64,
        "hidden units of an adapter; resnet18 has a width in its name instead",
        minimum=1,
        group="encoder",
        maximum=2048,
    )
    adapted_blocks: int | str = option(
        ALL_BLOCKS,
        "blocks of the encoder that have adapters and norms of a task: all (paper), or this many of the last; those "
        "below are computed once per image, for all tasks and epochs",
        group="encoder",
    )
    protect: str = option(
        "hat",
        "hat: weights of used units are frozen; supsup: random weights, a supermask per task",
        ("hat", "supsup"),
        group="masks",
    )
    masks: str = option(
        "binary",
        "binary: old tasks' features never change; soft: the paper's near-binary masks",
        ("binary", "soft"),
        group="masks",
    )
    s_max: float = option(400.0, "largest scale of the mask's sigmoid", above=1, group="masks")
    sparsity: float = option(0.75, "weight of HAT's regulariser", minimum=0, group="masks")
    mask_gradient: str = option(
        "autograd",
        "autograd with compensation, as published; analytic: its closed form",
        ("autograd", "analytic"),
        group="masks",
    )
    grow_adapters: str = option(
        NEVER,
        "when_full: a further set of adapters, once 90 % of the units are in use; never: as in the paper",
        GROWTHS,
        group="masks",
    )
    supermask: float = option(0.5, "supsup: the share of an adapter's weights that a task uses", above=0, group="masks")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapted_blocks != ALL_BLOCKS and not (isinstance(self.adapted_blocks, int) and self.adapted_blocks > 0):
            raise TplError(f"adapted_blocks must be all or a number of blocks above 0; got '{self.adapted_blocks}'.")
        if self.supermask > 1:
            raise TplError(f"supermask is a share of the weights, at most 1; got {self.supermask}.")

    def blocks_below(self, encoder: Encoder) -> int:
        """Number of the encoder's first blocks that no task changes."""
        return encoder.blocks_below(self.adapted_blocks) if isinstance(self.adapted_blocks, int) else 0


class Masked(NamedTuple):
    """The adapters under a task's mask, and the mask."""

    weights: Weights
    mask: Tensor


class Protection(ABC):
    """Keeps tasks that share adapters from interfering with each other."""

    name: ClassVar[str]
    summary: ClassVar[str]
    trains_adapters: ClassVar[bool] = True  # False: they keep their initial values

    def __init__(self, config: ProtectConfig) -> None:
        self.config = config

    def prepare(self, adapters: Trainable) -> None:  # noqa: B027 (most leave them unchanged)
        """Change newly created adapters, before any task."""

    @abstractmethod
    def initial(self, adapters: Trainable, generator: torch.Generator) -> Tensor:
        """The own parameters of an untrained task."""

    @abstractmethod
    def masked(self, weights: Weights, own: Tensor, progress: Tensor) -> Masked:
        """The adapters at this point of the epoch, differentiable."""

    def penalty(self, mask: Tensor, used: Tensor | None) -> Tensor:
        """The loss term of a task's mask, `[networks]`."""
        return mask.new_zeros(len(mask))

    def gates(self, weights: Weights, used: Tensor) -> Weights | None:
        """Gradient factors of the weights, given the units that earlier tasks use; None: no restriction."""
        return None

    def after_backward(self, own: Tensor, progress: Tensor) -> None:  # noqa: B027
        """Change the gradient of `own`."""

    def after_step(self, own: Tensor) -> None:  # noqa: B027
        """Change `own` after the optimiser's step."""

    def kept(self, weights: Weights, own: Tensor) -> Tensor:
        """The tensor to store for a trained task of one network."""
        return own

    @abstractmethod
    def finished(self, weights: Weights, kept: Tensor) -> Weights:
        """The adapters under the stored mask of a finished task."""

    def unit_mask(self, kept: Tensor) -> Tensor | None:
        """A finished task's mask over units, from 0 to 1; None where no unit needs protection."""
        return None

    @property
    def final(self) -> bool:
        """Whether a finished task stays exactly the same, whatever is learned later."""
        return True

    def capacity(self, adapters: Trainable, used: Tensor | None) -> dict[str, float]:
        """How full the network is: the share of units in use, and of adapter weights that are frozen by that."""
        return {"units": 0.0, "frozen": 0.0}


# HAT: hard attention to the task (Serra et al., 2018)


class HatMasks(Protection):
    """HAT: a task has an embedding `e` with one entry per unit, and the mask `sigmoid(s * e)` (Eq. 2).

    The scale `s` is annealed within every epoch, so that masks are soft at first and nearly binary at the end. Gates
    protect the units that a finished task uses. All is float32: the compensation factor spans twenty decades.
    """

    name = "hat"
    summary = "weights between units that finished tasks use are frozen"

    def initial(self, adapters: Trainable, generator: torch.Generator) -> Tensor:
        """N(0, 1): half of the units are on."""
        return torch.randn(adapters.units, generator=generator)

    def masked(self, weights: Weights, own: Tensor, progress: Tensor) -> Masked:
        """The adapters under the mask, at the scale of this point of the epoch."""
        s_max = self.config.s_max
        scale = scale_at(progress, s_max)
        if self.config.mask_gradient == "analytic":
            mask: Tensor = AnalyticMask.apply(own, scale, s_max)  # type: ignore[no-untyped-call]
        else:
            mask = soft_mask(own, scale)
        return Masked(weights.fold(mask), mask)

    def penalty(self, mask: Tensor, used: Tensor | None) -> Tensor:
        """HAT's regulariser: the share of free capacity that the mask uses."""
        return self.config.sparsity * regulariser(mask, used)

    def gates(self, weights: Weights, used: Tensor) -> Weights:
        """Zero where both units of a weight are in use."""
        return weights.gates(used)

    def after_backward(self, own: Tensor, progress: Tensor) -> None:
        """Compensate the embedding's gradient for the annealed scale."""
        if self.config.mask_gradient == "autograd" and own.grad is not None:
            s_max = self.config.s_max
            own.grad = compensate(own.grad, own.detach(), scale_at(progress, s_max), s_max)

    def after_step(self, own: Tensor) -> None:
        """Clamp the embedding to where its sigmoid has a gradient."""
        with torch.no_grad():
            own.clamp_(-EMBEDDING_BOUND, EMBEDDING_BOUND)

    def finished(self, weights: Weights, kept: Tensor) -> Weights:
        """The adapters under the task's last mask."""
        return weights.fold(self.unit_mask(kept))

    def unit_mask(self, kept: Tensor) -> Tensor:
        """The task's mask."""
        return task_mask(kept, self.config.s_max, self.config.masks)

    @property
    def final(self) -> bool:
        """True for binary masks; with soft ones weights still change a little."""
        return self.config.masks == "binary"

    def capacity(self, adapters: Trainable, used: Tensor | None) -> dict[str, float]:
        """Shares of units in use and of frozen weights."""
        if used is None:
            return super().capacity(adapters, used)
        return {"units": capacity_used(used), "frozen": frozen_share(adapters.weights.gates(used))}


def scale_at(progress: Scale, s_max: float) -> Scale:
    """The annealed scale: 1/s_max at the start of an epoch (progress 0), towards s_max at its end (1)."""
    return 1 / s_max + (s_max - 1 / s_max) * progress


def soft_mask(embedding: Tensor, scale: Scale) -> Tensor:
    """sigmoid(s * e), differentiable by autograd; pair it with `compensate`."""
    return torch.sigmoid(scale * embedding)


def binary_mask(embedding: Tensor) -> Tensor:
    """1 where the unit is on (e > 0), else 0: the limit of the soft mask for s to infinity."""
    return (embedding > 0).to(embedding.dtype)


def task_mask(embedding: Tensor, s_max: float, kind: str) -> Tensor:
    """The mask a finished task keeps: `binary`, or the paper's `soft` one at s = s_max."""
    return binary_mask(embedding) if kind == "binary" else soft_mask(embedding, s_max)


def compensate(gradient: Tensor, embedding: Tensor, scale: Scale, s_max: float) -> Tensor:
    """The embedding's gradient, made independent of the annealed scale.

    g * (s_max / s) * (cosh(clip(s e)) + 1) / (cosh(e) + 1). Since d sigmoid(s e)/d e equals
    s / (2 (cosh(s e) + 1)), this is dL/dm * s_max * sigmoid'(e), whatever s is.
    """
    reach = torch.cosh((scale * embedding).clamp(-COSH_BOUND, COSH_BOUND)) + 1
    return gradient * (s_max / scale) * reach / (torch.cosh(embedding) + 1)


class AnalyticMask(torch.autograd.Function):
    """A soft mask whose backward pass is the compensated gradient itself.

    Autograd computes m (1 - m), and 1 - m rounds to zero once s * e passes 16.6, so units that are
    on stop learning early while units that are off do not. This form has no such asymmetry; it
    trains differently, hence it is an option and not the default.
    """

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, scale: Scale, s_max: float) -> Tensor:
        """sigmoid(s * e)."""
        ctx.save_for_backward(embedding)
        ctx.s_max = s_max
        return torch.sigmoid(scale * embedding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        """dL/dm * s_max * sigmoid'(e)."""
        (embedding,) = ctx.saved_tensors
        open_ = torch.sigmoid(embedding)
        return grads[0] * ctx.s_max * open_ * (1 - open_), None, None


def regulariser(mask: Tensor, used: Tensor | None) -> Tensor:
    """The share of free capacity that this mask uses: sum m (1 - used) / sum (1 - used).

    One ratio over all units of a network, not a mean over layers; masks `[networks, units]` get one each. Zero when
    nothing is free.
    """
    if used is None:
        return mask.mean(dim=-1)
    free = 1 - used
    return (mask * free).sum(dim=-1) / free.sum(dim=-1).clamp_min(1e-12)


def capacity_used(used: Tensor) -> float:
    """The share of units that any task uses."""
    return float((used > 0.5).double().mean())


def frozen_share(gates: Iterable[Tensor]) -> float:
    """The share of the adapters' weights that later tasks can no longer train."""
    gates = list(gates)
    closed = torch.stack([(1 - gate).double().sum() for gate in gates]).sum()
    return float(closed) / sum(gate.numel() for gate in gates)


# SupSup: supermasks in superposition (Wortsman et al., 2020)


class SupSupMasks(Protection):
    """SupSup: a task has a score for every weight of the adapters; biases stay zero."""

    name = "supsup"
    summary = "random weights that are never trained, a supermask for every task"
    trains_adapters = False

    def prepare(self, adapters: Trainable) -> None:
        """Set signed Kaiming constants, scaled for the share of weights in use: only masks are trained."""
        adapters = _checked(adapters)
        with torch.no_grad():
            for weight in (adapters.down_weight, adapters.up_weight):
                fan_in = weight.shape[-1] * self.config.supermask
                weight.copy_(torch.where(weight < 0, -1.0, 1.0) * (2 / fan_in) ** 0.5)
            # The branch is added to a pre-trained network: at first its output should be small.
            adapters.up_weight.mul_(0.1)

    def initial(self, adapters: Trainable, generator: torch.Generator) -> Tensor:
        """Random scores."""
        return SPREAD * torch.randn(2 * _checked(adapters).down_weight.numel(), generator=generator)

    def masked(self, weights: Weights, own: Tensor, progress: Tensor) -> Masked:
        """The adapters' best-scored weights; the gradient is passed to the scores (straight-through)."""
        stack = AdapterStack(*weights)
        mask = self._best(stack, own)
        straight_through = mask + (own - own.detach())  # in this order the mask is exact
        return Masked(_under(stack, straight_through), mask)

    def kept(self, weights: Weights, own: Tensor) -> Tensor:
        """The supermask, eight weights to a byte."""
        return _packed(self._best(AdapterStack(*weights), own) > 0)

    def finished(self, weights: Weights, kept: Tensor) -> AdapterStack:
        """The adapters under the task's supermask."""
        stack = AdapterStack(*weights)
        count = 2 * stack.down_weight.numel()
        return _under(stack, _unpacked(kept)[:count].to(stack.down_weight.dtype))

    def _best(self, weights: AdapterStack, own: Tensor) -> Tensor:
        """1 for the best-scored share of each adapter's two matrices."""
        count = weights.down_weight.shape[-3]
        rows = own.detach().unflatten(-1, (2 * count, -1))
        unused = min(round(rows.shape[-1] * (1 - self.config.supermask)), rows.shape[-1] - 1)  # at least one is used
        floor = rows.sort(dim=-1).values[..., unused : unused + 1]
        best: Tensor = (rows >= floor).to(own.dtype)
        return best.flatten(-2)


def _checked(adapters: Trainable) -> Adapters:
    """Refuse a network without adapters: supermasks need a pre-trained encoder to start from."""
    if not isinstance(adapters, Adapters):
        raise TplError("protect=supsup needs adapters in a pre-trained encoder; this one has none. Use protect=hat.")
    return adapters


def _under(weights: AdapterStack, mask: Tensor) -> AdapterStack:
    """The weights times a flat mask over both matrices of every adapter, down before up."""
    down, up = mask.unflatten(-1, (2, -1)).unbind(-2)
    return weights._replace(
        down_weight=weights.down_weight * down.reshape(weights.down_weight.shape),
        up_weight=weights.up_weight * up.reshape(weights.up_weight.shape),
    )


def _packed(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8))
    places = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (padded.view(-1, 8) * places).sum(dim=1, dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    places = 2 ** torch.arange(8, device=packed.device, dtype=torch.uint8)
    return ((packed.unsqueeze(1) & places) > 0).flatten()


PROTECTIONS: dict[str, type[Protection]] = {p.name: p for p in (HatMasks, SupSupMasks)}
