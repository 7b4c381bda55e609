"""Gaussians in the encoder's own space: sums that do not depend on when their samples came."""

from __future__ import annotations

import numpy as np
import torch

from tpl.methods.bank.imageless import EncoderSpace

DIM, OWNER, SIZES = 6, torch.tensor([0, 0, 1, 2, 2]), (2, 1, 2)


def samples(n: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % len(OWNER)
    centres = 3 * torch.randn(len(OWNER), DIM, generator=torch.Generator().manual_seed(9))
    return centres[y] + torch.randn(n, DIM, generator=generator), y


def task_by_task(z: torch.Tensor, y: torch.Tensor) -> EncoderSpace:
    space, first = EncoderSpace("none"), 0
    for t in OWNER.unique():
        own = int((t == OWNER).sum())
        rows = OWNER[y] == t
        space.learn(z[rows], y[rows] - first)
        first += own
    return space


def test_tasks_one_by_one_or_all_at_once_and_in_parts_are_the_same() -> None:
    z, y = samples()
    once = EncoderSpace("none").learn(z, y)
    later = task_by_task(z[:150], y[:150])
    later.merge(z[150:], y[150:])
    for space in (task_by_task(z, y), later):
        assert space.pooled_ == once.pooled_ and torch.equal(space.counts_, once.counts_)
        torch.testing.assert_close(space.means_, once.means_, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(space.scatter_, once.scatter_, rtol=1e-4, atol=1e-3)


def test_contrast_is_the_difference_of_nearest_distances() -> None:
    z, y = samples()
    space = task_by_task(z, y)
    asked, _ = samples(20, seed=1)
    inverse = np.linalg.inv(np.mean([np.outer(d, d) for d in (z.double() - space.means_[y]).numpy()], axis=0))
    found = space.contrast(asked, SIZES).numpy()
    for row, x in enumerate(asked.double().numpy()):
        squares = np.array([(x - m) @ inverse @ (x - m) for m in space.means_.numpy()])
        for t in range(3):
            mine = (t == OWNER).numpy()
            np.testing.assert_allclose(found[row, t], (squares[~mine].min() - squares[mine].min()) / DIM, rtol=1e-3)
    assert (task_by_task(z, y).contrast(z, SIZES).argmax(dim=1) == OWNER[y]).double().mean() > 0.95
    assert not space.contrast(asked, [5]).any()  # nobody to compare with


def test_storage_is_float32_and_loses_no_bit() -> None:
    z, y = samples(12)
    space = task_by_task(z, y).forget(1)
    state = space.state()
    assert {t.dtype for t in state.values()} == {torch.float32} and len(state["means_"]) == 4
    again = EncoderSpace("none").load_state(state)
    assert torch.equal(again.distances(z), space.distances(z))
    assert not EncoderSpace("none").load_state({}).known
