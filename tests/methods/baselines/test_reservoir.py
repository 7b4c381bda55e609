"""The reservoir: a uniform sample of the stream, images and what travels with them in step."""

from __future__ import annotations

import numpy as np
import torch

from tpl.methods.parts.rehearsal import Reservoir
from tpl.nets.compact import DATA_CONFIG
from tpl.stream import ArrayImages, Preprocess

PREPROCESS = Preprocess(DATA_CONFIG)


def plain_images(colours: list[int], labels: list[int]) -> ArrayImages:
    """One colour each, so that an image is known again."""
    pixels = np.stack([np.full((32, 32, 3), colour, dtype=np.uint8) for colour in colours])
    return ArrayImages(pixels, np.array(labels))


def test_every_image_of_the_stream_is_kept_with_the_same_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes, budget, runs = (5, 3, 8), 4, 800
    counts = torch.zeros(sum(sizes))
    for _ in range(runs):
        memory = Reservoir(budget)
        here = torch.zeros(0, dtype=torch.long)  # which image of the stream each row is
        for number, size in enumerate(sizes):
            admission = memory.admit(torch.zeros(size, dtype=torch.long), generator)
            memory.keys = admission.keys
            here = torch.cat([here[admission.kept], sum(sizes[:number]) + admission.entering])
        assert len(here.unique()) == budget
        counts[here] += 1
    share = budget / sum(sizes)
    spread = (share * (1 - share) / runs) ** 0.5
    assert float((counts / runs - share).abs().max()) < 4.5 * spread


def test_images_labels_and_carried_rows_stay_together() -> None:
    memory = Reservoir(6)
    carried = torch.zeros(0, dtype=torch.long)  # the colour of every row, as a method would carry logits
    owner: dict[int, int] = {}
    generator = torch.Generator().manual_seed(3)
    for task in range(3):
        colours, labels = [10 + 40 * task + 5 * i for i in range(7)], [1, 0, 2, 1, 0, 2, 0]
        owner |= {colour: 3 * task + label for colour, label in zip(colours, labels, strict=True)}
        admission = memory.admit(torch.tensor(labels), generator)
        memory.take(admission, plain_images(colours, labels), 3, PREPROCESS)
        carried = torch.cat([carried[admission.kept], torch.tensor(colours)[admission.entering]])
        assert len(memory) == len(memory.keys) == 6
        assert torch.equal(memory.pixels(PREPROCESS)[:, 0, 0, 0].long(), carried)
        assert [owner[colour] for colour in carried.tolist()] == memory.labels.tolist()
    assert len({c // 3 for c in memory.labels.tolist()}) > 1  # not the last task's images alone
    again = Reservoir(6)
    again.load_state(memory.state())
    assert again.exemplars == memory.exemplars
    gone = int(memory.labels[0])
    stayed = memory.remove(gone)
    assert torch.equal(memory.pixels(PREPROCESS)[:, 0, 0, 0].long(), carried[stayed])
    assert len(memory.keys) == len(memory)


def test_a_smaller_budget_keeps_a_part_of_what_a_larger_one_does() -> None:
    labels = torch.zeros(20, dtype=torch.long)
    kept = [set(Reservoir(b).admit(labels, torch.Generator().manual_seed(1)).entering.tolist()) for b in (0, 3, 9, 30)]
    assert [len(rows) for rows in kept] == [0, 3, 9, 20]
    assert kept[1] < kept[2] < kept[3]
