"""Device and precision, and inference in blocks, which bound the memory and do not change results.

On a GPU, inference and training steps are captured once as a CUDA graph and replayed: small networks are bound by
launching kernels, and a replay launches them all at once.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from tpl import program
from tpl.engine.distributed import current
from tpl.errors import TplError
from tpl.files import cache_folder

PRECISIONS = ("auto", "fp32", "bf16")
COMPILE = ("auto", "on", "off")
SHARE_FOR_IMAGES = 0.4  # of the free memory of a GPU, or of the computer
GRAPH_DEVICES = {"cuda"}  # types of devices that have CUDA graphs
BLOCK = 256  # images of one pass on a GPU
# Of a pass on a CPU: activations should stay in its caches, and for a tensor of 32 MiB or more glibc gets fresh memory
# from the system every time.
CPU_PIXELS, CPU_IMAGES = 2**20, 96
MEMORY_INFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
WAIT = 0.2  # seconds between two looks at whether a thread is done
QUAD = 4  # on many CPUs, products over a number of images that is no multiple of four take other paths


@dataclass(frozen=True)
class Compute:
    """A device and the precision of the trunk on it.

    bf16 applies to the trunk alone; masks, norms' statistics, losses and scores stay in float32 or float64 whatever is
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
        """Whether this many bytes of images fit on the device, beside networks and activations."""
        if self.device.type != "cuda":
            return host_has_room_for(size)
        free, _ = torch.cuda.mem_get_info(self.device)
        return size < SHARE_FOR_IMAGES * free

    def forget_peak_memory(self) -> None:
        """Reset the peak of memory in use."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> int | None:
        """Peak bytes of tensors on a GPU since the last reset, all runs of this process together."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def host_has_room_for(size: int) -> bool:
    """Whether this many bytes of images fit into the computer's memory, beside all else."""
    return size < SHARE_FOR_IMAGES * free_host_memory()


def free_host_memory() -> int:
    """Bytes of memory that this process may still use: of the computer, or of its control group where that has less.

    Where the system does not say, half of the computer's memory.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if hasattr(os, "sysconf") else 2**32
    with suppress(OSError, ValueError, LookupError):
        fields = dict(line.split(":", 1) for line in MEMORY_INFO.read_text().splitlines())
        free = 1024 * int((fields.get("MemAvailable") or fields["MemFree"]).split()[0])
    with suppress(OSError, ValueError):
        limit, used = (CONTROL_GROUP.joinpath(f"memory.{name}").read_text().strip() for name in ("max", "current"))
        free = free if limit == "max" else min(free, int(limit) - int(used))
    return free


def choose_compute(device: str = "auto", precision: str = "auto", compile: str = "auto") -> Compute:
    """`auto` is the first GPU if there is one, bf16 on a GPU that supports it, and compiling where it is possible."""
    for name, value, known in (("Precision", precision, PRECISIONS), ("Compile", compile, COMPILE)):
        if value not in known:
            raise TplError(f"{name} must be one of {', '.join(known)}; got '{value}'.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = current().own_device(device)
    try:
        chosen = torch.device(device)
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # streams and CUDA graphs belong to the current device
        torch.zeros(1, device=chosen, dtype=torch.float64)  # statistics need double precision
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        raise TplError(f"Device '{device}' cannot be used here: {str(error).splitlines()[0]}") from error
    on_gpu = chosen.type == "cuda"
    if chosen.type == "cpu" and program.own:
        torch.set_flush_denormal(True)  # now: the threads that torch starts later take it over
    if on_gpu and precision == "fp32":
        torch.backends.cudnn.allow_tf32 = False  # convolutions, too: by default they round to ten bits
    if compile == "on" and not (on_gpu and _has_compiler()):
        raise TplError("Compiling needs a CUDA device, Triton and a C compiler; leave --compile at auto or off.")
    compiled = compile != "off" and on_gpu and _has_compiler()
    if compiled:
        keep_compiled_code()
    return Compute(
        chosen,
        bf16=precision == "bf16" or (precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()),
        compiled=compiled,
        small_too=compile == "on",
    )


def keep_compiled_code() -> None:
    """Have torch keep what it compiles in the user's cache folder, where later processes find it.

    By default it goes to the folder for temporary files. A folder that the environment names is left alone.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))


def _has_compiler() -> bool:
    """Whether torch.compile can make kernels here: they are written in Triton and started by compiled C."""
    return find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))


# Denormal numbers


