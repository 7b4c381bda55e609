"""The encoder's own features of images, as advice uses them, with a small thumbnail of each image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tpl.engine import Compute, Inference
from tpl.errors import TplError
from tpl.nets import Encoder
from tpl.stream.unlabelled import Batch
from tpl.stream.vectors import preprocess_for

SIDE = 16  # pixels of a thumbnail


@dataclass(frozen=True)
class Looked:
    """All images that could be read: their names, labels, features and thumbnails; and why others could not."""

    names: list[str]
    labels: Tensor  # [n]
    features: Tensor  # [n, dim]
    thumbnails: Tensor  # [n, SIDE, SIDE + 1], grey levels
    errors: list[str]


class FeatureReader:
    """Computes features of images by a pre-trained encoder."""

    def __init__(self, encoder: Encoder, compute: Compute) -> None:
        if not encoder.pretrained:
            raise TplError(f"'{encoder.name}' is trained from scratch: it has no features to compare images by.")
        self.encoder = encoder.to(compute.device)
        self.preprocess = preprocess_for(encoder.data_config)
        normalise = self.preprocess.normaliser(compute.device, compute.dtype)
        self.features = Inference(partial(encoder.plain, dtype=compute.dtype), compute, normalise)

    def look(self, batches: Iterable[Batch], advance: Callable[[int], None] = lambda count: None) -> Looked:
        """Features and thumbnails of all images in `batches`."""
        names: list[str] = []
        errors: list[str] = []
        labels, features, thumbnails = [torch.zeros(0, dtype=torch.long)], [], []
        for batch in batches:
            fine = [error is None for error in batch.errors]
            names += [name for name, good in zip(batch.names, fine, strict=True) if good]
            errors += [error for error in batch.errors if error is not None]
            labels.append(torch.from_numpy(batch.labels.copy())[torch.tensor(fine, dtype=torch.bool)])
            if len(batch.pixels):
                features.append(self.features(batch.pixels).double().cpu())
                thumbnails.append(_thumbnails(batch.pixels))
            advance(len(batch.names))
        dim = self.encoder.dim
        return Looked(
            names,
            torch.cat(labels),
            torch.cat(features) if features else torch.zeros(0, dim, dtype=torch.float64),
            torch.cat(thumbnails) if thumbnails else torch.zeros(0, SIDE, SIDE + 1),
            errors,
        )


def _thumbnails(pixels: Tensor) -> Tensor:
    grey = pixels.float().mean(dim=1, keepdim=True)
    return F.interpolate(grey, (SIDE, SIDE + 1), mode="area").squeeze(1)


def centred(features: Tensor, reference: Tensor | None = None) -> Tensor:
    """Features of unit length around the mean of `reference` (by default their own), again of unit length."""
    unit = F.normalize(features, dim=1)
    mean = unit.mean(dim=0) if reference is None else F.normalize(reference, dim=1).mean(dim=0)
    return F.normalize(unit - mean, dim=1)


def groups_of(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The connected groups of some pairs, each in ascending order."""
    leader: dict[int, int] = {}

    def find(i: int) -> int:
        while leader.setdefault(i, i) != i:
            i = leader[i]
        return i

    for i, j in pairs:
        a, b = find(i), find(j)
        leader[max(a, b)] = min(a, b)
    found: dict[int, list[int]] = {}
    for i in sorted(leader):
        found.setdefault(find(i), []).append(i)
    return list(found.values())
