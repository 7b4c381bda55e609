"""Two models in one: every task's features stay bit for bit, and the expert is the one that has learned both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands import call
from handwriting import digits
from small_encoder import SMALL_VIT
from tpl import Learner, Task, TplError
from tpl.export.graph import AnswerGraph
from tpl.methods.bank import Query
from tpl.methods.bank.bank import RowInference
from tpl.methods.plus import TPLPlus
from tpl.methods.tpl import TPL
from tpl.nets import ViTEncoder

OPTIONS: dict[str, Any] = {"epochs": 2, "latent": 8, "batch_size": 16, "memory": 200, "lr": 0.05}
PLUS = OPTIONS | {"random_features": 128}
TASKS = {"a": [(0, 1), (2, 3)], "b": [(4, 5), (6,)]}
PROBE = digits(range(7), 6, start=120)


def task(numbers: tuple[int, ...]) -> Task:
    return Task(f"task of {numbers[0]}", tuple(f"class {n}" for n in numbers), digits(numbers, 15))


def trained(tasks: list[tuple[int, ...]], method: str = "tpl", seed: int = 0, **options: Any) -> Learner:
    learner = Learner(
        method, SMALL_VIT, device="cpu", seed=seed, **((PLUS if method == "tpl-plus" else OPTIONS) | options)
    )
    for numbers in tasks:
        learner.learn(task(numbers), held_out=0.2)
    return learner


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of two tasks each, for every kind that is merged here."""
    root = tmp_path_factory.mktemp("apart")
    kinds: dict[str, dict[str, Any]] = {
        "tpl": {},
        "first": {"method": "tpl-plus", "expert_views": "first"},
        "encoder": {"method": "tpl-plus", "expert_views": "encoder"},
        "features": {"memory_kind": "features"},
    }
    for kind, options in kinds.items():
        for name, tasks in TASKS.items():
            trained(tasks, **options).save(root / f"{kind}-{name}")
    return root


def pair(stored: Path, kind: str) -> tuple[Learner, Learner]:
    return Learner.load(stored / f"{kind}-a", device="cpu"), Learner.load(stored / f"{kind}-b", device="cpu")


def features(learner: Learner, task: int) -> torch.Tensor:
    assert isinstance(learner.method, TPL)
    return learner.method.bank.outputs(learner.prepare(PROBE), task).features


@pytest.mark.parametrize("kind", ["tpl", "first", "encoder", "features"])
def test_features_and_logits_of_every_task_stay_bit_for_bit(stored: Path, kind: str, tmp_path: Path) -> None:
    a, b = pair(stored, kind)
    before = [features(learner, t) for learner in (a, b) for t in (0, 1)]
    assert not torch.equal(before[0], before[2])
    a.merge(b)
    assert all(torch.equal(features(a, t), z) for t, z in enumerate(before))
    a.save(tmp_path / "c")
    again = Learner.load(tmp_path / "c", device="cpu")
    assert all(torch.equal(features(again, t), z) for t, z in enumerate(before))
    assert again.answers(PROBE) == a.answers(PROBE)
    assert again.classes_ == [f"class {n}" for n in range(7)] and len(again.tasks_) == 4


@pytest.mark.parametrize("kind", ["tpl", "first"])
def test_what_is_learned_later_leaves_the_merged_tasks(stored: Path, kind: str) -> None:
    a, b = pair(stored, kind)
    before = [features(learner, t) for learner in (a, b) for t in (0, 1)]
    a.merge(b)
    a.learn(task((8, 9)), held_out=0.2)
    assert all(torch.equal(features(a, t), z) for t, z in enumerate(before))
    for name in ("class 4", "class 6"):  # a class, and a whole task of the second model
        a.remove(name)
    assert all(torch.equal(features(a, t), before[t]) for t in range(3))
    assert len(a.tasks_) == 4 and np.isfinite(a.predict_proba(PROBE)).all()


def test_the_sums_of_experts_are_those_of_learning_both(stored: Path) -> None:
    a, b = pair(stored, "encoder")
    assert a.merge(b) == "added"
    both = trained(TASKS["a"] + TASKS["b"], "tpl-plus", expert_views="encoder")
    compare_experts(a, both)


def test_stored_images_are_learned_under_the_first_models_view(stored: Path) -> None:
    """As if the first model's expert had learned the second model's tasks itself."""
    a, b = pair(stored, "first")
    assert a.merge(b) == "learned"
    both = trained(TASKS["a"] + TASKS["b"], "tpl-plus", expert_views="first")
    compare_experts(a, both)


def compare_experts(merged: Learner, both: Learner) -> None:
    assert isinstance(merged.method, TPLPlus) and isinstance(both.method, TPLPlus)
    mine, wanted = merged.method.expert, both.method.expert
    assert mine is not None and wanted is not None
    assert torch.equal(mine.counts, wanted.counts)
    scale = float(wanted.gram.abs().max())
    torch.testing.assert_close(mine.gram, wanted.gram, rtol=1e-5, atol=1e-5 * scale)
    torch.testing.assert_close(mine.sums, wanted.sums, rtol=1e-5, atol=1e-5 * scale)
    for expert in (mine, wanted):  # the choice of the ridge may fall either way where two are about as good
        expert.strength, expert.temperature = 0.1, 0.25
        expert._solve()
    torch.testing.assert_close(mine.weights, wanted.weights, rtol=1e-3, atol=1e-5)


def test_the_merged_model_tells_all_classes_apart(stored: Path) -> None:
    a, b = pair(stored, "first")
    alone = np.mean([p == f"class {t}" for p, t in zip(a.predict(PROBE), np.repeat(np.arange(7), 6), strict=True)])
    a.merge(b)
    merged = np.mean([p == f"class {t}" for p, t in zip(a.predict(PROBE), np.repeat(np.arange(7), 6), strict=True)])
    assert merged > alone + 0.1
    assert a.method.weighting()["fitted_on"] > 0  # type: ignore[index]


