"""Batches of new and replayed images, for one network or for several that are trained side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the label of a row that only fills a batch up: cross-entropy's own word for it
QUARTERS = (1, 2, 3)  # the turns of an image that are not none

# Row numbers of new samples `[networks, n]`, of replayed ones, and random numbers `[networks, m]`; then, for each set
# of new samples that is too large for the device, the pixels of its rows. Row n + i of n samples is the mirror image
# of row i; row -1 is no sample.
Inputs = tuple[Tensor, ...]
DRAWS = 2  # where the random numbers are among them
MARGIN = 8  # a crop is moved by up to this part of the side: 4 pixels of 32


@dataclass(frozen=True)
class Samples:
    """Images as uint8 pixels `[n, 3, size, size]`, or vectors as floats `[n, features]`, and their labels.

    Labels are on the device. Pixels are too, unless there are too many: then they stay in the computer's memory and
    are sent batch by batch.
    """

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def resident(self) -> bool:
        """Whether the pixels are on the device already."""
        return self.pixels.device == self.labels.device


class Turns(NamedTuple):
    """Outputs that turned images are told from: `classes` of them for each of three quarter turns, behind `first`."""

    first: int
    classes: int

    @property
    def outputs(self) -> int:
        """How many these are."""
        return len(QUARTERS) * self.classes


class Batches:
    """Shuffled batches of new samples, each joined by as many replayed ones.

    Replay draws from its own endless row of permutations, so the ratio stays 1:1 whatever the sizes. With `mirror`,
    every image is turned left to right half of the time; with `crop`, it is also moved by a few pixels each way, and
    black comes in from the edge. `whole` fills an epoch's last batch up with samples of the epoch, drawn by lot: for
    networks that look at a batch as a whole. With `turns`, every new sample is there once more, turned by one, two or
    three quarters, by lot, with a label that says so. A step comes with `numbers` random numbers in [0, 1).
    """

    def __init__(
        self,
        new: Samples,
        replay: Samples | None,
        batch_size: int,
        generator: torch.Generator,
        mirror: bool = False,
        numbers: int = 0,
        crop: bool = False,
        whole: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self.new, self.replay = new, replay if replay is not None and len(replay) else None
        self.batch_size, self.generator, self.mirror, self.numbers = batch_size, generator, mirror or crop, numbers
        self.crop, self.whole, self.turns = crop, whole, turns
        if whole:
            self.batch_size = min(batch_size, len(new))
        self._replay_order = torch.zeros(0, dtype=torch.long)

    @property
    def steps(self) -> int:
        """Steps an epoch."""
        return math.ceil(len(self.new) / self.batch_size)

    @property
    def images(self) -> int:
        """Images an epoch, replayed and turned ones included."""
        new = self.steps * self.batch_size if self.whole else len(self.new)
        return new * (1 + (self.replay is not None) + (self.turns is not None))

    @property
    def shifts(self) -> int:
        """How many of a step's random numbers move images: two for each, behind those for the objective."""
        return 2 * self.batch_size * (2 if self.replay is not None else 1) if self.crop else 0

    def epoch(self) -> tuple[Tensor, Tensor]:
        """One pass over the new samples: their rows in random order, and a row to replay beside each of them."""
        order = torch.randperm(len(self.new), generator=self.generator)
        if self.whole and (missing := -len(order) % self.batch_size):
            order = torch.cat([order, torch.randperm(len(self.new), generator=self.generator)[:missing]])
        old = self._next_replay(len(order)) if self.replay is not None else order[:0]
        if self.mirror:
            order, old = self._mirrored(order, len(self.new)), self._mirrored(old, len(self.replay or ()))
        return order, old

    def draws(self) -> Tensor:
        """The random numbers of one epoch, a row a step: the objective's, then shifts, then one for every turn."""
        turned = self.batch_size if self.turns is not None else 0
        return torch.rand(self.steps, self.numbers + self.shifts + turned, generator=self.generator)

    def _mirrored(self, rows: Tensor, count: int) -> Tensor:
        """Half of the rows, drawn by lot, as those of their mirror images."""
        return rows + count * torch.randint(0, 2, rows.shape, generator=self.generator)

    def _next_replay(self, count: int) -> Tensor:
        assert self.replay is not None
        while len(self._replay_order) < count:
            fresh = torch.randperm(len(self.replay), generator=self.generator)
            self._replay_order = torch.cat([self._replay_order, fresh])
        rows, self._replay_order = self._replay_order[:count], self._replay_order[count:]
        return rows


