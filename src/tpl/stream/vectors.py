"""Feature vectors as samples: labelled sets, and standardisation in place of an image's preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tpl.errors import DataError
from tpl.stream.images import ImageSet, Labels, as_labels, in_range, positions
from tpl.stream.preprocess import Preprocess

if TYPE_CHECKING:  # slow to import, as in `preprocess`
    import torch

Array = NDArray[Any]

LIMIT = 10.0  # a standardised feature is clipped at so many deviations


class VectorSet(ImageSet):
    """Labelled vectors `[n, features]`, used like a set of images."""

    def __init__(self, vectors: Array, labels: ArrayLike | None = None) -> None:
        self.vectors = vectors
        self._labels = as_labels(np.zeros(len(vectors), int) if labels is None else labels, len(vectors), "vectors")

    @property
    def labels(self) -> Labels:
        return self._labels

    def __len__(self) -> int:
        return len(self.vectors)

    def load(self, index: int) -> Never:
        raise DataError(f"{self.name(index)} is a vector and cannot be loaded as an image.")

    def name(self, index: int) -> str:
        return f"vectors[{in_range(index, len(self))}]"

    def identity(self, index: int) -> bytes:
        content: bytes = self.vectors[in_range(index, len(self))].tobytes()
        return content

    def select(self, indices: ArrayLike) -> VectorSet:
        chosen = positions(indices, len(self))
        return VectorSet(self.vectors[chosen], self._labels[chosen])


class Standardise(Preprocess):
    """Shifts, scales and cuts off features; float32 samples `[n, features]` need no normalisation afterwards.

    `data_config` has `input_size` (features,), `mean` and `scale` of every feature, and a `limit` (None: no cut).
    """

    def __init__(self, data_config: Mapping[str, Any]) -> None:
        self.height, self.width = 1, int(data_config["input_size"][0])
        self.shift, self.scale = (np.asarray(data_config[key], dtype=np.float64) for key in ("mean", "scale"))
        self.limit: float | None = data_config["limit"]

    @property
    def bytes_per_image(self) -> int:
        """Size of one standardised vector."""
        return 4 * self.width

    def batch(
        self,
        images: ImageSet,
        progress: Callable[[int], None] | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """All vectors standardised, float32, on `device` (else on the CPU)."""
        import torch

        if not isinstance(images, VectorSet):
            raise DataError(f"A network over vectors needs a VectorSet; got {type(images).__name__}.")
        scaled = (images.vectors.astype(np.float64) - self.shift) * self.scale
        if self.limit is not None:
            scaled = scaled.clip(-self.limit, self.limit)
        if progress is not None:
            progress(len(images))
        return torch.from_numpy(scaled.astype(np.float32)).to(device or "cpu")

    def normaliser(
        self, device: torch.device, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The identity: standardised vectors need no normalisation."""
        return lambda vectors: vectors


def standardisation(vectors: Array, kind: str) -> dict[str, Any]:
    """The `data_config` that standardises by the statistics of these vectors.

    `kind` is "features" (each by its own deviation; one that does not vary by the average), "global" (all by the
    average deviation) or "none".
    """
    vectors = vectors.astype(np.float64)
    size = vectors.shape[1:]
    if kind == "none":
        return {"input_size": size, "mean": np.zeros(size), "scale": np.ones(size), "limit": None}
    deviation = vectors.std(axis=0)
    varies = deviation > 1e-9 * np.abs(vectors).max(axis=0)
    usual = np.sqrt(np.square(deviation[varies]).mean()) if varies.any() else 1.0
    alone = varies & (kind == "features")
    scale = 1 / np.where(alone, deviation, usual)
    return {"input_size": size, "mean": vectors.mean(axis=0), "scale": scale, "limit": LIMIT}


def preprocess_for(data_config: Mapping[str, Any]) -> Preprocess:
    """The preprocessing of an encoder, of vectors or of images."""
    return Standardise(data_config) if len(data_config.get("input_size", ())) == 1 else Preprocess(data_config)
