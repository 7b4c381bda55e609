"""Model directories changed by somebody who knows the format: checksums and seal fit what was changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

from tpl.files import sha256_of
from tpl.header import SEAL, seal_of

Change = Callable[[dict[str, Any]], object]


def forge_header(model: Path, change: Change, sealed: bool = True) -> dict[str, Any]:
    """Change `model.json` in place, with a new seal or with the old one."""
    file = model / "model.json"
    header: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    change(header)
    if sealed:
        header[SEAL] = seal_of(header)
    file.write_text(json.dumps(header), encoding="utf-8")
    return header


def forge_tensors(model: Path, part: str, change: Change) -> None:
    """Change the tensors of a part (`task-0`, `shared`, `memory`) in place, with a new checksum and seal."""
    header = json.loads((model / "model.json").read_text(encoding="utf-8"))
    name = next(file for file in header["files"] if file.endswith(f"/{part}.safetensors"))
    tensors = safetensors.torch.load_file(model / name)
    change(tensors)
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, model / name)
    forge_header(model, lambda header: header["files"].update({name: sha256_of(model / name)}))


def forge_bytes(model: Path, name: str, content: bytes) -> None:
    """Replace a file of the model, with a new checksum and seal."""
    (model / name).write_bytes(content)
    forge_header(model, lambda header: header["files"].update({name: sha256_of(model / name)}))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in JSON that are no containers, and to empty containers."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, item in inner for leaf in leaves(item, (*path, key))]
    return found or [path]


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    """Replace the value at a path."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new
