"""A device that is not the CPU, on a machine that has no other: to find out what a GPU would refuse.

Within `elsewhere()`, `torch.device("lazy")` has tensors. They compute as the CPU's do, but an operation that is given
some of them and some of the CPU's fails, as on a GPU; so does a random draw there from a generator of the CPU, and what
asks for their memory, such as numpy. (torch's autograd serves `lazy` tensors as it serves those of the CPU, without
threads or streams of their own: that is why it is this name.)

Within `elsewhere(recording=True)` the program takes it for a GPU that records steps and answers, and `torch.cuda`'s
graphs are tapes: what is done while one runs is noted, operation by operation, and a replay does the same with the same
tensors. What a GPU cannot record, because the CPU has a part in it, is refused. So a step that leans on anything that
Python does in it, a branch or a number, gives other answers replayed than done anew: as on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpl.engine import compute as engine_compute

ELSEWHERE = torch.device("lazy", 0)
aten = torch.ops.aten
BETWEEN = {aten._to_copy.default, aten.copy_.default}  # may take both
CPU_NUMBERS = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# The CPU would have to wait for these, to know a number or the size of an answer.
AWAITED = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.bincount.default,
    aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor, aten.equal.default,
}  # fmt: skip


class Call(NamedTuple):
    """One operation on a tape, with the tensors behind the wall."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    found: list[Tensor]

    def again(self) -> None:
        """Do it anew, with what the same tensors hold now, and put the answers where they were."""
        for old, new in zip(self.found, _tensors(self.func(*self.args, **self.kwargs)), strict=True):
            if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                old.copy_(new)


class Tape:
    """What stands for a `torch.cuda.CUDAGraph`."""

    running: Tape | None = None

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # memory, and what it held

    def replay(self) -> None:
        """Everything once more."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for call in self.calls:
                call.again()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Take down what is done, and refuse what cannot be. It shall not have been done: a GPU only takes notes."""
        if gc.isenabled():
            raise RuntimeError("an old recording could be freed now, and spoil this one")
        drawn = torch.get_rng_state()
        Tape.running = self
        try:
            yield
        finally:
            Tape.running = None
        for memory, held in self.before.values():
            memory.copy_(held)
        torch.set_rng_state(drawn)

    def remember(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """What the tensors hold that an operation is about to change."""
        for place, told in enumerate(func._schema.arguments):
            if told.alias_info is not None and told.alias_info.is_write:
                for part in _tensors(args[place] if place < len(args) else kwargs.get(told.name)):
                    memory = part.untyped_storage()
                    self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))

    def refuse(self, func: Any, args: Any, crosses: bool) -> None:
        """As CUDA does, for what takes the CPU."""
        by_mask = func in CPU_NUMBERS and any(part.dtype == torch.bool for part in _tensors(args[1]))
        if func in AWAITED or crosses or by_mask:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")


class Elsewhere(Tensor):
    """A tensor elsewhere: one of the CPU behind a wall."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=ELSEWHERE,
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"elsewhere({self.inner!r})"

    def tolist(self) -> Any:
        """torch has none for tensors of other classes."""
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class There(TorchDispatchMode):
    """Serves what makes tensors elsewhere out of nothing, or of the CPU's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, done by the CPU, if a GPU would do it."""
    there: list[Elsewhere] = []
    near: list[Tensor] = []
    inner, named = _inside(args, there, near), _inside(kwargs, there, near)
    here = [part for part in near if part.dim() > 0]
    target = kwargs.get("device")
    goes = bool(there) if target is None else torch.device(target).type == ELSEWHERE.type
    if there and here and func not in BETWEEN and not (func in CPU_NUMBERS and isinstance(args[0], Elsewhere)):
        raise RuntimeError(f"{func}: expected all tensors on the same device, but found some here, some elsewhere")
    if goes and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: expected a generator of {ELSEWHERE}, but found one of the CPU")
    if target is not None:
        named["device"] = torch.device("cpu")
    if func is aten.copy_.default:
        goes = isinstance(args[0], Elsewhere)
    if Tape.running and (there or goes):
        crosses = (func in BETWEEN and (bool(near) or not goes)) or bool(here)
        Tape.running.refuse(func, inner, crosses)
        if goes and func._schema.is_mutable:
            Tape.running.remember(func, inner, named)
    found = func(*inner, **named)
    if not goes:
        return found
    if Tape.running and not func.is_view:  # a view stays what it is, whatever the memory holds
        Tape.running.calls.append(Call(func, inner, named, _tensors(found)))
    return _outside(found, there)


def made_there(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` or `torch.as_tensor`, which torch does not dispatch."""

    def made(*data: Any, device: Any = None, **more: Any) -> Tensor:
        return make(*data, **more) if device is None else make(*data, **more).to(device)

    return made


@contextmanager
def elsewhere(recording: bool = False) -> Iterator[torch.device]:
    """The device, as long as it is there; `recording`: as a GPU."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # or a converted module would keep its `inner`
    try:
        with ExitStack() as stack:
            if recording:
                stack.enter_context(mock.patch.object(engine_compute, "GRAPH_DEVICES", {ELSEWHERE.type}))
                stack.enter_context(mock.patch.multiple(torch.cuda, **STANDS_FOR))
            stack.enter_context(There())
            stack.enter_context(mock.patch.multiple(torch, **MADE_THERE))
            yield ELSEWHERE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


STANDS_FOR: dict[str, Any] = {
    "CUDAGraph": Tape,
    "graph": Tape.recorded,
    "Stream": mock.Mock,
    "current_stream": mock.Mock,
    "stream": nullcontext,
}


MADE_THERE = {name: made_there(getattr(torch, name)) for name in ("tensor", "as_tensor")}
PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # the usual arguments beside tensors


def _inside(tree: Any, there: list[Elsewhere], near: list[Tensor]) -> Any:
    """The same arguments with the tensors behind the wall; all tensors are noted. (torch's own trees take longer.)"""
    if isinstance(tree, Elsewhere):
        there.append(tree)
        return tree.inner
    if isinstance(tree, Tensor):
        near.append(tree)
    elif isinstance(tree, (list, tuple)):
        return type(tree)([part if type(part) in PLAIN else _inside(part, there, near) for part in tree])
    elif isinstance(tree, dict):
        return {name: part if type(part) in PLAIN else _inside(part, there, near) for name, part in tree.items()}
    return tree


def _outside(tree: Any, there: list[Elsewhere]) -> Any:
    """The same answers, put behind the wall; what was changed in place stays itself."""
    if isinstance(tree, Tensor):
        for part in there:
            if part.inner is tree:
                return part
        return Elsewhere(tree)
    return type(tree)([_outside(part, there) for part in tree]) if isinstance(tree, (list, tuple)) else tree


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [found for part in tree for found in _tensors(part)] if isinstance(tree, (list, tuple)) else []
