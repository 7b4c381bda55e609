"""Batches of new and replayed images, for one network or for several that are trained side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the label of a row that pads a batch: the default of torch's cross-entropy
ROTATIONS = (1, 2, 3)  # numbers of 90-degree rotations that are extra classes
MARGIN = 8  # a crop is shifted by up to this part of the side: 4 pixels of 32

# A row code is one integer for a row of a batch: `i` is sample i of n, `n + i` is sample i flipped horizontally, and
# NO_SAMPLE is padding. So an epoch is sent to the device in one copy.
NO_SAMPLE = -1


def row_codes(numbers: Tensor, flipped: Tensor, count: int) -> Tensor:
    """Row codes of these samples out of `count`, flipped where `flipped` is 1."""
    return numbers + count * flipped


def sample_numbers(codes: Tensor, count: int) -> Tensor:
    """Number of the sample in each row; rows without a sample get the first."""
    return codes.clamp_min(0) % count


def is_flipped(codes: Tensor, count: int) -> Tensor:
    """Whether each row shows its sample flipped."""
    return codes >= count


class StepInputs(NamedTuple):
    """Everything that differs from one training step to the next, as tensors on the device."""

    new: Tensor  # row codes of new samples, [networks, n]
    replayed: Tensor  # row codes of replayed samples, [networks, n], or [networks, 0] without replay
    draws: Tensor  # random numbers in [0, 1), [networks, m]
    pixels: tuple[Tensor, ...] = ()  # images of the new rows, for each network whose images are not on the device

    def clone(self) -> StepInputs:
        """A copy of all tensors."""
        pixels = tuple(t.clone() for t in self.pixels)
        return StepInputs(self.new.clone(), self.replayed.clone(), self.draws.clone(), pixels)

    def copy_(self, other: StepInputs) -> None:
        """Copy another step's values, in place."""
        for own, value in zip((*self[:3], *self.pixels), (*other[:3], *other.pixels), strict=True):
            own.copy_(value)


class Draws(NamedTuple):
    """A step's random numbers by their use."""

    objective: Tensor
    shifts: Tensor  # of crops: two for each new and replayed image
    rotations: Tensor  # one for each new image


@dataclass(frozen=True)
class Samples:
    """Images as uint8 pixels `[n, 3, size, size]`, or vectors as floats `[n, features]`, and their labels.

    Labels are on the device. Pixels are too, unless there are too many: then they stay in the computer's memory and
    are sent batch by batch. Instead of pixels there may be tokens `[n, tokens, dim]` that a frozen network has computed
    from them; for training with flipped images, `[2n, tokens, dim]`, those of flipped ones last.
    """

    pixels: Tensor
    labels: Tensor
    with_flipped: bool = False  # whether `pixels` has a second half: every sample flipped horizontally

    def rows(self, codes: Tensor) -> Tensor:
        """Rows of `pixels` for row codes; rows without a sample get the first."""
        return codes.clamp_min(0) if self.with_flipped else sample_numbers(codes, len(self))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def resident(self) -> bool:
        """Whether the pixels are on the device already."""
        return self.pixels.device == self.labels.device


class RotationClasses(NamedTuple):
    """Outputs for rotated images, from output `first` on: `classes` of them for each of three rotations."""

    first: int
    classes: int

    @property
    def outputs(self) -> int:
        """Number of these outputs."""
        return len(ROTATIONS) * self.classes