def without_denormals(work: Callable[[threading.Event], None]) -> None:
    """Run `work` in arithmetic that rounds denormal numbers (below 1e-38) to zero.

    A CPU computes with denormal numbers many times slower, and masks that are nearly closed make them by the thousand.
    The setting holds for a thread and for the threads it starts. In a program of this package, `choose_compute` has
    made the setting for the whole process. In another program, `work` gets a thread of its own, and the setting ends
    with that thread; an interrupt sets the event that `work` is given, and `work` should then end. A thread of its own
    is slower, since every thread that computes has a team of torch's threads: with two teams, waiting threads sleep
    instead of spinning, and steps of many short operations wait until they are awake.
    """
    if program.own and threading.current_thread() is threading.main_thread():
        work(threading.Event())
        return
    interrupted, done, failures = threading.Event(), threading.Event(), list[BaseException]()
    threads = torch.get_num_threads()

    def run() -> None:
        try:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(True)
            if not interrupted.is_set():
                work(interrupted)
        except BaseException as error:  # an interrupt, too: it is raised where it is expected
            failures.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=copy_context().run, args=(run,), name="train")
    try:
        thread.start()
        # Not `join`: if that is interrupted, Python takes a thread for finished that is not. With a limit: the signal
        # may have reached another thread, and is noticed between two waits.
        while not done.wait(WAIT):
            pass
    except BaseException:
        interrupted.set()
        while not done.wait(WAIT) and thread.ident is not None:  # None: it was never started
            pass
        raise
    thread.join()
    if failures:
        raise failures[0]


# CUDA graphs


def uses_cuda_graphs(device: torch.device) -> bool:
    """Whether steps and inference are captured once on this device and replayed; all then have the same shapes."""
    return device.type in GRAPH_DEVICES


@contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture on `graph` what is done inside.

    Python's garbage collector is off meanwhile: if it found a graph that is no longer needed, CUDA would refuse to free
    it now, and the capture would fail.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if collecting:
            gc.enable()


class CapturedFunction:
    """A function of tensors alone: on a GPU captured once for inputs of the same shapes and replayed, else just called.

    The result is a copy: the next replay does not overwrite it.
    """

    def __init__(self, function: Callable[..., Tensor], compute: Compute) -> None:
        self.function, self.compute = function, compute
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static: list[Tensor] = []
        self.answer = torch.empty(0)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The function's value, on the compute device."""
        if not uses_cuda_graphs(self.compute.device):
            return self.function(*inputs)
        if self.graph is None or [t.shape for t in self.static] != [t.shape for t in inputs]:
            self._capture(inputs)
        assert self.graph is not None
        for static, value in zip(self.static, inputs, strict=True):
            static.copy_(value)
        self.graph.replay()
        return self.answer.clone()

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.static = [value.to(self.compute.device, copy=True) for value in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries choose their kernels before anything is captured
                self.function(*self.static)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with capture(self.graph):
            self.answer = self.function(*self.static)


class Inference:
    """`function(images, *weights)` over any number of images, block by block.

    Libraries choose kernels by the batch's size, and kernels round differently. So on a GPU every block is filled up to
    one size: an image's result has the same bits alone and among thousands. All blocks are replays of one CUDA graph,
    with images and weights as its inputs. On a CPU blocks are smaller, and filled up to a multiple of four: results
    have the same bits on some CPUs, and are the same up to rounding on all.
    """

    def __init__(
        self, function: Callable[..., Tensor], compute: Compute, normalise: Callable[[Tensor], Tensor]
    ) -> None:
        self.function, self.compute, self.normalise = function, compute, normalise
        self._run = CapturedFunction(self._plain, compute)

    def __call__(self, pixels: Tensor, *weights: Tensor) -> Tensor:
        """The function's values for uint8 `pixels`, on the compute device."""
        replayed = uses_cuda_graphs(self.compute.device)
        size = BLOCK if replayed else QUAD
        parts = []
        with torch.no_grad():
            for part in pixels.split(BLOCK if replayed else images_on_a_cpu(pixels)):
                count = len(part)
                if missing := -max(count, 1) % size + (count == 0):
                    part = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])
                block = part.to(self.compute.device, non_blocking=True)
                parts.append(self._run(block, *weights)[:count])
            return torch.cat(parts)

    def _plain(self, pixels: Tensor, *weights: Tensor) -> Tensor:
        return self.function(self.normalise(pixels), *weights)


def images_on_a_cpu(pixels: Tensor) -> int:
    """Number of images of one pass on a CPU, given uint8 images or vectors."""
    area = pixels.shape[1:].numel() // 3
    return min(CPU_PIXELS // max(area, 1) // QUAD * QUAD or QUAD, CPU_IMAGES)
