"""Protections: supermasks over weights that nobody moves, and HAT as the same contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import Learner
from tpl.engine import Event
from tpl.methods.bank import protect
from tpl.methods.bank.protect import PROTECTIONS, HatMasks, ProtectConfig, SupSupMasks
from tpl.methods.tpl import TPL
from tpl.nets import Adapters, AdapterStack
from tpl.stream import Stream

OPTIONS = {"latent": 16, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 24, "protect": "supsup"}
NOW = torch.tensor(0.25)  # a point of an epoch
COUNT, DIM, LATENT = 3, 6, 5
MATRIX = DIM * LATENT


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_adapters(seed: int = 0) -> Adapters:
    adapters = Adapters(COUNT, DIM, LATENT, random(seed))
    with torch.no_grad():
        for bias in (adapters.down_bias, adapters.up_bias):
            bias.normal_(generator=random(seed))
    return adapters


def stacked(*adapters: Adapters) -> AdapterStack:
    return AdapterStack(*(torch.stack(parts) for parts in zip(*(a.weights for a in adapters), strict=True)))


def prepared(share: float) -> tuple[SupSupMasks, Adapters]:
    supsup, adapters = SupSupMasks(ProtectConfig(supermask=share)), some_adapters()
    supsup.prepare(adapters)
    return supsup, adapters


def opened(weights: AdapterStack, masked: AdapterStack) -> Tensor:
    """Weights in use of every adapter's two matrices, `[2, adapters]`; all others must be zero."""
    counts = []
    for name in ("down_weight", "up_weight"):
        before, after = getattr(weights, name), getattr(masked, name)
        assert torch.equal(after, torch.where(after == 0, 0, before))
        counts.append((after != 0).flatten(-2).sum(dim=-1))
    return torch.stack(counts)


# SupSupMasks, on its own


@pytest.mark.parametrize("share", [0.5, 0.2, 1.0, 1e-6])
def test_a_supermask_uses_the_share_of_every_matrix(share: float) -> None:
    supsup, adapters = prepared(share)
    masked = supsup.masked(adapters.weights, supsup.initial(adapters, random()), NOW)
    expected = max(round(share * MATRIX), 1)
    assert torch.equal(opened(adapters.weights, masked.weights), torch.full((2, COUNT), expected))
    assert int(masked.mask.sum()) == 2 * COUNT * expected


def test_the_best_scored_weights_are_used() -> None:
    supsup, adapters = prepared(0.2)
    own = supsup.initial(adapters, random())
    mask = supsup.masked(adapters.weights, own, NOW).mask.view(2 * COUNT, MATRIX) > 0
    for scores, used in zip(own.view(2 * COUNT, MATRIX), mask, strict=True):
        assert scores[used].min() > scores[~used].max()


def test_the_gradient_passes_straight_through_to_the_scores() -> None:
    """dL/ds = dL/dw_eff * w, for used and unused weights alike."""
    supsup, adapters = prepared(0.5)
    own = supsup.initial(adapters, random()).requires_grad_()
    slope = [torch.randn(w.shape, generator=random(1)) for w in adapters.weights]
    masked = supsup.masked(adapters.weights, own, NOW).weights
    torch.stack([(w * s).sum() for w, s in zip(masked, slope, strict=True)]).sum().backward()
    by_hand = [slope[0] * adapters.down_weight, slope[2] * adapters.up_weight]
    assert own.grad is not None
    torch.testing.assert_close(own.grad, torch.cat([part.flatten() for part in by_hand]).detach())
    assert bool((own.grad != 0).all())


def test_networks_side_by_side_have_masks_of_their_own() -> None:
    supsup = SupSupMasks(ProtectConfig(supermask=0.2))
    networks = [some_adapters(seed) for seed in (0, 1)]
    for adapters in networks:
        supsup.prepare(adapters)
    own = torch.stack([supsup.initial(adapters, random(seed)) for seed, adapters in enumerate(networks)])
    together = supsup.masked(stacked(*networks), own, NOW)
    for i, adapters in enumerate(networks):
        alone = supsup.masked(adapters.weights, own[i], NOW)
        assert torch.equal(together.mask[i], alone.mask)
        assert all(torch.equal(a[i], b) for a, b in zip(together.weights, alone.weights, strict=True))


