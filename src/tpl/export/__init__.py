"""A model as one ONNX file that needs neither tpl nor torch: uint8 images in, probabilities out."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from tpl.errors import TplError

NEEDED = ("onnx", "onnxscript", "onnxruntime")
PRECISIONS = ("fp32", "fp16", "int8")


def check_ready(file: Path, precision: str) -> None:
    """Refuse a path where no file can be written, an unknown precision, and missing packages; needs no torch."""
    if precision not in PRECISIONS:
        raise TplError(f"The precision must be one of {', '.join(PRECISIONS)}; got '{precision}'.")
    if file.suffix != ".onnx":
        raise TplError(f"The file must end in .onnx; got '{file.name}'.")
    if file.is_dir():
        raise TplError(f"{file} is a folder; name a file.")
    if not file.parent.is_dir():
        raise TplError(f"There is no folder {file.parent}; make it first.")
    if not os.access(file.parent, os.W_OK):
        raise TplError(f"The folder {file.parent} cannot be written to.")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise TplError(f"Exporting needs {', '.join(missing)}; install with: pip install 'tpl-cil[export]'")
