"""The replay memory: quotas, nesting, what is returned about rows that stayed, and exact pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tpl.errors import TplError
from tpl.memory import FEATURE_POLICIES, POLICIES, Memory, StoredImages, border, herding, k_centres, leverage
from tpl.stream import ArrayImages, Preprocess

CONFIG: dict[str, Any] = {
    "input_size": (3, 8, 8),
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
}


@pytest.fixture(scope="module")
def preprocess() -> Preprocess:
    return Preprocess(CONFIG)


def numbered(classes: int, per_class: int, task: int = 0) -> ArrayImages:
    """2 x 2 pictures whose first pixel tells task, class and position; classes take turns."""
    pixels = np.zeros((classes * per_class, 2, 2, 3), dtype=np.uint8)
    for i in range(len(pixels)):
        pixels[i, 0, 0] = task, i % classes, i // classes
    return ArrayImages(pixels, np.arange(len(pixels)) % classes)


def tags(memory: Memory) -> list[tuple[int, ...]]:
    """(task, class, position) of every exemplar, in the memory's order."""
    return [StoredImages([png]).load(0).getpixel((0, 0)) for images in memory.exemplars for png in images]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("budget", "per_task", "expected"),
    [
        (2000, 10, [200, 100, 66, 50, 40, 33, 28, 25, 22, 20]),
        (200, 2, [100, 50, 33, 25, 20]),
        (2000, 40, [50, 25, 16, 12, 10]),
    ],
)
def test_quotas_of_the_papers_benchmarks(budget: int, per_task: int, expected: list[int]) -> None:
    for task, quota in enumerate(expected, start=1):
        assert Memory(budget).quotas(task * per_task) == [quota] * (task * per_task)


def test_quotas_hold_as_tasks_arrive(preprocess: Preprocess) -> None:
    memory = Memory(40)
    for task, quota in enumerate([20, 10, 6, 5, 4]):
        memory.add(numbered(2, 25, task), 2, preprocess)
        assert [len(images) for images in memory.exemplars] == [quota] * (2 * task + 2)
        assert len(memory) == quota * (2 * task + 2) <= 40
        assert memory.labels.tolist() == [c for c in range(2 * task + 2) for _ in range(quota)]


@pytest.mark.parametrize("budget", [0, 1, 3, 5, 7, 30])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_nested_within_budget_and_truthful_about_rows(budget: int, policy: str, preprocess: Preprocess) -> None:
    memory = Memory(budget, policy, seed=3)
    for task, classes in enumerate([2, 1, 3, 2]):
        before, old = [list(images) for images in memory.exemplars], tags(memory)
        kept = memory.add(numbered(classes, 9, task), classes, preprocess)
        assert kept.dtype == torch.long
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert tags(memory)[: len(kept)] == [old[i] for i in kept.tolist()]
        assert all(tag[0] == task for tag in tags(memory)[len(kept) :])
        for earlier, now in zip(before, memory.exemplars, strict=False):
            assert now == earlier[: len(now)]
        assert len(memory) <= budget
        counts = [len(images) for images in memory.exemplars]
        assert max(counts) - min(counts) <= (1 if budget < len(counts) else 0)
        # Every exemplar sits under its own class, and none is there twice.
        first = len(counts) - classes
        assert all(
            tag[1] == label - first for tag, label in zip(tags(memory), memory.labels, strict=True) if tag[0] == task
        )
        assert len(set(tags(memory))) == len(memory)


def test_fewer_places_than_classes_leave_one_for_the_earliest(preprocess: Preprocess) -> None:
    memory = Memory(3)
    memory.add(numbered(2, 5, 0), 2, preprocess)
    kept = memory.add(numbered(2, 5, 1), 2, preprocess)
    assert [len(images) for images in memory.exemplars] == [1, 1, 1, 0]
    assert kept.tolist() == [0, 1]


def test_a_class_with_few_images_keeps_them_all(preprocess: Preprocess) -> None:
    memory = Memory(20)
    memory.add(ArrayImages(np.zeros((7, 2, 2, 3), np.uint8), np.array([0, 0, 1, 1, 1, 1, 1])), 2, preprocess)
    kept = memory.add(numbered(3, 30, 1), 3, preprocess)
    assert [len(images) for images in memory.exemplars] == [2, 4, 4, 4, 4]
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]