def test_what_is_kept_are_packed_bits_that_give_the_trained_weights_back() -> None:
    supsup, adapters = prepared(0.2)
    own = supsup.initial(adapters, random())
    kept = supsup.kept(adapters.weights, own)
    assert 2 * COUNT * MATRIX % 8  # the last byte is not full
    assert kept.dtype == torch.uint8 and kept.shape == (-(-2 * COUNT * MATRIX // 8),)
    trained, finished = supsup.masked(adapters.weights, own, NOW).weights, supsup.finished(adapters.weights, kept)
    assert all(torch.equal(a, b) for a, b in zip(trained, finished, strict=True))


def test_prepared_weights_are_signed_constants() -> None:
    """Kaiming's deviation for the weights in use; the branch begins at a tenth of it, and signs stay by chance."""
    signs = some_adapters().down_weight.sign()
    _, adapters = prepared(0.5)
    torch.testing.assert_close(adapters.down_weight, signs * (2 / (0.5 * DIM)) ** 0.5)
    assert len(adapters.up_weight.abs().unique()) == 1
    torch.testing.assert_close(adapters.up_weight.abs().max(), torch.tensor(0.1 * (2 / (0.5 * LATENT)) ** 0.5))


def test_supermasks_hold_nothing_and_cost_nothing() -> None:
    supsup, adapters = prepared(0.5)
    masked = supsup.masked(adapters.weights, supsup.initial(adapters, random()).unsqueeze(0), NOW)
    used = torch.ones(adapters.units)
    assert supsup.unit_mask(supsup.kept(adapters.weights, supsup.initial(adapters, random()))) is None
    assert supsup.gates(adapters.weights, used) is None
    assert supsup.penalty(masked.mask, used).tolist() == [0.0]
    assert supsup.capacity(adapters, used) == {"units": 0.0, "frozen": 0.0}
    assert supsup.final and not supsup.trains_adapters


# SupSupMasks, under a method


def supsup_learner(**options: object) -> tuple[Learner, TPL]:
    learner = Learner("tpl", SMALL_VIT, device="cpu", **(OPTIONS | options))  # type: ignore[arg-type]
    assert isinstance(learner.method, TPL)
    return learner, learner.method


class Trained:
    """TPL on supermasks over three tasks, with what was seen on the way."""

    def __init__(self, stream: Stream) -> None:
        self.learner, self.method = supsup_learner(weight_decay=0.01, nesterov=True)
        self.bank = self.method.bank
        self.probe = torch.cat([self.learner.prepare(task.test)[:6] for task in stream if task.test is not None])
        self.first_weights = [w.detach().clone() for w in self.bank.adapters.weights]
        self.seen: list[list[tuple[Tensor, ...]]] = []  # by stage, every task's features and logits
        self.events: list[Event] = []
        for task in stream:
            self.learner.learn(task, held_out=0, callback=self.events.append)
            self.seen.append([tuple(self.bank.outputs(self.probe, t)) for t in range(len(self.bank.tasks))])


@pytest.fixture(scope="module")
def trained(small_stream: Stream) -> Trained:
    return Trained(small_stream)


def test_learning_leaves_the_random_adapters_as_they_were_made(trained: Trained) -> None:
    pairs = zip(trained.bank.adapters.weights, trained.first_weights, strict=True)
    assert all(torch.equal(now, before) for now, before in pairs)
    assert not bool(trained.bank.adapters.down_bias.any()) and not bool(trained.bank.adapters.up_bias.any())


def test_old_tasks_under_supermasks_drift_by_exactly_nothing(trained: Trained) -> None:
    """Bit for bit, with momentum, weight decay and Nesterov all on."""
    for stage in (1, 2):
        for old, new in zip(trained.seen[stage - 1], trained.seen[stage], strict=False):
            assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert not torch.equal(trained.seen[2][0][0], trained.seen[2][1][0])  # and tasks do differ


def test_trained_supermasks_use_half_of_every_matrix_and_differ(trained: Trained) -> None:
    weights = trained.bank.adapters.weights
    half = weights.down_weight[0].numel() // 2
    for t in range(3):
        assert set(opened(weights, trained.bank.weights(t)).flatten().tolist()) == {half}
    masks = [model.embedding for model in trained.bank.tasks]
    assert all(mask.dtype == torch.uint8 and mask.shape == (2 * weights.down_weight.numel() // 8,) for mask in masks)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_training_moves_a_supermask_and_keeps_its_share(small_stream: Stream) -> None:
    learner, method = supsup_learner(supermask=0.2)
    bank = method.bank
    untrained = bank.new_task(2, 2, method.generator("training")).embedding.detach()
    learner.learn(small_stream[0], held_out=0)
    share = opened(bank.adapters.weights, bank.weights(0))
    assert set(share.flatten().tolist()) == {round(0.2 * bank.adapters.down_weight[0].numel())}
    assert not torch.equal(bank.tasks[0].embedding, bank.protection.kept(bank.adapters.weights, untrained))


def test_saved_supermasks_give_identical_features(trained: Trained, tmp_path: Path) -> None:
    trained.learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu").method
    assert isinstance(again, TPL)
    assert differences(tensors_of(again), tensors_of(trained.learner.method)) == []
    for t, before in enumerate(trained.seen[2]):
        assert torch.equal(again.bank.tasks[t].embedding, trained.bank.tasks[t].embedding)
        assert all(torch.equal(a, b) for a, b in zip(again.bank.outputs(trained.probe, t), before, strict=True))


def test_a_bank_of_supermasks_is_never_full(trained: Trained) -> None:
    assert trained.bank.used is None
    capacities = [event.data for event in trained.events if event.kind == "capacity"]
    assert capacities == [{"units": 0.0, "frozen": 0.0}] * 3
    assert not any(event.kind == "warning" for event in trained.events)


# HAT behind the same contract


@pytest.mark.parametrize("mask_gradient", ["autograd", "analytic"])
def test_hats_mask_and_its_gradient_are_its_arithmetic(mask_gradient: str) -> None:
    config = ProtectConfig(mask_gradient=mask_gradient)
    protection, adapters = HatMasks(config), some_adapters()
    own = protection.initial(adapters, random()).unsqueeze(0).requires_grad_()
    assert own.shape == (1, adapters.units)
    scale = protect.scale_at(NOW, config.s_max)
    masked = protection.masked(stacked(adapters), own, NOW)
    torch.testing.assert_close(masked.mask, torch.sigmoid(scale * own))
    expected = adapters.weights.fold(masked.mask[0])
    assert all(torch.equal(a[0], b) for a, b in zip(masked.weights, expected, strict=True))
    slope = torch.randn(own.shape, generator=random(1))
    (masked.mask * slope).sum().backward()
    protection.after_backward(own, NOW)
    assert own.grad is not None
    if mask_gradient == "autograd":
        again = own.detach().clone().requires_grad_()
        (torch.sigmoid(scale * again) * slope).sum().backward()
        assert again.grad is not None
        closed = protect.compensate(again.grad, again.detach(), scale, config.s_max)
    else:
        closed = slope * config.s_max * torch.sigmoid(own) * torch.sigmoid(-own)
    torch.testing.assert_close(own.grad, closed.detach())


@pytest.mark.parametrize("masks", ["binary", "soft"])
def test_a_finished_hat_task_sees_and_claims_its_last_mask(masks: str) -> None:
    config = ProtectConfig(masks=masks)
    protection, adapters = HatMasks(config), some_adapters()
    kept = protection.kept(adapters.weights, protection.initial(adapters, random()))
    mask = protect.task_mask(kept, config.s_max, masks)
    assert torch.equal(protection.unit_mask(kept), mask)
    expected = adapters.weights.fold(mask)
    assert all(torch.equal(a, b) for a, b in zip(protection.finished(adapters.weights, kept), expected, strict=True))
    assert protection.final == (masks == "binary")
    found = protection.capacity(adapters, mask)
    assert found == {"units": protect.capacity_used(mask), "frozen": protect.frozen_share(adapters.weights.gates(mask))}
    assert 0 < found["frozen"] < found["units"] < 1
    assert protection.capacity(adapters, None) == {"units": 0.0, "frozen": 0.0}


def test_hats_penalty_and_gates_are_its_arithmetic() -> None:
    protection, adapters = HatMasks(ProtectConfig(sparsity=0.3)), some_adapters()
    mask = torch.rand(2, adapters.units, generator=random())
    used = (torch.rand(2, adapters.units, generator=random(1)) > 0.5).float()
    torch.testing.assert_close(protection.penalty(mask, None), 0.3 * mask.mean(dim=1))
    torch.testing.assert_close(protection.penalty(mask, used), 0.3 * protect.regulariser(mask, used))
    weights = stacked(adapters, some_adapters(1))
    found, expected = protection.gates(weights, used), weights.gates(used)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    own = torch.tensor([-9.0, 0.5, 9.0])
    protection.after_step(own)
    assert own.tolist() == [-protect.EMBEDDING_BOUND, 0.5, protect.EMBEDDING_BOUND]


def test_every_protection_is_known_by_its_name() -> None:
    assert [(name, p.name) for name, p in PROTECTIONS.items()] == [("hat", "hat"), ("supsup", "supsup")]
    assert ProtectConfig.__dataclass_fields__["protect"].metadata["choices"] == tuple(PROTECTIONS)