class Batches:
    """Shuffled batches of new samples, each joined by as many replayed ones.

    Replayed samples come from an endless sequence of permutations, so the ratio is 1:1 whatever the sizes. With `flip`,
    every image is flipped horizontally half of the time; with `crop`, it is also shifted by a few pixels each way and
    padded with black. `whole` fills an epoch's last batch up with random samples of the epoch, for networks with batch
    norms. With `rotations`, every new sample is added once more, rotated by a random 90, 180 or 270 degrees, with
    another label. A step has `numbers` random numbers in [0, 1) for the objective.
    """

    def __init__(
        self,
        new: Samples,
        replay: Samples | None,
        batch_size: int,
        generator: torch.Generator,
        flip: bool = False,
        numbers: int = 0,
        crop: bool = False,
        whole: bool = False,
        rotations: RotationClasses | None = None,
    ) -> None:
        self.new, self.replay = new, replay if replay is not None and len(replay) else None
        self.batch_size, self.generator, self.flip, self.numbers = batch_size, generator, flip or crop, numbers
        self.crop, self.whole, self.rotations = crop, whole, rotations
        if whole:
            self.batch_size = min(batch_size, len(new))
        self._replay_order = torch.zeros(0, dtype=torch.long)

    @property
    def steps(self) -> int:
        """Steps an epoch."""
        return math.ceil(len(self.new) / self.batch_size)

    @property
    def images(self) -> int:
        """Images an epoch, replayed and rotated ones included."""
        new = self.steps * self.batch_size if self.whole else len(self.new)
        return new * (1 + (self.replay is not None) + (self.rotations is not None))

    def epoch(self) -> tuple[Tensor, Tensor]:
        """Row codes of one epoch: the new samples in random order, and a sample to replay beside each of them."""
        order = torch.randperm(len(self.new), generator=self.generator)
        if self.whole and (missing := -len(order) % self.batch_size):
            order = torch.cat([order, torch.randperm(len(self.new), generator=self.generator)[:missing]])
        old = self._next_replay(len(order)) if self.replay is not None else order[:0]
        if self.flip:
            order, old = self._half_flipped(order, len(self.new)), self._half_flipped(old, len(self.replay or ()))
        return order, old

    def draws(self) -> Tensor:
        """The random numbers of one epoch, one row per step; `split_draws` divides them by use."""
        return torch.rand(self.steps, sum(self._draw_sizes()), generator=self.generator)

    def split_draws(self, draws: Tensor) -> Draws:
        """Random numbers `[..., m]` of steps by their use."""
        return Draws(*draws.split(self._draw_sizes(), dim=-1))

    def _draw_sizes(self) -> list[int]:
        shifts = 2 * self.batch_size * (2 if self.replay is not None else 1) if self.crop else 0
        return [self.numbers, shifts, self.batch_size if self.rotations is not None else 0]

    def _half_flipped(self, rows: Tensor, count: int) -> Tensor:
        return row_codes(rows, torch.randint(0, 2, rows.shape, generator=self.generator), count)

    def _next_replay(self, count: int) -> Tensor:
        assert self.replay is not None
        while len(self._replay_order) < count:
            fresh = torch.randperm(len(self.replay), generator=self.generator)
            self._replay_order = torch.cat([self._replay_order, fresh])
        rows, self._replay_order = self._replay_order[:count], self._replay_order[count:]
        return rows


