"""Batches: every new image once an epoch, as many replayed ones beside it; networks side by side."""

from __future__ import annotations

import pytest
import torch

from tpl.engine import IGNORED, Batches, Event, Feed, GatedSGD, Recipe, RotationClasses, Samples, no_callback, train
from tpl.engine.batches import StepInputs
from tpl.engine.train import cycle_length
from tpl.errors import TplError


def samples(n: int, offset: int) -> Samples:
    """Images that tell their label: every pixel is the label, modulo 256."""
    labels = torch.arange(n) + offset
    return Samples(labels.to(torch.uint8).view(n, 1, 1, 1).expand(n, 3, 2, 2).contiguous(), labels)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def float_of(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float()


def test_new_images_come_once_and_replay_keeps_the_ratio_one_to_one() -> None:
    feed = Feed([Batches(samples(10, 0), samples(3, 100), 4, generator())])
    assert feed.steps == 3 and feed.images == 20
    for _ in range(2):
        labels = torch.cat([feed.gather(inputs)[1][0] for inputs in feed.epoch()])
        new, old = labels[labels < 100], labels[labels >= 100]
        assert sorted(new.tolist()) == list(range(10))
        assert len(old) == 10
        counts = torch.bincount(old - 100, minlength=3)
        assert counts.max() - counts.min() <= 2  # an endless row of permutations, not a lottery


def test_half_of_the_images_are_flipped_and_every_one_still_comes_once() -> None:
    pixels = torch.arange(400 * 2, dtype=torch.int64).view(400, 1, 1, 2).expand(400, 3, 2, 2) % 251
    new = Samples(pixels[:300].to(torch.uint8), torch.arange(300))
    replay = Samples(pixels[300:].to(torch.uint8), torch.arange(300, 400))
    feed = Feed([Batches(new, replay, 32, generator(), flip=True)], full=True)
    flipped, seen = 0, list[int]()
    for inputs in feed.epoch():
        images, labels = feed.gather(inputs)
        for image, label in zip(images, labels[0].tolist(), strict=True):
            if label != IGNORED:
                plain = pixels[label].to(torch.uint8)
                assert torch.equal(image, plain) or torch.equal(image, plain.flip(-1))
                flipped += torch.equal(image, plain.flip(-1))
                seen.append(label)
    assert sorted(label for label in seen if label < 300) == list(range(300))
    assert 230 < flipped < 370 and len(seen) == 600


def test_a_crop_is_the_image_shifted_inside_a_black_margin() -> None:
    """Against torch's own padding, for every image of an epoch; all shifts happen, flipped or not."""
    pixels = torch.randint(1, 256, (300, 3, 16, 16), generator=generator(), dtype=torch.uint8)
    new, replay = Samples(pixels[:200], torch.arange(200)), Samples(pixels[200:], torch.arange(200, 300))
    feed = Feed([Batches(new, replay, 60, generator(), numbers=3, crop=True)])
    padded, moves = torch.nn.functional.pad(pixels, (2, 2, 2, 2)), list[tuple[int, int, bool]]()
    for inputs in feed.epoch():
        images, labels = feed.gather(inputs)
        for image, label in zip(images, labels[0].tolist(), strict=True):
            found = [
                (y, x, flipped)
                for flipped in (False, True)
                for y in range(5)
                for x in range(5)
                if torch.equal(image, (padded[label].flip(-1) if flipped else padded[label])[:, y : y + 16, x : x + 16])
            ]
            assert len(found) == 1
            moves += found
    assert len(moves) == 400 and len(set(moves)) == 50  # eight of each on average


def test_rotated_images_come_beside_their_upright_ones_with_labels_of_their_own() -> None:
    """Against torch's own rotation; the upright part is what it is without rotations, shifted and flipped."""
    pixels = torch.randint(1, 256, (50, 3, 8, 8), generator=generator(), dtype=torch.uint8)
    new, replay = Samples(pixels[:30], torch.arange(30) % 5), Samples(pixels[30:], torch.full((20,), 5))
    feed = Feed(
        [Batches(new, replay, 8, generator(), numbers=2, crop=True, rotations=RotationClasses(6, 5))], full=True
    )
    assert feed.images == 90
    turns, ignored = list[int](), 0
    for inputs in feed.epoch():
        images, labels = feed.gather(inputs)
        upright, again, own, told = images[:8], images[16:], labels[0, :8].tolist(), labels[0, 16:].tolist()
        assert labels.shape == (1, 24) and labels[0, 8:16].unique().tolist()[-1] == 5
        for image, copy, label, new in zip(upright, again, own, told, strict=True):
            if label == IGNORED:
                assert new == IGNORED
                ignored += 1
                continue
            quarters, class_ = divmod(new - 6, 5)
            assert class_ == label and torch.equal(copy, image.rot90(quarters + 1, dims=(-2, -1)))
            turns.append(quarters + 1)
    assert len(turns) == 30 and ignored == 2 and set(turns) == {1, 2, 3}


def test_the_objective_sees_none_of_the_numbers_that_move_images() -> None:
    seen = list[torch.Tensor]()

    class Listening(Quadratic):
        def losses(self, images: torch.Tensor, labels: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            seen.append(rest[1])
            return super().losses(images, labels, *rest)

    listening = Listening()
    batches = Batches(samples(5, 0), None, 2, generator(), numbers=3, crop=True)
    optimiser = GatedSGD([listening.weight], lr=0.1)
    train(listening, optimiser, [batches], Recipe(epochs=1, batch_size=2), float_of, [no_callback])
    assert [draws.shape for draws in seen] == [(1, 3)] * 3


def test_whole_batches_are_filled_up_with_samples_that_count() -> None:
    feed = Feed([Batches(samples(10, 0), samples(3, 100), 4, generator(), whole=True)], full=True)
    assert feed.steps == 3 and feed.images == 24
    labels = [feed.gather(inputs)[1][0] for inputs in feed.epoch()]
    assert [len(own) for own in labels] == [8, 8, 8]
    new = torch.cat([own[:4] for own in labels])
    assert sorted(new[:10].tolist()) == list(range(10)) and set(new[10:].tolist()) <= set(range(10))
    few = Feed([Batches(samples(3, 0), None, 64, generator(), whole=True)], full=True)
    assert [sorted(feed_labels(few, inputs)) for inputs in few.epoch()] == [[0, 1, 2]]


def feed_labels(feed: Feed, inputs: StepInputs) -> list[int]:
    return feed.gather(inputs)[1][0].tolist()


def test_empty_memory_is_no_replay() -> None:
    feed = Feed([Batches(samples(5, 0), samples(0, 0), 2, generator())])
    assert [feed.gather(inputs)[1].shape[1] for inputs in feed.epoch()] == [2, 2, 1]


def test_full_batches_are_filled_up_with_rows_that_do_not_count() -> None:
    batches = [Batches(samples(5, 0), samples(2, 100), 2, generator(s)) for s in (1, 2)]
    shapes, counted = set(), []
    for inputs in (feed := Feed(batches, full=True)).epoch():
        pixels, labels = feed.gather(inputs)
        shapes.add((tuple(pixels.shape), tuple(labels.shape)))
        counted += labels[labels != IGNORED].tolist()
    assert shapes == {((8, 3, 2, 2), (2, 4))}
    assert sorted(label for label in counted if label < 100) == sorted(2 * list(range(5)))
    assert len(counted) == 20


def test_networks_side_by_side_get_the_batches_they_would_get_alone() -> None:
    make = [
        lambda seed=seed: Batches(samples(7, 10 * seed), samples(3, 100 + seed), 3, generator(seed)) for seed in (1, 2)
    ]
    together = Feed([m() for m in make])
    steps = [together.gather(inputs) for inputs in together.epoch()]
    for i, m in enumerate(make):
        alone = Feed([m()])
        for (pixels, labels), inputs in zip(steps, alone.epoch(), strict=True):
            own_pixels, own_labels = alone.gather(inputs)
            assert torch.equal(labels[i], own_labels[0])
            assert torch.equal(pixels.chunk(2)[i], own_pixels)


class Elsewhere(Samples):
    """Samples that pretend to be too many for the device."""

    resident = False  # type: ignore[assignment]


def test_streamed_pixels_are_those_of_resident_ones() -> None:
    new, replay = samples(9, 0), samples(4, 100)
    feeds = [Feed([Batches(n, replay, 4, generator(3))], full=True) for n in (new, Elsewhere(new.pixels, new.labels))]
    assert feeds[1].streamed == [0]
    for _ in range(2):
        for resident, streamed in zip(*(feed.epoch() for feed in feeds), strict=True):
            assert len(streamed.pixels) == 1 and resident.pixels == ()
            for a, b in zip(feeds[0].gather(resident), feeds[1].gather(streamed), strict=True):
                assert torch.equal(a, b)


def test_unequal_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many"):
        Feed([Batches(samples(n, 0), None, 2, generator()) for n in (4, 5)])
    with pytest.raises(ValueError, match="replay"):
        Feed([Batches(samples(4, 0), replay, 2, generator()) for replay in (None, samples(2, 9))])
    with pytest.raises(ValueError, match="rotated"):
        Feed(
            [
                Batches(samples(4, 0), None, 2, generator(), rotations=rotations)
                for rotations in (None, RotationClasses(4, 4))
            ]
        )


class Diverging:
    def __init__(self) -> None:
        self.weight = torch.ones(1, requires_grad=True)

    def losses(
        self, images: torch.Tensor, labels: torch.Tensor, progress: torch.Tensor, draws: torch.Tensor
    ) -> torch.Tensor:
        return self.weight * torch.inf

    def after_backward(self, progress: torch.Tensor) -> None: ...

    def after_step(self) -> None: ...


def test_a_diverging_loss_is_a_clear_error() -> None:
    objective = Diverging()
    batches = Batches(samples(4, 0), None, 2, generator())
    with pytest.raises(TplError, match="learning rate"):
        train(objective, GatedSGD([objective.weight], 0.1), [batches], Recipe(epochs=2), float_of, [no_callback])


class Quadratic(Diverging):
    def losses(
        self, images: torch.Tensor, labels: torch.Tensor, progress: torch.Tensor, draws: torch.Tensor
    ) -> torch.Tensor:
        return (self.weight - images.mean()) ** 2


def test_the_end_of_training_tells_how_many_images_it_took() -> None:
    objective, heard = Quadratic(), list[Event]()
    batches = Batches(samples(5, 0), samples(3, 0), 2, generator())
    train(objective, GatedSGD([objective.weight], 0.01), [batches], Recipe(epochs=3), float_of, [heard.append])
    assert [event.kind for event in heard] == ["epoch"] * 3 + ["trained"]
    assert heard[-1].data["images"] == 30 and heard[-1].data["networks"] == 1


def test_a_cosine_schedule_equals_that_of_torch() -> None:
    recipe = Recipe(epochs=3, lr=0.1, schedule="cosine")
    objective, new = Quadratic(), samples(6, 0)
    train(
        objective,
        recipe.optimiser([objective.weight]),
        [Batches(new, None, 2, generator())],
        recipe,
        float_of,
        [no_callback],
    )
    weight = torch.ones(1, requires_grad=True)
    optimiser = torch.optim.SGD([weight], recipe.lr, recipe.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=9)
    feed = Feed([Batches(new, None, 2, generator())], full=False)
    for _ in range(3):
        for inputs in feed.epoch():
            optimiser.zero_grad()
            (weight - float_of(feed.gather(inputs)[0]).mean()).square().backward()
            optimiser.step()
            schedule.step()
    torch.testing.assert_close(objective.weight, weight)


@pytest.mark.parametrize(
    ("steps", "epochs", "cycle"), [(79, 40, 79), (8, 5, 8), (1, 20, 8), (3, 20, 9), (1, 2, 2), (5, 1, 5)]
)
def test_annealing_spans_an_epoch_and_never_fewer_steps_than_it_needs(steps: int, epochs: int, cycle: int) -> None:
    assert cycle_length(steps, epochs) == cycle
