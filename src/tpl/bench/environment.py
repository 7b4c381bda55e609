"""The machine and the versions behind a number."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tpl._version import __version__
from tpl.engine import current


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and, in a checkout, the commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "tpl": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.system(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "processes": current().size,
        **{package: _version(package) for package in ("torch", "torchvision", "timm", "numpy", "scikit-learn")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str | None:
    """The checkout's commit, with a mark when files differ from it; else what TPL_COMMIT says, or None."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TPL_COMMIT")  # a copy of the sources on a machine without their history
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
