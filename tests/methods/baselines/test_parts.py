"""What the rehearsing methods are made of: teachers, distillation, balanced sets, parts of a network trained alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rehearsing import LABELS, Says, kl, loss_of, softmax, some_logits, tiny_learner, tiny_task

from tpl.engine import IGNORED, Feed, Samples, masked_mean, no_callback
from tpl.methods.parts.distill import Distillation, class_slices, kd, soft_cross_entropy
from tpl.methods.parts.network import NetworkMethod
from tpl.methods.parts.rehearsal import RehearsalConfig, balanced


def test_distillation_of_three_classes_by_hand() -> None:
    student, teacher = torch.tensor([[1.0, 0.0, -2.0]]), torch.tensor([[3.0, -1.0, 0.0]])
    p, q = softmax(teacher[0].numpy() / 2), softmax(student[0].numpy() / 2)
    assert kd(student, teacher, 2.0).item() == pytest.approx(kl(p, q), abs=1e-6)
    assert soft_cross_entropy(student, teacher, 2.0).item() == pytest.approx(-(p * np.log(q)).sum(), abs=1e-6)
    assert kd(teacher, teacher, 2.0).item() == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(("replay_batches", "steps", "counts"), [("union", 4, [3] + 11 * [1]), ("balanced", 3, None)])
def test_remembered_images_are_shuffled_among_the_new_or_come_on_top(
    replay_batches: str, steps: int, counts: list[int] | None
) -> None:
    """Three remembered images of class 0 and eleven new classes with an image each, four a step."""
    config = RehearsalConfig(replay_batches=replay_batches, batch_size=4)
    new, old = Samples(torch.zeros(11, 1), torch.arange(1, 12)), Samples(torch.ones(3, 1), torch.zeros(3).long())
    feed = Feed([config.batches(new, old, torch.Generator().manual_seed(0))])
    batches = [feed.gather(inputs) for inputs in feed.epoch()]
    assert feed.steps == len(batches) == steps
    labels = torch.cat([labels[0] for _, labels in batches])
    if counts is not None:
        assert labels.bincount().tolist() == counts  # every image once
        places = (labels == 0).nonzero().flatten().tolist()
        assert places != [11, 12, 13]  # not at the end, where they were before the shuffle
    else:
        assert [int((own == 0).sum()) for _, (own,) in batches] == [4, 4, 3]  # half of every step
    shown = torch.cat([pixels for pixels, _ in batches])
    assert torch.equal(shown.flatten() == 1, labels == 0)  # every image with its own label
    assert config.times_shown(new, old, 12).tolist() == labels.bincount().tolist()


def test_rows_that_only_fill_up_do_not_count() -> None:
    counted = torch.tensor([0, -100, 3]) != IGNORED
    assert masked_mean(torch.tensor([1.0, torch.nan, 4.0]), counted).item() == 2.5
    assert masked_mean(torch.tensor([1.0]), torch.tensor([False])).item() == 0


def test_the_objective_is_cross_entropy_and_weighted_distillation_of_every_group() -> None:
    """Two old tasks of 1 and 3 classes, one of which is asked of another teacher; the fifth class is new."""
    logits, (a, b) = some_logits(), class_slices([1, 3])
    first, second = Says(5, 0.5), Says(4, -1.0)
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5])
    objective = Distillation(Says(5), [(first, [a]), (second, [b])], 2.0, weights)  # type: ignore[arg-type,list-item]
    total = 0.0
    for row, label in zip(logits.double().numpy(), LABELS.tolist(), strict=True):
        if label >= 0:
            total -= weights[label].item() * np.log(softmax(row)[label])
            total += 2**2 * 1 / 4 * kl(softmax(0.5 * row[:1] / 2), softmax(row[:1] / 2))
            total += 2**2 * 3 / 4 * kl(softmax(-row[1:4] / 2), softmax(row[1:4] / 2))
    assert loss_of(objective, logits, LABELS) == pytest.approx(total / 4, rel=1e-5)


def test_a_balanced_set_has_as_many_of_every_class() -> None:
    new = Samples(torch.arange(40).view(40, 1, 1, 1).to(torch.uint8), torch.tensor([2, 3] * 19 + [4, 4]))
    old = Samples(torch.arange(100, 106).view(6, 1, 1, 1).to(torch.uint8), torch.tensor([0, 0, 0, 1, 1, 1]))
    found = balanced(new, old, torch.Generator().manual_seed(0))
    assert found.labels.bincount().tolist() == [3, 3, 3, 3, 2]  # the last class has no more
    rows = found.pixels.flatten().tolist()
    assert len(set(rows)) == len(rows)
    truth = {**dict(enumerate(new.labels.tolist())), **dict(zip(range(100, 106), old.labels.tolist(), strict=True))}
    assert [truth[row] for row in rows] == found.labels.tolist()
    again = balanced(new, old, torch.Generator().manual_seed(1))
    assert again.pixels.flatten().tolist() != rows


def test_a_teacher_stays_as_it_was_and_only_what_shall_move_moves() -> None:
    method = tiny_learner("replay").method
    assert isinstance(method, NetworkMethod)
    network = method.network
    network.grow(2, torch.Generator().manual_seed(0))
    teacher = network.copy()
    assert teacher.trunk[0] is network.trunk[0]
    assert not any(p.requires_grad for p in teacher.parameters())
    before = {k: v.clone() for k, v in network.state_dict().items()}
    samples = method.samples(tiny_task(0, per_class=4), no_callback)
    method.fit(samples, no_callback, trainable=[network.head_weight, network.head_bias])
    changed = {k for k, v in network.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"head_weight", "head_bias"}
    assert all(p.requires_grad for p in network.parameters())
    method.fit(samples, no_callback)
    assert all(not torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())