def test_no_budget_keeps_nothing_but_the_count_of_classes(preprocess: Preprocess) -> None:
    memory = Memory(0)
    assert memory.add(numbered(2, 5), 2, preprocess).tolist() == []
    assert memory.add(numbered(2, 5), 2, preprocess).tolist() == []
    assert len(memory) == memory.bytes_used == len(memory.labels) == 0
    pixels = memory.pixels(preprocess)
    assert pixels.shape == (0, 3, 8, 8)
    assert pixels.dtype == torch.uint8
    again = Memory(0)
    again.load_state(memory.state())
    assert again.exemplars == [[], [], [], []]


def test_first_takes_the_first_and_random_a_seeded_choice(preprocess: Preprocess) -> None:
    def positions(policy: str, seed: int) -> list[list[int]]:
        memory = Memory(16, policy, seed)
        memory.add(numbered(2, 60), 2, preprocess)
        return [[StoredImages([png]).load(0).getpixel((0, 0))[2] for png in images] for images in memory.exemplars]  # type: ignore[index]

    assert positions("first", 0) == positions("first", 1) == [list(range(8))] * 2
    assert positions("random", 0) == positions("random", 0)
    assert positions("random", 0) != positions("random", 1)
    assert positions("random", 0)[0] != positions("random", 0)[1]  # classes are ranked one by one
    drawn = {p for seed in range(40) for p in positions("random", seed)[0]}
    assert len(drawn) > 50  # any of the 60 can be drawn: 8 of 60, forty times


def best_means(features: torch.Tensor, count: int) -> list[int]:
    """Herding by brute force: every image is tried, and the mean with it compared with the mean of all."""
    z = features.double().numpy()
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    chosen: list[int] = []
    while len(chosen) < count:
        gaps = [(np.linalg.norm(z.mean(0) - z[[*chosen, i]].mean(0)), i) for i in range(len(z)) if i not in chosen]
        chosen.append(min(gaps)[1])
    return chosen


def test_herding_equals_brute_force(preprocess: Preprocess) -> None:
    images, generator = numbered(2, 20), torch.Generator().manual_seed(0)
    features = torch.randn(40, 3, generator=generator) * torch.rand(40, 1, generator=generator)  # of any length
    assert herding(features, 40).tolist() == best_means(features, 40)
    memory = Memory(24, "herding")
    memory.add(images, 2, preprocess, features=features)
    expected = [best_means(features[c::2], 12) for c in range(2)]
    assert [[tag[2] for tag in tags(memory) if tag[1] == c] for c in range(2)] == expected
    memory.add(numbered(1, 3, 1), 1, preprocess, features=torch.eye(3))  # the best of the old ones stay
    assert [tag[2] for tag in tags(memory)][:16] == expected[0][:8] + expected[1][:8]
    with pytest.raises(TplError, match=r"herding.*ranks images by features; none were given"):
        memory.add(images, 2, preprocess)


def test_classes_of_different_tasks_are_ranked_apart(preprocess: Preprocess) -> None:
    memory = Memory(32)
    for task in range(2):
        memory.add(numbered(1, 60, task), 1, preprocess)
    first, second = ([tag[2] for tag in tags(memory) if tag[0] == task] for task in range(2))
    assert len(first) == len(second) == 16
    assert first != second


def test_bytes_are_those_of_the_png_images(preprocess: Preprocess) -> None:
    memory = Memory(6)
    memory.add(numbered(3, 5), 3, preprocess)
    flat = [png for images in memory.exemplars for png in images]
    assert all(png.startswith(b"\x89PNG\r\n") for png in flat)
    assert memory.bytes_used == sum(map(len, flat)) > 0


@pytest.mark.parametrize("size", [(2, 2), (8, 8), (9, 9), (32, 32), (40, 23), (11, 64)], ids=str)
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_pixels_are_those_of_the_original_images(size: tuple[int, int], mode: str) -> None:
    preprocess = Preprocess(CONFIG | {"crop_mode": mode})
    images = ArrayImages(
        np.random.default_rng(0).integers(0, 256, (6, *size, 3), dtype=np.uint8), np.array([1, 0, 1, 0, 0, 1])
    )
    memory = Memory(6, "first")
    memory.add(images, 2, preprocess)
    expected = torch.stack([preprocess(images.load(i)) for i in (1, 3, 4, 0, 2, 5)])
    assert torch.equal(memory.pixels(preprocess), expected)


