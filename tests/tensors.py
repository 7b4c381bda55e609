"""Find every tensor that an object holds, so that a stored and loaded object can be compared with the original."""

from __future__ import annotations

import types

import torch
from torch import Tensor

ROUNDING = 1e-5  # relative: what kernels for another number of rows, or another CPU, may change in float32
CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)
ATOMS = (str, bytes, int, float, torch.dtype, torch.device, *CODE)


def tensors_of(thing: object) -> dict[str, Tensor]:
    """All tensors reachable from an object through attributes, dictionaries and sequences, by their path."""
    found: dict[str, Tensor] = {}
    _collect(thing, "", set(), found)
    return found


def _collect(thing: object, path: str, seen: set[int], found: dict[str, Tensor]) -> None:
    if isinstance(thing, Tensor):
        found[path] = thing
        return
    if isinstance(thing, ATOMS) or id(thing) in seen:
        return
    seen.add(id(thing))
    items: list[tuple[object, object]]
    if isinstance(thing, dict):
        items = list(thing.items())
    elif isinstance(thing, list | tuple | set):
        items = list(enumerate(thing))
    else:
        items = list(getattr(thing, "__dict__", {}).items())
    for name, value in items:
        _collect(value, f"{path}.{name}", seen, found)


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Tensors of the same path that differ in dtype, shape, memory layout or any bit; each as a sentence."""
    sentences = []
    for path in sorted(a.keys() & b.keys()):
        x, y = a[path].detach(), b[path].detach()
        for what, of_x, of_y in (
            ("dtype", x.dtype, y.dtype),
            ("shape", tuple(x.shape), tuple(y.shape)),
            ("strides", x.stride(), y.stride()),
        ):
            if of_x != of_y:
                sentences.append(f"{path}: {what} {of_x} against {of_y}")
        if x.dtype == y.dtype and x.shape == y.shape and not torch.equal(x, y):
            sentences.append(f"{path}: values differ by up to {float((x.double() - y.double()).abs().max()):.1e}")
    return sentences