class Feed:
    """The batches of several networks, in step with each other.

    `full` fills an epoch's last batch up with ignored rows, so that every step has the same shapes and can be a replay
    of one recording.
    """

    def __init__(self, networks: Sequence[Batches], full: bool = False) -> None:
        first = networks[0]
        if any(len(b.new) != len(first.new) or b.batch_size != first.batch_size for b in networks):
            raise ValueError("networks trained side by side need equally many samples and the same batch size")
        if len({b.replay is None for b in networks}) > 1:
            raise ValueError("networks trained side by side must all have replay, or none of them")
        if len({b.turns for b in networks}) > 1:
            raise ValueError("networks trained side by side must all have the same outputs for turned images")
        self.networks, self.full = networks, full
        self.steps, self.batch_size, self.numbers = first.steps, first.batch_size, first.numbers
        self.device = first.new.labels.device
        self.streamed = [i for i, b in enumerate(networks) if not b.new.resident]

    @property
    def images(self) -> int:
        """Images an epoch, all networks and replayed ones included."""
        return sum(b.images for b in self.networks)

    def epoch(self) -> Iterator[Inputs]:
        """The inputs of every step of one epoch, on the device."""
        pairs = [b.epoch() for b in self.networks]
        rows, old = (self._cut(torch.stack(column)) for column in zip(*pairs, strict=True))
        draws = torch.stack([b.draws() for b in self.networks]).to(self.device).unbind(1)
        on_device = zip(*(self._sent(part) for part in (rows, old)), draws, strict=True)
        if not self.streamed:
            yield from on_device
            return
        with ThreadPoolExecutor(1, thread_name_prefix="send") as pool:  # one batch ahead of the device
            coming = pool.submit(self._send_pixels, rows[0])
            for step, indices in enumerate(on_device):
                pixels = coming.result()
                if step + 1 < len(rows):
                    coming = pool.submit(self._send_pixels, rows[step + 1])
                yield (*indices, *pixels)

    def gather(self, rows: Tensor, old: Tensor, draws: Tensor, *sent: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels `[networks * batch, 3, size, size]` and labels `[networks, batch]` of one step."""
        given = dict(zip(self.streamed, sent, strict=True))
        upright = rows.shape[1] + old.shape[1]
        count = upright + (rows.shape[1] if self.networks[0].turns is not None else 0)
        like = self.networks[0].new.pixels
        pixels = torch.empty((len(rows), count, *like.shape[1:]), dtype=like.dtype, device=self.device)
        labels = []
        for i, network in enumerate(self.networks):
            images = pixels[i, :upright]
            own, replayed = images[: rows.shape[1]], images[rows.shape[1] :]
            if i in given:
                own.copy_(given[i])
            else:
                torch.index_select(network.new.pixels, 0, _places(network.new, rows[i]), out=own)
            parts, mirrored = [_labels(network.new, rows[i])], [rows[i] >= len(network.new)]
            if network.replay is not None:
                torch.index_select(network.replay.pixels, 0, _places(network.replay, old[i]), out=replayed)
                parts.append(_labels(network.replay, old[i]))
                mirrored.append(old[i] >= len(network.replay))
            if network.mirror:
                images.copy_(torch.where(torch.cat(mirrored)[:, None, None, None], images.flip(-1), images))
            draw = draws[i, network.numbers :]
            if network.crop:
                images.copy_(moved(images, draw[: network.shifts].view(2, -1)[:, :upright]))
            if network.turns is not None:
                number = 1 + (len(QUARTERS) * draw[network.shifts :][: len(own)]).long()
                pixels[i, upright:] = turned(own, number)
                parts.append(_turned_labels(parts[0], number, network.turns))
            labels.append(torch.cat(parts))
        return pixels.flatten(0, 1), torch.stack(labels)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Rows `[networks, n]` of an epoch as one part per step."""
        if not rows.shape[1]:
            return [rows] * self.steps
        if self.full and (missing := self.steps * self.batch_size - rows.shape[1]):
            rows = torch.cat([rows, rows.new_full((len(rows), missing), -1)], dim=1)
        return list(rows.split(self.batch_size, dim=1))

    def _sent(self, parts: list[Tensor]) -> list[Tensor]:
        """All parts on the device, by one copy."""
        sizes = [part.shape[1] for part in parts]
        return list(torch.cat(parts, dim=1).to(self.device).split(sizes, dim=1))

    def _send_pixels(self, rows: Tensor) -> list[Tensor]:
        new = [(self.networks[i].new, rows[i]) for i in self.streamed]
        batches = [samples.pixels[_places(samples, own)] for samples, own in new]
        if self.device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]  # only then is the copy asynchronous
        return [batch.to(self.device, non_blocking=True) for batch in batches]


def turned(pixels: Tensor, number: Tensor) -> Tensor:
    """Each image `[n, 3, size, size]` turned by so many quarters, one to three."""
    choices = torch.stack([pixels.rot90(quarters, dims=(-2, -1)) for quarters in QUARTERS])
    return choices[number - 1, torch.arange(len(pixels), device=pixels.device)]


def moved(pixels: Tensor, draws: Tensor) -> Tensor:
    """Each image `[n, 3, h, w]` shifted down and to the right by up to an eighth of its size, or as far back.

    `draws` are two numbers in [0, 1) an image, `[2, n]`. It is the crop, at random, of an image with a black margin.
    """
    places, inside = [], []
    for draw, length in zip(draws, pixels.shape[-2:], strict=True):
        margin = length // MARGIN
        first = (draw * (2 * margin + 1)).long() - margin
        place = first.unsqueeze(1) + torch.arange(length, device=pixels.device)
        inside.append((place >= 0) & (place < length))
        places.append(place.clamp(0, length - 1))
    images = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    shifted = pixels.permute(0, 2, 3, 1)[images, places[0].unsqueeze(2), places[1].unsqueeze(1)].permute(0, 3, 1, 2)
    return torch.where((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1), shifted, 0)


def _places(samples: Samples, rows: Tensor) -> Tensor:
    """Where the rows' images lie, mirrored or not; those that only fill up get some image."""
    return rows.clamp_min(0) % len(samples)


def _labels(samples: Samples, rows: Tensor) -> Tensor:
    return torch.where(rows < 0, IGNORED, samples.labels[_places(samples, rows)])


def _turned_labels(labels: Tensor, number: Tensor, turns: Turns) -> Tensor:
    return torch.where(labels < 0, IGNORED, turns.first + (number - 1) * turns.classes + labels)
