"""A hash of the images and labels behind a number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tpl.stream.images import ImageSet


def fingerprint(sets: Sequence[ImageSet | None]) -> str:
    """sha256 over every image's identity and label, in order."""
    digest = hashlib.sha256()
    for images in sets:
        if images is None:
            continue
        for index, label in enumerate(images.labels.tolist()):
            digest.update(f"{label} ".encode())
            digest.update(images.identity(index))
    return digest.hexdigest()
