"""Where and how precisely to compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tpl.errors import TplError

PRECISIONS = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class Compute:
    """A device and the precision of the trunk on it.

    bf16 touches the trunk's matrix products alone; masks, norms' statistics, losses and scores stay
    in float32 or float64 whatever is chosen here.
    """

    device: torch.device
    bf16: bool

    def autocast(self) -> AbstractContextManager[object]:
        """The context the trunk runs in."""
        if not self.bf16:
            return nullcontext()
        # Without the cache of cast weights: it must not outlive a recorded step.
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=False)


def choose_compute(device: str = "auto", precision: str = "auto") -> Compute:
    """`auto` takes the first GPU if there is one, and bf16 on a GPU that has it."""
    if precision not in PRECISIONS:
        raise TplError(f"Precision must be one of {', '.join(PRECISIONS)}; got '{precision}'.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # streams and recorded steps belong to the current device
        torch.zeros(1, device=chosen, dtype=torch.float64)  # statistics need double precision
    except (RuntimeError, AssertionError, TypeError) as error:
        raise TplError(f"Device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
    gpu_bf16 = chosen.type == "cuda" and torch.cuda.is_bf16_supported()
    return Compute(chosen, bf16=precision == "bf16" or (precision == "auto" and gpu_bf16))
