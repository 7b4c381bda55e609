"""Pictures for tests of commands: made in a moment, easy to tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def photos(root: Path, names: Sequence[str], count: int = 10, seed: int = 0, suffix: str = "png") -> Path:
    """Class folders below `root`: a class is a colour and the width of stripes."""
    for name in names:
        kind = sum(name.encode()) % 11
        rng = np.random.default_rng([seed, kind])
        (root / name).mkdir(parents=True, exist_ok=True)
        colour = np.array([(kind * 97) % 256, (kind * 57 + 80) % 256, (kind * 151 + 30) % 256])
        stripes = np.sin(np.arange(40) * (0.3 + 0.25 * (kind % 5))) * 60
        for i in range(count):
            pixels = rng.normal(0, 18, (48, 40, 3)) + colour + stripes[None, :, None]
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / name / f"{i}.{suffix}")
    return root


def walkthrough(place: Path) -> None:
    """The folders that docs/learn.md starts from."""
    photos(place / "photos", ["cat", "cow", "dog", "fox"], suffix="jpg")
    photos(place / "birds", ["hen", "owl"], suffix="jpg")
    photos(place / "test", ["cat", "cow", "dog", "fox", "hen", "owl"], count=2, seed=1, suffix="jpg")
    photos(place / "more-cats", ["house cat"], count=5, seed=2, suffix="jpg")
    (place / "inbox").mkdir()
    for name in ("cat", "owl"):
        for file in (photos(place / "new", [name], count=2, seed=3, suffix="jpg") / name).iterdir():
            file.rename(place / "inbox" / f"{name}-{file.name}")
