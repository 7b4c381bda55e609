"""Where and how precisely to compute."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from tpl.engine.distributed import current
from tpl.errors import TplError

PRECISIONS = ("auto", "fp32", "bf16")
COMPILE = ("auto", "on", "off")
SHARE_FOR_IMAGES = 0.4  # of a GPU's free memory


@dataclass(frozen=True)
class Compute:
    """A device and the precision of the trunk on it.

    bf16 touches the trunk alone; masks, norms' statistics, losses and scores stay in float32 or float64 whatever is
    chosen here.
    """

    device: torch.device
    bf16: bool

    compiled: bool = False  # the trunk's blocks are compiled: worth its half minute for long runs
    small_too: bool = False  # even where images are so small that it would hardly pay

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the trunk's matrix products."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def room_for(self, size: int) -> bool:
        """Whether so many bytes of images may stay on the device, beside networks and their activations."""
        if self.device.type != "cuda":
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        return size < SHARE_FOR_IMAGES * free

    def forget_peak_memory(self) -> None:
        """Begin anew to watch for the most bytes in use."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int | None:
        """The most bytes that tensors have taken on a GPU since then, all runs of this process together."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def choose_compute(device: str = "auto", precision: str = "auto", compile: str = "auto") -> Compute:
    """`auto` takes the first GPU if there is one, bf16 on a GPU that has it, and compiles where a compiler is."""
    for name, value, known in (("Precision", precision, PRECISIONS), ("Compile", compile, COMPILE)):
        if value not in known:
            raise TplError(f"{name} must be one of {', '.join(known)}; got '{value}'.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = current().own_device(device)
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # streams and recorded steps belong to the current device
        torch.zeros(1, device=chosen, dtype=torch.float64)  # statistics need double precision
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        raise TplError(f"Device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
    on_gpu = chosen.type == "cuda"
    if on_gpu and precision == "fp32":
        torch.backends.cudnn.allow_tf32 = False  # convolutions, too: by default they round to ten bits
    if compile == "on" and not (on_gpu and _has_compiler()):
        raise TplError("Compiling needs a CUDA device, Triton and a C compiler; leave --compile at auto or off.")
    return Compute(
        chosen,
        bf16=precision == "bf16" or (precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()),
        compiled=compile != "off" and on_gpu and _has_compiler(),
        small_too=compile == "on",
    )


def _has_compiler() -> bool:
    """Whether torch.compile can make kernels here: they are written in Triton and started by compiled C."""
    return find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))
