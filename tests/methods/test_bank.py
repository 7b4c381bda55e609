"""The bank's promises: old tasks never change, full networks stay sane, answers add up."""

from __future__ import annotations

import pytest
import torch

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import Event
from tpl.errors import TplError
from tpl.methods.bank import protect
from tpl.methods.tpl import TPL
from tpl.stream import Stream

OPTIONS = {"encoder": SMALL_VIT, "latent": 16, "epochs": 2, "batch_size": 16, "lr": 0.05, "memory": 24}


def tpl_learner(**options: object) -> tuple[Learner, TPL]:
    learner = Learner("tpl", device="cpu", **(OPTIONS | options))  # type: ignore[arg-type]
    assert isinstance(learner.method, TPL)
    return learner, learner.method


def drift_of_old_tasks(stream: Stream, **options: object) -> list[float]:
    """Largest change of any old task's features or logits, after every later task."""
    learner, method = tpl_learner(**options)
    probe = torch.cat([learner.prepare(task.test) for task in stream if task.test is not None])
    before: list[tuple[torch.Tensor, ...]] = []
    drifts = []
    for task in stream:
        learner.learn(task)
        now = [method.bank.outputs(probe, t) for t in range(len(method.bank.tasks))]
        drifts += [
            float((a - b).abs().max())
            for old, new in zip(before, now, strict=False)
            for a, b in zip(old, new, strict=True)
        ]
        before = [tuple(o) for o in now]
    return drifts


def test_binary_masks_drift_by_exactly_nothing(small_stream: Stream) -> None:
    """Bit for bit, with momentum, weight decay and Nesterov all on."""
    drifts = drift_of_old_tasks(small_stream, encoder="compact", weight_decay=0.01, nesterov=True)
    assert len(drifts) == 6
    assert set(drifts) == {0.0}


def test_soft_masks_drift_a_little(small_stream: Stream) -> None:
    drifts = drift_of_old_tasks(small_stream, masks="soft")
    assert 0 < max(drifts) < 5


def test_protected_weights_keep_their_bits_and_free_ones_move(small_stream: Stream) -> None:
    learner, method = tpl_learner(weight_decay=0.1)
    learner.learn(small_stream[0])
    used = method.bank.used
    assert used is not None
    gates = method.bank.adapters.weights.gates(used)
    before = {k: v.clone() for k, v in method.bank.adapters.state_dict().items()}
    learner.learn(small_stream[1])
    for name, after in method.bank.adapters.state_dict().items():
        closed = getattr(gates, name).expand_as(after) == 0
        assert torch.equal(after[closed], before[name][closed]), name
        assert not torch.equal(after[~closed], before[name][~closed]), name


def test_first_task_alone_makes_task_prediction_trivial(small_stream: Stream) -> None:
    learner, method = tpl_learner()
    learner.learn(small_stream[0])
    pixels = learner.prepare(small_stream[0].train)
    within = method.bank.outputs(pixels, 0).logits.double().log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels), within)


@pytest.mark.parametrize("others", ["single", "per_class"])
def test_probabilities_add_up_under_every_reading(small_stream: Stream, others: str) -> None:
    learner, method = tpl_learner(others=others)
    for task in small_stream:
        learner.learn(task)
    outputs = 2 + (1 if others == "single" else 4)
    assert method.bank.tasks[2].head_bias.shape == (outputs,)
    for calibration in ("none", "score", "shift", "probability"):
        method.rescore(calibration=calibration)
        p = method.log_probabilities(learner.prepare(small_stream[0].train)).exp()
        torch.testing.assert_close(p.sum(dim=1), torch.ones(len(p), dtype=torch.float64))


def test_rescoring_changes_the_answer_and_back_again(small_stream: Stream) -> None:
    learner, method = tpl_learner()
    for task in small_stream:
        learner.learn(task)
    pixels = learner.prepare(small_stream[1].train)
    before = method.log_probabilities(pixels)
    for changes in ({"compose": "and"}, {"distance": "squared"}, {"k": 1}, {"logit_score": "ebo"}, {"in_task": "knn"}):
        kept = method.config
        method.rescore(**changes)
        assert not torch.equal(method.log_probabilities(pixels), before), changes
        method.rescore(**kept.to_dict())
        assert torch.equal(method.log_probabilities(pixels), before), changes


def test_a_full_network_warns_before_and_learns_on(small_stream: Stream) -> None:
    learner, method = tpl_learner()
    learner.learn(small_stream[0])
    method.bank.used = torch.ones_like(method.bank.used)  # type: ignore[arg-type]
    before = {k: v.clone() for k, v in method.bank.adapters.state_dict().items()}
    events: list[Event] = []
    learner.learn(small_stream[1], callback=events.append)
    assert any(e.kind == "warning" and "earlier tasks" in e.data["text"] for e in events)
    assert all(torch.equal(v, before[k]) for k, v in method.bank.adapters.state_dict().items())
    assert method.log_probabilities(learner.prepare(small_stream[1].train)).isfinite().all()


def test_capacity_is_reported_after_each_task(small_stream: Stream) -> None:
    learner, method = tpl_learner()
    shares = []
    for task in small_stream:
        events: list[Event] = []
        learner.learn(task, callback=events.append)
        shares += [e.data["units"] for e in events if e.kind == "capacity"]
    assert len(shares) == 3
    assert 0 < shares[0] <= shares[1] <= shares[2] <= 1
    assert method.bank.used is not None
    assert shares[2] == protect.capacity_used(method.bank.used)


def test_no_memory_at_all_still_works(small_stream: Stream) -> None:
    learner, method = tpl_learner(memory=0, calibration="score")
    for task in small_stream:
        learner.learn(task)
    assert len(method.memory) == 0
    assert method.log_probabilities(learner.prepare(small_stream[0].train)).isfinite().all()


def test_analytic_mask_gradient_trains(small_stream: Stream) -> None:
    learner, method = tpl_learner(mask_gradient="analytic")
    learner.learn(small_stream[0])
    assert method.log_probabilities(learner.prepare(small_stream[0].train)).isfinite().all()


def test_a_failed_task_leaves_the_learner_as_it_was(small_stream: Stream) -> None:
    learner, method = tpl_learner()
    learner.learn(small_stream[0])
    pixels = learner.prepare(small_stream[0].train)
    before = method.log_probabilities(pixels)

    def interrupt(event: Event) -> None:
        if event.kind == "epoch" and event.data["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(small_stream[1], callback=interrupt)
    assert learner.classes_ == list(small_stream[0].classes)
    assert torch.equal(method.log_probabilities(pixels), before)
    learner.learn(small_stream[1])
    uninterrupted, _ = tpl_learner()
    for task in small_stream[:2]:
        uninterrupted.learn(task)
    assert torch.equal(method.log_probabilities(pixels), uninterrupted.method.log_probabilities(pixels))


def test_what_training_fixed_cannot_be_rescored(small_stream: Stream) -> None:
    learner, method = tpl_learner()
    learner.learn(small_stream[0])
    with pytest.raises(TplError, match="masks cannot change"):
        method.rescore(masks="soft")