def test_pixels_lie_where_they_were_last_asked_for(preprocess: Preprocess) -> None:
    memory, plain = Memory(6), Memory(6)
    for task in range(3):
        memory.add(numbered(2, 5, task), 2, preprocess, device=torch.device("cpu"))
        plain.add(numbered(2, 5, task), 2, preprocess)
        assert torch.equal(memory.pixels(preprocess, "cpu"), plain.pixels(preprocess))
    elsewhere = memory.pixels(preprocess, "meta")  # stands for a GPU: a device without values
    assert elsewhere.device.type == "meta" and memory.pixels(preprocess, "meta") is elsewhere
    memory.add(numbered(2, 5, 3), 2, preprocess, device="meta")
    assert memory.pixels(preprocess, "meta").shape == plain.pixels(preprocess).shape


def test_large_images_are_kept_small(preprocess: Preprocess) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    memory = Memory(2, "first")
    memory.add(ArrayImages(noise, np.array([0, 0])), 1, preprocess)
    assert memory.bytes_used < noise.nbytes / 10


def test_state_round_trip_through_a_file(tmp_path: Path, preprocess: Preprocess) -> None:
    memory = Memory(7)
    memory.add(numbered(2, 5, 0), 2, preprocess)
    memory.add(numbered(3, 1, 1), 3, preprocess)
    save_file(memory.state(), tmp_path / "memory.safetensors")
    again = Memory(7)
    again.load_state(load_file(tmp_path / "memory.safetensors"))
    assert again.exemplars == memory.exemplars
    assert torch.equal(again.labels, memory.labels)
    # It goes on as the original would.
    new = numbered(2, 5, 2)
    assert torch.equal(again.add(new, 2, preprocess), memory.add(new, 2, preprocess))
    assert again.exemplars == memory.exemplars


def test_state_of_a_memory_that_never_saw_a_task() -> None:
    memory = Memory(5)
    memory.load_state(Memory(5).state())
    assert memory.exemplars == []
    assert len(memory.labels) == 0


class Unreadable(ArrayImages):
    """Two images, the second of which has gone."""

    def load(self, index: int) -> Image.Image:
        if index == 1:
            raise TplError("cannot be read")
        return super().load(index)


def test_an_unreadable_image_leaves_the_memory_as_it_was(preprocess: Preprocess) -> None:
    memory = Memory(6)
    memory.add(numbered(2, 5), 2, preprocess)
    before = [list(images) for images in memory.exemplars]
    with pytest.raises(TplError, match="cannot be read"):
        memory.add(Unreadable(np.zeros((2, 2, 2, 3), np.uint8), np.array([0, 1])), 2, preprocess)
    assert memory.exemplars == before


def test_impossible_settings_are_explained() -> None:
    with pytest.raises(TplError, match=r"newest.*random, first, herding"):
        Memory(5, "newest")
    with pytest.raises(TplError, match=r"negative.*-1"):
        Memory(-1)


def filled(policy: str = "random", budget: int = 12) -> Memory:
    """Three classes of two tasks, 30 images each, 4 exemplars each."""
    memory, preprocess = Memory(budget, policy, seed=3), Preprocess(CONFIG)
    memory.add(numbered(2, 30, 0), 2, preprocess)
    memory.add(numbered(1, 30, 1), 1, preprocess)
    return memory


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_redrawn_exemplars_are_old_or_new_ones_and_rows_are_told(policy: str, preprocess: Preprocess) -> None:
    memory = filled(policy)
    before, old = tags(memory), [list(images) for images in memory.exemplars]
    origin = memory.redraw({1: numbered(1, 200, 9)}, {1: 30}, preprocess).tolist()
    now = tags(memory)
    assert [len(images) for images in memory.exemplars] == [4, 4, 4]
    assert memory.exemplars[0] == old[0] and memory.exemplars[2] == old[2]
    assert len(origin) == len(now)
    for tag, row in zip(now, origin, strict=True):
        assert (row < 0 and tag[0] == 9) or tag == before[row]
    assert len(set(now)) == len(now)
    fresh = sum(row < 0 for row in origin)
    assert fresh == 0 if policy == "first" else fresh > 0  # the first images stay the first


def test_redrawing_is_fair_to_the_images_that_are_gone(preprocess: Preprocess) -> None:
    """As many new exemplars as there are new images among all of the class, on average."""
    shares = []
    for seed in range(60):
        memory = Memory(10, seed=seed)
        memory.add(numbered(1, 90), 1, preprocess)
        origin = memory.redraw({0: numbered(1, 30, 9)}, {0: 90}, preprocess)
        shares.append(float((origin < 0).double().mean()))
    assert abs(np.mean(shares) - 0.25) < 0.06


