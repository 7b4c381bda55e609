"""A device that is not the CPU, on a machine that has no other: to find out what a GPU would refuse.

Within `elsewhere()`, `torch.device("lazy")` has tensors. They compute as the CPU's do, but an operation that is given
some of them and some of the CPU's fails, as on a GPU; so does a random draw there from a generator of the CPU, and what
asks for their memory, such as numpy. (torch's autograd serves `lazy` tensors as it serves those of the CPU, without
threads or streams of their own: that is why it is this name.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("lazy", 0)
aten = torch.ops.aten
BETWEEN = {aten._to_copy.default, aten.copy_.default}  # may take both
CPU_NUMBERS = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


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


class MadeThere(TorchFunctionMode):
    """Serves `torch.tensor` and `torch.as_tensor`, which torch does not dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **kwargs | {"device": None}).to(kwargs["device"])
        return func(*args, **kwargs)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation, done by the CPU, if a GPU would do it."""
    given = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor)]
    there = [part for part in given if isinstance(part, Elsewhere)]
    here = [part for part in given if not isinstance(part, Elsewhere) and part.dim() > 0]
    target = kwargs.get("device")
    goes = bool(there) if target is None else torch.device(target).type == ELSEWHERE.type
    if there and here and func not in BETWEEN and not (func in CPU_NUMBERS and isinstance(args[0], Elsewhere)):
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found some here, some elsewhere"
        )
    if goes and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func}: expected a generator of {ELSEWHERE}, but found one of the CPU")
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if func is aten.copy_.default:
        goes = isinstance(args[0], Elsewhere)
    known = {id(part.inner): part for part in there}
    args, kwargs = tree_map(lambda part: part.inner if isinstance(part, Elsewhere) else part, (args, kwargs))
    found = func(*args, **kwargs)
    if not goes:
        return found

    def behind_the_wall(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return known[id(part)] if id(part) in known else Elsewhere(part)  # what was changed in place stays itself

    return tree_map(behind_the_wall, found)


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """The device, as long as it is there."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # or a converted module would keep its `inner`
    try:
        with There(), MadeThere():
            yield ELSEWHERE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
