"""What a model of many tasks costs: attempts copy only what they write to, answers run only what they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from handwriting import digits
from small_encoder import SMALL_VIT
from tpl import Learner, Task, store
from tpl.methods.plus import TPLPlus
from tpl.store import ModelStore, State

FAMILY = ("tpl", "tpl-plus", "hat", "supsup", "more", "row")
OPTIONS = {"epochs": 2, "latent": 8, "batch_size": 16, "memory": 12, "lr": 0.05}


def taught(method: str, tasks: int = 2, **options: object) -> Learner:
    learner = Learner(method, SMALL_VIT, device="cpu", **OPTIONS | options)
    for t in range(tasks):
        learner.learn(Task(f"task {t}", (f"{2 * t}", f"{2 * t + 1}"), digits([2 * t, 2 * t + 1], 10)))
    return learner


def copied(learner: Learner) -> State:
    state = learner.method.state()
    return State(*({k: v.clone() for k, v in part.items()} for part in (state.shared,)), [
        {k: v.clone() for k, v in own.items()} for own in state.tasks
    ])  # fmt: skip


def equal(a: State, b: State) -> bool:
    pairs = list(zip((a.shared, *a.tasks), (b.shared, *b.tasks), strict=True))
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


@pytest.mark.parametrize("method", FAMILY)
def test_a_task_that_fails_at_its_very_end_leaves_every_bit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught(method)
    before, probe = copied(learner), learner.prepare(digits([0, 3], 4, start=100))
    answers = learner.method.answer(probe).log_p

    def fails(held: object) -> None:
        type(learner.method).hold_out(learner.method, held)  # type: ignore[arg-type]
        raise RuntimeError("at the end")

    monkeypatch.setattr(learner.method, "hold_out", fails)
    with pytest.raises(RuntimeError, match="at the end"):
        learner.learn(Task("third", ("4", "5"), digits([4, 5], 10)))
    assert equal(before, copied(learner))
    assert torch.equal(learner.method.answer(probe).log_p, answers)


def test_an_attempt_copies_the_adapters_alone() -> None:
    learner = taught("tpl-plus")
    now, kept = learner.method.state(), learner.method.snapshot()
    own = [kept.tasks[0][k].data_ptr() == now.tasks[0][k].data_ptr() for k in now.tasks[0]]
    assert all(own)
    adapters = [k for k in now.shared if k.startswith("adapters.")]
    assert adapters
    assert not any(kept.shared[k].data_ptr() == now.shared[k].data_ptr() for k in adapters)
    assert isinstance(learner.method, TPLPlus)
    assert learner.method.expert is not None
    assert kept.shared["expert.gram"] is learner.method.expert.gram


@pytest.mark.parametrize("scale", [1.0, 0.0, -1.0])
def test_a_task_that_is_not_queried_has_probability_0_whatever_the_calibration(scale: float) -> None:
    learner = taught("tpl-plus", tasks=3, passes="1", expert_views="encoder")
    learner.method.calibration_ = torch.tensor([[scale] * 3, [0.0] * 3], dtype=torch.float64)  # type: ignore[attr-defined]
    found = learner.method.answer(learner.prepare(digits(range(6), 4, start=100)), {"unknown"})
    assert not found.log_p.isnan().any()
    assert torch.equal(found.passes, torch.ones(24, dtype=torch.long))
    rows = found.log_p.exp().unflatten(1, (3, 2)).sum(dim=2)
    assert torch.allclose(rows.amax(dim=1), torch.ones(24, dtype=torch.float64))


def test_sparse_answers_are_those_of_all_tasks_with_the_others_left_out() -> None:
    learner = taught("tpl-plus", tasks=3, passes="2", expert_views="encoder")
    pixels = learner.prepare(digits(range(6), 4, start=100))
    sparse, dense = learner.method.answer(pixels, {"unknown"}), learner.method
    whole = dense.decide([dense.forward(pixels, {"keep"})], {"unknown"})
    assert torch.allclose(sparse.log_p.exp(), whole.log_p.exp(), atol=1e-4)
    assert torch.allclose(sparse.unknown, whole.unknown, atol=1e-4)


def test_a_commit_reads_an_unchanged_task_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = taught("tpl", tasks=3)
    learner.save(tmp_path / "model")
    hashed = []
    real = store.sha256_of
    monkeypatch.setattr(store, "sha256_of", lambda file: hashed.append(Path(file).name) or real(file))
    learner.save(tmp_path / "model")
    header = ModelStore(tmp_path / "model").header()
    assert not [name for name in hashed if name.startswith("task-")]
    assert all(real(tmp_path / "model" / file) == checksum for file, checksum in header["files"].items())


@pytest.mark.parametrize("policy", ["herding", "k-centres", "border", "leverage"])
def test_the_bank_chooses_exemplars_by_features_of_the_newest_model(policy: str) -> None:
    learner, usual = taught("tpl", memory_policy=policy), taught("tpl")
    memory, other = learner.method.memory, usual.method.memory
    assert memory is not None and other is not None
    assert [len(images) for images in memory.exemplars] == [len(images) for images in other.exemplars] == [3] * 4
    assert memory.exemplars != other.exemplars
    learner.update(digits([0], 6, start=60), ["0"] * 6)
    assert len(memory) == 12