def test_redrawing_fills_a_class_up_to_its_quota(preprocess: Preprocess) -> None:
    memory = Memory(20)
    memory.add(numbered(2, 3), 2, preprocess)
    origin = memory.redraw({0: numbered(1, 50, 9)}, {0: 3}, preprocess)
    assert [len(images) for images in memory.exemplars] == [10, 3]
    assert origin.tolist()[10:] == [3, 4, 5]
    assert memory.pixels(preprocess).shape[0] == 13


def test_a_removed_class_leaves_the_other_rows_in_order(preprocess: Preprocess) -> None:
    memory = filled()
    memory.pixels(preprocess)  # made ready before: must not outlive the removal
    before = tags(memory)
    gone = list(memory.exemplars[1])
    kept = memory.remove(1).tolist()
    assert kept == [0, 1, 2, 3, 8, 9, 10, 11]
    assert tags(memory) == [before[i] for i in kept]
    assert len(memory.pixels(preprocess)) == 8
    raw = memory.state()["bytes"].numpy().tobytes()
    assert not any(png in raw for png in gone)
    memory.add(numbered(1, 30, 2), 1, preprocess)
    assert [len(images) for images in memory.exemplars] == [4, 4, 4]


def test_an_unreadable_image_leaves_the_exemplars_as_they_were(preprocess: Preprocess) -> None:
    memory = filled()
    before = [list(images) for images in memory.exemplars]
    bad = Unreadable(np.zeros((2, 2, 2, 3), np.uint8), np.array([0, 0]))
    with pytest.raises(TplError, match="cannot be read"):
        memory.redraw({0: numbered(1, 200, 9), 1: bad}, {0: 30, 1: 0}, preprocess)
    assert memory.exemplars == before


def two_classes(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Features of 30 images of a class around the first axis, and of 30 of another around the second."""
    noise = torch.randn(60, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    centres = torch.eye(4, dtype=torch.float64)[torch.arange(2).repeat_interleave(30)]
    return (3 * centres + 0.5 * noise).split(30)


@pytest.mark.parametrize("policy", sorted(FEATURE_POLICIES))
def test_feature_policies_are_nested_and_do_not_depend_on_the_order_of_images(policy: str) -> None:
    own, rest = two_classes()
    rank = FEATURE_POLICIES[policy]
    whole = rank(own, 30, rest).tolist()
    assert sorted(whole) == list(range(30))
    assert rank(own, 7, rest).tolist() == whole[:7]
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(5))
    assert shuffled[torch.from_numpy(rank(own[shuffled], 7, rest))].tolist() == whole[:7]
    assert rank(own, 4, rest[:0]).tolist() == rank(own, 30, rest[:0]).tolist()[:4]  # a task of one class


def test_k_centres_cover_a_class_better_than_herding() -> None:
    own, _ = two_classes()
    unit = torch.nn.functional.normalize(own, dim=1)

    def radius(rows: Any) -> float:
        return float(torch.cdist(unit, unit[torch.from_numpy(rows)]).amin(dim=1).max())

    assert radius(k_centres(own, 6)) < radius(herding(own, 6))


def test_the_border_is_where_the_other_class_is() -> None:
    own, rest = two_classes()
    own[7] = torch.tensor([1.0, 0.95, 0.0, 0.0])  # between the two
    assert border(own, 1, rest).tolist() == [7]


def test_the_image_that_nothing_else_explains_has_the_largest_leverage() -> None:
    own, rest = two_classes()
    own[:, 3] = rest[:, 3] = 0.0
    own[11] = torch.tensor([1.0, 0.0, 0.0, 2.0])
    assert leverage(own, 1, rest).tolist() == [11]


@pytest.mark.parametrize("policy", sorted(FEATURE_POLICIES))
def test_an_update_of_a_memory_that_ranks_by_features_draws_at_random(policy: str, preprocess: Preprocess) -> None:
    memory = Memory(8, policy, seed=3)
    own, rest = two_classes()
    memory.add(numbered(2, 30, 0), 2, preprocess, features=torch.cat([own, rest]))
    before = tags(memory)
    origin = memory.redraw({1: numbered(1, 200, 9)}, {1: 30}, preprocess).tolist()
    assert all((row < 0 and tag[0] == 9) or tag == before[row] for tag, row in zip(tags(memory), origin, strict=True))
    assert any(row < 0 for row in origin)
