"""The replay memory: a few images of every class, within a budget, balanced and nested.

Each class gets the same quota, floor(budget / classes). A policy ranks a class's images once, when the class is
learned; later memories hold a prefix of that ranking: exemplars are removed but never replaced. Some policies rank by
features, which are passed with the images. Images are stored losslessly at the size of the encoder's resize step, or
smaller.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from tpl.errors import TplError
from tpl.stream import ImageSet, Preprocess
from tpl.stream.decoding import decode

# A policy ranks n images of one class, best first. Add new ones here.
Policy = Callable[[int, np.random.Generator], np.ndarray]

POLICIES: dict[str, Policy] = {
    "random": lambda n, rng: rng.permutation(n),  # the paper's
    "first": lambda n, rng: np.arange(n),  # the public code's
}


def herding(features: Tensor, count: int) -> NDArray[np.int64]:
    """The `count` images whose running mean stays closest to the mean of all, on features of unit length (iCaRL).

    With k images chosen, whose features add up to s, the next is argmin_x |m - (s + x) / (k + 1)|, none twice. As all x
    have length 1, that is argmax_x <x, (k + 1) m - s>.
    """
    x = F.normalize(features.detach().double().cpu(), dim=1)
    mean = x.mean(dim=0)
    wanted, chosen = mean.clone(), torch.zeros(len(x), dtype=torch.bool)
    ranking = []
    for _ in range(min(count, len(x))):
        best = int((x @ wanted).masked_fill(chosen, -torch.inf).argmax())
        chosen[best] = True
        ranking.append(best)
        wanted += mean - x[best]
    return np.array(ranking, dtype=np.int64)


def k_centres(features: Tensor, count: int) -> NDArray[np.int64]:
    """Images that cover the class: first the one nearest to the mean, then always the one farthest from all chosen.

    The greedy solution of the k-centre problem (Gonzalez, 1985), on features of unit length.
    """
    x = F.normalize(features.detach().double().cpu(), dim=1)
    ranking: list[int] = []
    nearest = torch.full((len(x),), torch.inf, dtype=torch.float64)  # squared distance to the nearest one chosen
    best = int((x @ x.mean(dim=0)).argmax()) if len(x) else 0
    for _ in range(min(count, len(x))):
        ranking.append(best)
        nearest = torch.minimum(nearest, 2 - 2 * (x @ x[best]))
        nearest[ranking] = -torch.inf
        best = int(nearest.argmax())
    return np.array(ranking, dtype=np.int64)


def border(features: Tensor, count: int, rest: Tensor) -> NDArray[np.int64]:
    """Images nearest to another class of the task: by the distance to `rest`, minus that to the class's own mean.

    Of a task with a single class, those farthest from its mean.
    """
    x = F.normalize(features.detach().double().cpu(), dim=1)
    own = (x - x.mean(dim=0)).norm(dim=1)
    if len(rest):
        others = F.normalize(rest.detach().double().cpu(), dim=1)
        own = own - torch.cdist(x, others).amin(dim=1)
    return _largest(own, count)


def leverage(features: Tensor, count: int, rest: Tensor) -> NDArray[np.int64]:
    """Images that weigh most in a ridge regression on the task's features: the largest x^T (X^T X + a I)^-1 x.

    The ridge a is a hundredth of the mean diagonal of X^T X, X the features of all the task's images.
    """
    x, others = (F.normalize(part.detach().double().cpu(), dim=1) for part in (features, rest))
    gram = x.T @ x + others.T @ others
    gram.diagonal().add_(LEVERAGE_RIDGE * float(gram.diagonal().mean()))
    weight = (x * torch.linalg.solve(gram, x.T).T).sum(dim=1)
    return _largest(weight, count)


def _largest(values: Tensor, count: int) -> NDArray[np.int64]:
    ranking: NDArray[np.int64] = values.argsort(descending=True, stable=True)[:count].numpy()
    return ranking


LEVERAGE_RIDGE = 0.01

# A feature policy ranks the best `count` images of one class by their features `[n, dim]`; some also look at `rest`,
# the features of the other classes of the task.
FEATURE_POLICIES: dict[str, Callable[[Tensor, int, Tensor], NDArray[np.int64]]] = {
    "herding": lambda features, count, rest: herding(features, count),
    "k-centres": lambda features, count, rest: k_centres(features, count),
    "border": border,
    "leverage": leverage,
}


@dataclass
class Memory:
    """Exemplars by class, at most `budget` in all; 0 stores none."""

    budget: int
    policy: str = "random"
    seed: int = 0
    exemplars: list[list[Any]] = field(default_factory=list)  # one list per class, of PNG images as bytes
    _prepared: Tensor | None = field(default=None, init=False, repr=False)  # decoded and resized once

    def __post_init__(self) -> None:
        known = [*POLICIES, *FEATURE_POLICIES]
        if self.policy not in known:
            raise TplError(f"Unknown memory policy '{self.policy}'; there are {', '.join(known)}.")
        if self.budget < 0:
            raise TplError(f"The memory budget must not be negative; got {self.budget}.")

    def __len__(self) -> int:
        return sum(len(images) for images in self.exemplars)

    @property
    def bytes_used(self) -> int:
        """Size of the stored images, encoded."""
        return sum(len(image) for images in self.exemplars for image in images)

    @property
    def labels(self) -> Tensor:
        """The class of every exemplar, in the order of `pixels`."""
        counts = torch.tensor([len(images) for images in self.exemplars], dtype=torch.long)
        return torch.arange(len(counts)).repeat_interleave(counts)

    def quotas(self, classes: int) -> list[int]:
        """How many exemplars each of `classes` classes may have.

        With a budget below the number of classes, the earliest classes have one each.
        """
        quota = self.budget // classes if classes else 0
        return [quota or int(c < self.budget) for c in range(classes)]

    @property
    def ranks_by_features(self) -> bool:
        """Whether `add` needs the images' features."""
        return self.policy in FEATURE_POLICIES

    def add(
        self,
        images: ImageSet,
        classes: int,
        preprocess: Preprocess,
        device: torch.device | str | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Add a new task's `classes` classes and shrink the old ones to the new quota.

        Returns which rows of the old memory stayed; they now come first, in the same order. The new rows of `pixels`
        are prepared on `device`; by default on that of the old ones (at first the CPU). `features` are those of
        `images`, `[n, dim]`, for a policy that ranks by them.
        """
        labels = np.asarray(images.labels)
        first = len(self.exemplars)
        quotas = self.quotas(first + classes)
        fresh = []  # added at the end: an image that cannot be read leaves the memory as it was
        for c in range(classes):
            members = np.flatnonzero(labels == c)
            rng = np.random.default_rng([self.seed, first + c])
            ranking = self._rank(len(members), rng, quotas[first + c], features, labels == c)
            chosen = members[ranking]
            fresh.append([encode(preprocess.shrink(images.load(int(i)))) for i in chosen])
        ranks = [rank for images_ in self.exemplars for rank in range(len(images_))]
        limits = [quotas[c] for c, images_ in enumerate(self.exemplars) for _ in images_]
        self.exemplars += fresh
        for images_, quota in zip(self.exemplars, quotas, strict=True):
            del images_[quota:]
        stayed = torch.nonzero(torch.tensor(ranks) < torch.tensor(limits)).squeeze(1)
        if self._prepared is not None or first == 0:
            old = [self._prepared[stayed]] if self._prepared is not None else []
            if device is None and self._prepared is not None:
                device = self._prepared.device
            new = preprocess.batch(self._images(first), device=device)
            self._prepared = torch.cat([*(rows.to(new.device) for rows in old), new])
        return stayed

    def redraw(self, images: dict[int, ImageSet], counts: dict[int, int], preprocess: Preprocess) -> Tensor:
        """Select the exemplars of some classes again, from the old ones and from more `images`, by class.

        `counts` is the number of images a class had before: an old exemplar represents several, and the policy ranks
        all of them together with the new ones. Returns for every row of the memory its row before, or -1 if new.
        """
        before = self._rows()
        fresh: dict[int, tuple[list[bytes], list[int]]] = {}
        quotas = self.quotas(len(self.exemplars))
        for c, more in images.items():
            old = list(zip(self.exemplars[c], before[c], strict=True))
            rng = np.random.default_rng([self.seed, c, counts[c], len(more)])
            drawn: list[tuple[bytes, int]] = []
            total = counts[c] + len(more)
            # A policy that ranks by features would need those of images that are gone: the draw is random then.
            rank = POLICIES["random" if self.ranks_by_features else self.policy]
            for i in rank(total, rng).tolist():
                if len(drawn) == quotas[c]:
                    break
                if i >= counts[c]:
                    drawn.append((encode(preprocess.shrink(more.load(i - counts[c]))), -1))
                elif old:  # an old image: the next old exemplar represents it
                    drawn.append(old.pop(0))
            fresh[c] = [image for image, _ in drawn], [row for _, row in drawn]
        for c, (exemplars, rows) in fresh.items():
            self.exemplars[c], before[c] = exemplars, rows
        self._prepared = None
        return torch.tensor([row for rows in before for row in rows], dtype=torch.long)

    def _rank(
        self, images: int, rng: np.random.Generator, count: int, features: Tensor | None, own: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """The indices of the first `count` of one class's images, `own` among all, in the policy's ranking."""
        if self.ranks_by_features:
            if features is None:
                raise TplError(f"The memory policy '{self.policy}' ranks images by features; none were given.")
            mine = torch.from_numpy(own).to(features.device)
            return FEATURE_POLICIES[self.policy](features[mine], count, features[~mine])
        return POLICIES[self.policy](images, rng)[:count]

    def remove(self, c: int) -> Tensor:
        """Delete a class and its exemplars; later classes move up. Returns which rows stayed."""
        before = self._rows()
        del self.exemplars[c], before[c]
        self._prepared = None
        return torch.tensor([row for rows in before for row in rows], dtype=torch.long)

    def _rows(self) -> list[list[int]]:
        """The row numbers of every class."""
        bounds = [0, *itertools.accumulate(len(images) for images in self.exemplars)]
        return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]

    def pixels(self, preprocess: Preprocess, device: torch.device | str | None = None) -> Tensor:
        """All exemplars in the encoder's size, uint8 `[n, 3, size, size]`, class by class.

        They are cached on `device`; by default a copy on the CPU is returned.
        """
        if self._prepared is None:
            self._prepared = preprocess.batch(self._images(0), device=device)
        if device is None:
            return self._prepared.cpu()
        self._prepared = self._prepared.to(device)
        return self._prepared

    def _images(self, first_class: int) -> ImageSet:
        """The exemplars of class `first_class` and all later ones, as a set of images."""
        return StoredImages([image for images in self.exemplars[first_class:] for image in images])

    def state(self) -> dict[str, Tensor]:
        """The exemplars as tensors: all bytes concatenated, their lengths, and the count per class."""
        flat = [image for images in self.exemplars for image in images]
        return {
            "bytes": torch.frombuffer(bytearray(b"".join(flat) or b"\0"), dtype=torch.uint8),
            "lengths": torch.tensor([len(image) for image in flat], dtype=torch.long),
            "counts": torch.tensor([len(images) for images in self.exemplars], dtype=torch.long),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned; ValueError if lengths and counts do not add up."""
        lengths, counts = state["lengths"], state["counts"]
        if any(t.dtype != torch.long or t.ndim != 1 or bool((t < 0).any()) for t in (lengths, counts)):
            raise ValueError("the memory's lengths and counts are no numbers of bytes and images")
        stored = state["bytes"].numel() if len(lengths) else 0  # an empty memory stores one byte
        if int(lengths.sum()) != stored or int(counts.sum()) != len(lengths):
            raise ValueError("the memory's lengths and counts do not add up to its images")
        raw = state["bytes"].numpy().tobytes()
        ends = state["lengths"].cumsum(0).tolist()
        flat = [raw[end - length : end] for end, length in zip(ends, state["lengths"].tolist(), strict=True)]
        bounds = [0, *state["counts"].cumsum(0).tolist()]
        exemplars = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        self.restore(exemplars)

    def restore(self, exemplars: list[list[Any]]) -> None:
        """Replace all exemplars by these."""
        self.exemplars, self._prepared = exemplars, None


class StoredImages(ImageSet):
    """Encoded images in memory, without labels."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images

    @property
    def labels(self) -> NDArray[np.int64]:
        """All -1: `Memory.labels` has the classes."""
        return np.full(len(self.images), -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int) -> Image.Image:
        """The stored image as RGB. A model from elsewhere can hold any bytes: only known formats are decoded."""
        return decode(self.images[index], self.name(index))

    def name(self, index: int) -> str:
        """The image's index in the memory."""
        return f"exemplar {index}"

    def identity(self, index: int) -> bytes:
        """The encoded image itself."""
        return self.images[index]


def encode(image: Image.Image) -> bytes:
    """An image as PNG, lossless."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