class Feed:
    """The batches of several networks, in step with each other.

    `full` fills an epoch's last batch up with ignored rows, so that every step has the same shapes, as a CUDA graph
    needs.
    """

    def __init__(self, networks: Sequence[Batches], full: bool = False) -> None:
        first = networks[0]
        if any(len(b.new) != len(first.new) or b.batch_size != first.batch_size for b in networks):
            raise ValueError("networks trained side by side need equally many samples and the same batch size")
        if len({b.replay is None for b in networks}) > 1:
            raise ValueError("networks trained side by side must all have replay, or none of them")
        if len({b.rotations for b in networks}) > 1:
            raise ValueError("networks trained side by side must all have the same outputs for rotated images")
        self.networks, self.full = networks, full
        self.steps, self.batch_size, self.numbers = first.steps, first.batch_size, first.numbers
        self.device = first.new.labels.device
        self.streamed = [i for i, b in enumerate(networks) if not b.new.resident]

    @property
    def images(self) -> int:
        """Images an epoch, all networks and replayed ones included."""
        return sum(b.images for b in self.networks)

    def epoch(self) -> Iterator[StepInputs]:
        """The inputs of every step of one epoch, on the device."""
        pairs = [b.epoch() for b in self.networks]
        rows, old = (self._cut(torch.stack(column)) for column in zip(*pairs, strict=True))
        draws = torch.stack([b.draws() for b in self.networks]).to(self.device).unbind(1)
        on_device = zip(*(self._sent(part) for part in (rows, old)), draws, strict=True)
        if not self.streamed:
            for codes in on_device:
                yield StepInputs(*codes)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="send") as pool:  # one batch ahead of the device
            coming = pool.submit(self._send_pixels, rows[0])
            for step, (new, replayed, numbers) in enumerate(on_device):
                pixels = coming.result()
                if step + 1 < len(rows):
                    coming = pool.submit(self._send_pixels, rows[step + 1])
                yield StepInputs(new, replayed, numbers, pixels)

    def gather(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Pixels `[networks * batch, 3, size, size]`, or tokens, and labels `[networks, batch]` of one step.

        A network's batch is its new samples, then the replayed ones, then the new ones rotated.
        """
        sent = dict(zip(self.streamed, inputs.pixels, strict=True))
        new = inputs.new.shape[1]
        upright = new + inputs.replayed.shape[1]
        count = upright + (new if self.networks[0].rotations is not None else 0)
        like = self.networks[0].new.pixels
        pixels = torch.empty((len(inputs.new), count, *like.shape[1:]), dtype=like.dtype, device=self.device)
        labels = []
        for i, network in enumerate(self.networks):
            images = pixels[i, :upright]
            own, codes = images[:new], inputs.new[i]
            if i in sent:
                own.copy_(sent[i])
            else:
                torch.index_select(network.new.pixels, 0, network.new.rows(codes), out=own)
            parts, flipped = [_labels(network.new, codes)], [is_flipped(codes, len(network.new))]
            if (replay := network.replay) is not None:
                codes = inputs.replayed[i]
                torch.index_select(replay.pixels, 0, replay.rows(codes), out=images[new:])
                parts.append(_labels(replay, codes))
                flipped.append(is_flipped(codes, len(replay)))
            if network.flip and not network.new.with_flipped:
                images.copy_(torch.where(torch.cat(flipped)[:, None, None, None], images.flip(-1), images))
            draws = network.split_draws(inputs.draws[i])
            if network.crop:
                images.copy_(shifted(images, draws.shifts.view(2, -1)[:, :upright]))
            if network.rotations is not None:
                number = 1 + (len(ROTATIONS) * draws.rotations[:new]).long()
                pixels[i, upright:] = rotated(own, number)
                parts.append(_rotated_labels(parts[0], number, network.rotations))
            labels.append(torch.cat(parts))
        return pixels.flatten(0, 1), torch.stack(labels)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Row codes `[networks, n]` of an epoch as one part per step."""
        if not rows.shape[1]:
            return [rows] * self.steps
        if self.full and (missing := self.steps * self.batch_size - rows.shape[1]):
            rows = torch.cat([rows, rows.new_full((len(rows), missing), NO_SAMPLE)], dim=1)
        return list(rows.split(self.batch_size, dim=1))

    def _sent(self, parts: list[Tensor]) -> list[Tensor]:
        """All parts on the device, by one copy."""
        sizes = [part.shape[1] for part in parts]
        return list(torch.cat(parts, dim=1).to(self.device).split(sizes, dim=1))

    def _send_pixels(self, rows: Tensor) -> tuple[Tensor, ...]:
        new = [(self.networks[i].new, rows[i]) for i in self.streamed]
        batches = [samples.pixels[samples.rows(codes)] for samples, codes in new]
        if self.device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]  # only then is the copy asynchronous
        return tuple(batch.to(self.device, non_blocking=True) for batch in batches)


def rotated(pixels: Tensor, number: Tensor) -> Tensor:
    """Each image `[n, 3, size, size]` rotated by `number` times 90 degrees, one to three."""
    choices = torch.stack([pixels.rot90(quarters, dims=(-2, -1)) for quarters in ROTATIONS])
    return choices[number - 1, torch.arange(len(pixels), device=pixels.device)]


def shifted(pixels: Tensor, draws: Tensor) -> Tensor:
    """Random crops of images `[n, 3, h, w]` with a black margin: shifts by up to an eighth of the size each way.

    `draws` are two numbers in [0, 1) an image, `[2, n]`: down, and to the right.
    """
    places, inside = [], []
    for draw, length in zip(draws, pixels.shape[-2:], strict=True):
        margin = length // MARGIN
        first = (draw * (2 * margin + 1)).long() - margin
        place = first.unsqueeze(1) + torch.arange(length, device=pixels.device)
        inside.append((place >= 0) & (place < length))
        places.append(place.clamp(0, length - 1))
    images = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    crops = pixels.permute(0, 2, 3, 1)[images, places[0].unsqueeze(2), places[1].unsqueeze(1)].permute(0, 3, 1, 2)
    return torch.where((inside[0].unsqueeze(2) & inside[1].unsqueeze(1)).unsqueeze(1), crops, 0)


def _labels(samples: Samples, codes: Tensor) -> Tensor:
    return torch.where(codes < 0, IGNORED, samples.labels[sample_numbers(codes, len(samples))])


def _rotated_labels(labels: Tensor, number: Tensor, rotations: RotationClasses) -> Tensor:
    return torch.where(labels < 0, IGNORED, rotations.first + (number - 1) * rotations.classes + labels)


def masked_mean(values: Tensor, rows: Tensor) -> Tensor:
    """The mean of the values `[n]` where `rows` is true, 0 if it is nowhere; other values may be anything."""
    return values.masked_fill(~rows, 0.0).sum() / rows.sum().clamp_min(1)