def test_statistics_instead_of_images_are_added(stored: Path) -> None:
    a, b = pair(stored, "features")
    a.merge(b)
    both = trained(TASKS["a"] + TASKS["b"], memory_kind="features")
    mine, wanted = (learner.method.statistics.space.statistics for learner in (a, both))  # type: ignore[attr-defined]
    for found, expected in zip(mine, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_expert_that_cannot_be_exact_is_refused_or_estimated() -> None:
    def both() -> tuple[Learner, Learner]:
        options = {"method": "tpl-plus", "expert_views": "first"}
        return trained([(0, 1)], **options), trained([(4, 5)], memory=8, **options)

    a, b = both()
    before = a.answers(PROBE)
    with pytest.raises(TplError, match=r"stores only 8 of the 24 images.*other order.*--estimate"):
        a.merge(b)
    assert a.answers(PROBE) == before  # as it was
    assert a.merge(b, estimate=True) == "estimated"
    assert isinstance(a.method, TPLPlus) and a.method.expert is not None
    assert a.method.expert.counts.tolist() == [12, 12, 12, 12]
    a, b = both()
    assert b.merge(a) == "learned"  # the other order, as the message says


def test_what_does_not_fit_is_refused(stored: Path) -> None:
    a, b = pair(stored, "tpl")
    for other, message in (
        (pair(stored, "first")[1], "different methods, tpl and tpl-plus"),
        (pair(stored, "features")[1], "different options, memory_kind=images and features"),
        (trained([(8,)], latent=4), "different options, latent=8 and 4"),
        (pair(stored, "tpl")[0], "Both models have class 0"),
        (Learner("ranpac", SMALL_VIT, device="cpu"), "'ranpac' cannot"),
        (Learner("tpl", SMALL_VIT, device="cpu", **OPTIONS), "no class yet"),
        (Learner("tpl", "compact", device="cpu", **OPTIONS), "no class yet"),
    ):
        with pytest.raises(TplError, match=message):
            a.merge(other)
    assert a.merge(b) is None
    assert [record.name for record in a.tasks_] == ["task of 0", "task of 2", "task of 4", "task of 6"]


def test_an_exported_graph_of_a_merged_model(stored: Path) -> None:
    a, b = pair(stored, "first")
    a.merge(b)
    assert isinstance(a.method, TPL)
    with torch.no_grad():
        log_p, *_ = AnswerGraph(a.method)(a.prepare(PROBE))
    torch.testing.assert_close(log_p.double(), a.log_probabilities(PROBE), rtol=1e-3, atol=1e-3)


def test_rows_of_several_adapter_sets_in_one_query(stored: Path) -> None:
    """Batches of rows, as a GPU runs them: rows of one pass share their adapters."""
    a, b = pair(stored, "tpl")
    before = [features(learner, t) for learner in (a, b) for t in (0, 1)]
    a.merge(b)
    assert isinstance(a.method, TPL) and isinstance(a.method.encoder, ViTEncoder)
    found = RowInference(a.method.bank, a.method.encoder)(a.prepare(PROBE), [Query(t) for t in (2, 0, 3, 1)])
    for t, z in zip((2, 0, 3, 1), found, strict=True):
        torch.testing.assert_close(z, before[t], rtol=1e-4, atol=1e-4)


def test_an_output_for_an_old_class_goes_with_that_class(stored: Path) -> None:
    """With others=per_class: also among classes of two models."""
    a, b = pair(stored, "first")
    assert isinstance(a.method, TPLPlus) and isinstance(b.method, TPLPlus)
    newest = b.method.bank.tasks[1]
    rows = newest.head_weight[newest.own :].clone()  # of classes 4 and 5
    a.merge(b)
    model = a.method.bank.tasks[3]
    assert model.others == 4 + 2 and torch.equal(model.head_weight[model.own + 4 :], rows)
    a.remove("class 0")
    assert model.others == 3 + 2 and torch.equal(model.head_weight[model.own + 3 :], rows)
    a.remove("class 4")
    assert model.others == 3 + 1 and torch.equal(model.head_weight[model.own + 3 :], rows[1:])


# The command


def test_the_command(stored: Path, tmp_path: Path) -> None:
    command = ["merge", stored / "first-a", stored / "first-b", "--into", tmp_path / "c", "--device", "cpu"]
    result = call(*command, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert len(report["classes"]) == 7 and report["expert"] == "learned" and report["renamed"] == {}
    assert Learner.load(tmp_path / "c", device="cpu").classes_ == report["classes"]
    again = call(*command)
    assert isinstance(again.exception, TplError) and "is a model already" in str(again.exception)


def test_equal_names_are_refused_or_renamed(stored: Path, tmp_path: Path) -> None:
    command = ["merge", stored / "tpl-a", stored / "tpl-a", "--into", tmp_path / "c", "--device", "cpu"]
    refused = call(*command)
    assert isinstance(refused.exception, TplError) and "--rename-equal" in str(refused.exception)
    assert not (tmp_path / "c").exists()
    done = call(*command, "--rename-equal")
    assert done.exit_code == 0 and "'class 0' of" in done.stdout and "8 classes in 4 tasks" in done.stdout
    assert "measured before the merge" in done.stdout
    merged = Learner.load(tmp_path / "c", device="cpu")
    assert merged.classes_[4:] == [f"class {n} (tpl-a)" for n in range(4)]
    assert [record.name for record in merged.tasks_] == ["task of 0", "task of 2", "task of 0 2", "task of 2 2"]


def test_help() -> None:
    said = call("merge", "-h").stdout
    assert "Example" in said and "--json" in said
