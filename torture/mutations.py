"""Small changes to valid inputs: of bytes, of JSON values, of tensors."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

import torch

from torture.forged import leaves, put

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300, "", " ", "x", "tpl", "auto",
    "../../x", "/etc/passwd", "\x1b[2J", "\ud800", "x" * 100_000, [], [[]], [None], {}, {"a": {}}, ["a", "a"],
    [0] * 1000,
)  # fmt: skip
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, cut, repeated, moved, or overwritten by a number that a parser may trust."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        if not content:
            return bytes(content)
        at = (
            min(int(draw.expovariate(1 / 40)), len(content) - 1)
            if draw.random() < 0.4
            else draw.randrange(len(content))
        )
        kind = draw.randrange(7)
        if kind == 0:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            content[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        elif kind == 2:
            del content[at : at + draw.choice((1, 2, 4, 64, len(content)))]
        elif kind == 3:
            content[at:at] = content[at : at + draw.choice((1, 4, 64, 1000))]
        elif kind == 4:
            order = draw.choice("<>")
            content[at : at + 4] = struct.pack(f"{order}I", draw.choice(NUMBERS))
        elif kind == 5:
            content[at : at + 2] = struct.pack(f"{draw.choice('<>')}H", draw.choice(NUMBERS) & 0xFFFF)
        else:
            content[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4, 16))))
    return bytes(content)


def mutate_json(value: dict[str, Any], draw: random.Random) -> str:
    """Change a value in place, or remove, rename or repeat a key or an item; returns what was done."""
    path = draw.choice(leaves(value))
    path = path[: draw.randint(1, len(path))] if draw.random() < 0.2 else path
    kind = draw.choice(("put", "put", "put", "delete", "rename", "repeat"))
    parent: Any = value
    for key in path[:-1]:
        parent = parent[key]
    if kind == "put" or (isinstance(parent, list) and kind == "rename"):
        new = draw.choice(VALUES)
        put(value, path, copy.deepcopy(new))
        return f"{path} = {str(new)[:40]!r}"
    if kind == "delete":
        del parent[path[-1]]
    elif kind == "rename":
        parent[f"{path[-1]}s"] = parent.pop(path[-1])
    elif isinstance(parent, list):
        parent += [copy.deepcopy(parent[path[-1]])] * draw.choice((1, 10, 1000))
    else:
        parent["another"] = copy.deepcopy(parent[path[-1]])
    return f"{kind} {path}"


def mutate_tensors(tensors: dict[str, torch.Tensor], draw: random.Random) -> str:
    """Change one tensor in place: its name, type, shape or numbers; returns what was done."""
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    kind = draw.choice(("drop", "rename", "type", "rows", "flat", "empty", "large", "number", "negative", "columns"))
    if kind == "drop":
        del tensors[name]
    elif kind == "rename":
        tensors[f"{name}s"] = tensors.pop(name)
    elif kind == "type":
        tensors[name] = tensor.to(draw.choice((torch.float16, torch.float64, torch.int64, torch.uint8, torch.int8)))
    elif kind == "rows" and tensor.ndim:
        tensors[name] = draw.choice((tensor[:-1], torch.cat([tensor, tensor])))
    elif kind == "columns" and tensor.ndim > 1:
        tensors[name] = draw.choice((tensor[:, :-1], tensor.T if tensor.ndim == 2 else tensor[..., :1])).contiguous()
    elif kind == "flat":
        tensors[name] = tensor.flatten()
    elif kind == "empty":
        tensors[name] = torch.zeros(0, dtype=tensor.dtype)
    elif kind == "large":
        tensors[name] = torch.zeros(draw.choice((1000, 100_000)), dtype=tensor.dtype)
    elif tensor.numel():
        changed = tensor.clone().flatten()
        value = draw.choice((0, 1, 255, 2**40, 1e30, float("nan"), float("inf")))
        at = draw.randrange(len(changed))
        whole = not changed.is_floating_point()
        number = (int(value) if value == value and abs(value) != float("inf") else 0) if whole else value
        limit = torch.iinfo(changed.dtype).max if whole and changed.dtype != torch.bool else 1
        changed[at] = min(number, limit) if whole else number
        tensors[name] = (-changed if kind == "negative" and changed.dtype != torch.bool else changed).view(tensor.shape)
    return f"{kind} {name}"
