"""Accuracies read off a table of probabilities made by hand."""

from __future__ import annotations

import pytest
import torch

from tpl.bench.evaluate import ReadTable

TASK_OF_CLASS = torch.tensor([0, 0, 1, 1, 1])
# Images of task 0. Classes 0 and 1 are its own, 2 to 4 are task 1's.
TABLE = torch.tensor(
    [
        [0.60, 0.10, 0.10, 0.10, 0.10],  # label 0: class right, task right (0.7)
        [0.30, 0.25, 0.40, 0.03, 0.02],  # label 0: class 2 wins, yet task 0 has the larger mass (0.55)
        [0.30, 0.10, 0.20, 0.20, 0.20],  # label 0: class right, yet task 1 has the larger mass (0.6)
        [0.45, 0.35, 0.10, 0.05, 0.05],  # label 1: wrong class of the right task
        [0.05, 0.10, 0.80, 0.03, 0.02],  # label 1: wrong task, the class right within task 0
    ],
    dtype=torch.float64,
)
LABELS = torch.tensor([0, 0, 0, 1, 1])


def test_class_task_and_within_task_accuracy() -> None:
    cil, til, tp = ReadTable.of(TABLE.log(), LABELS, TASK_OF_CLASS).accuracies()
    assert cil == pytest.approx(2 / 5)  # images 0 and 2
    assert til == pytest.approx(4 / 5)  # all but image 3
    assert tp == pytest.approx(3 / 5)  # images 0, 1 and 3: by mass, not by the best class


@pytest.mark.parametrize(
    ("row", "expected"), [(0, (1, 1, 1)), (1, (0, 1, 1)), (2, (1, 1, 0)), (3, (0, 0, 1)), (4, (0, 1, 0))]
)
def test_each_image_by_itself(row: int, expected: tuple[int, int, int]) -> None:
    assert ReadTable.of(TABLE[[row]].log(), LABELS[[row]], TASK_OF_CLASS).accuracies(0) == expected


def test_images_of_the_second_task() -> None:
    table = TABLE[[2, 4]].log()
    # Image 2 as class 3: classes 2, 3 and 4 are equal and none beats class 0; image 4 as class 2.
    cil, til, tp = ReadTable.of(table, torch.tensor([3, 2]), TASK_OF_CLASS).accuracies(1)
    assert (cil, tp) == (0.5, 1.0)
    assert til >= 0.5


def test_with_one_task_there_is_nothing_to_tell_apart() -> None:
    table = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).log_softmax(dim=1)
    cil, til, tp = ReadTable.of(table, torch.arange(40) % 3, torch.zeros(3, dtype=torch.long)).accuracies()
    assert cil == til
    assert tp == 1


def test_probabilities_of_zero_are_answers_too() -> None:
    table = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]).log()
    cil, _, tp = ReadTable.of(table, torch.tensor([1, 1]), TASK_OF_CLASS).accuracies()
    assert (cil, tp) == (0.5, 0.5)


def test_more_than_one_task_and_unequal_sizes_against_counting() -> None:
    g = torch.Generator().manual_seed(1)
    task_of_class = torch.tensor([0, 1, 1, 2, 2, 2, 2])
    table = torch.randn(200, 7, generator=g, dtype=torch.float64).log_softmax(dim=1)
    labels = torch.randint(1, 3, (200,), generator=g)
    hits = [0, 0, 0]
    for row, label in zip(table.exp().tolist(), labels.tolist(), strict=True):
        mass = [row[0], row[1] + row[2], sum(row[3:])]
        hits[0] += row.index(max(row)) == label
        hits[1] += (1 if row[1] > row[2] else 2) == label
        hits[2] += mass.index(max(mass)) == 1
    assert ReadTable.of(table, labels, task_of_class).accuracies(1) == pytest.approx([h / 200 for h in hits])


def test_confusion_and_classes_agree_with_the_accuracies() -> None:
    g = torch.Generator().manual_seed(2)
    owner = torch.tensor([0, 0, 1, 1, 1])
    table = torch.randn(120, 5, generator=g, dtype=torch.float64).log_softmax(dim=1)
    labels = torch.randint(0, 4, (120,), generator=g).sort().values  # class 4 has no images
    answers = ReadTable.of(table, labels, owner)
    counts, known = answers.task_confusion(), answers.class_accuracy()
    assert known[4] is None and [sum(row) for row in counts] == [int((owner[labels] == t).sum()) for t in (0, 1)]
    for task in (0, 1):
        mine = owner[labels] == task
        cil, _, tp = answers.accuracies(task)
        assert (cil, tp) == ReadTable.of(table[mine], labels[mine], owner).accuracies()[::2]
        assert tp == pytest.approx(counts[task][task] / sum(counts[task]))
        images = labels.bincount()
        hits = sum(known[c] * int(images[c]) for c in range(4) if owner[c] == task)  # type: ignore[operator]
        assert cil == pytest.approx(hits / int(mine.sum()))


def test_confusion_read_off_a_table() -> None:
    answers = ReadTable.of(TABLE.log(), LABELS, TASK_OF_CLASS)
    assert answers.task_confusion() == [[3, 2], [0, 0]]  # by mass, as TP
    assert answers.class_accuracy() == [pytest.approx(2 / 3), 0.0, None, None, None]
