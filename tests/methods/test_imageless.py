"""TPL without stored images: nothing of an old image is there, and all that a model can do works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from handwriting import digits
from tensors import differences, tensors_of
from tpl import Learner, Task, TplError
from tpl.bench.evaluate import Evaluator
from tpl.engine import no_callback
from tpl.methods import learn_together
from tpl.methods.base import UNKNOWN
from tpl.methods.plus import TPLPlus
from tpl.methods.tpl import TPL, TPLConfig
from tpl.stream import Stream

OPTIONS: dict[str, Any] = {"latent": 8, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 24}
CASES = [("tpl-plus", "features"), ("tpl", "none")]  # what tpl-plus adds to tpl has tests of its own


def new_learner(method: str, kind: str) -> Learner:
    return Learner(method, device="cpu", memory_kind=kind, **OPTIONS)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are that know the first two tasks."""
    return tmp_path_factory.mktemp("half")


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def learner(request: pytest.FixtureRequest, small_stream: Stream, half: Path) -> Learner:
    """Three tasks, none of which can be read once the next has begun; two images a class held out."""
    found = new_learner(*request.param)
    for t, task in enumerate(small_stream.once()):
        found.learn(task)
        if t == 1:
            found.save(half / request.param[1])
    return found


def method_of(learner: Learner) -> TPL:
    assert isinstance(learner.method, TPL)
    return learner.method


@pytest.fixture
def pixels(learner: Learner, small_stream: Stream) -> torch.Tensor:
    return torch.cat([learner.prepare(task.test)[::4] for task in small_stream if task.test is not None])


def test_no_image_is_kept_and_what_is_kept_is_counted(learner: Learner) -> None:
    method = method_of(learner)
    assert len(method.memory) == 0 and not len(method.memory.state()["lengths"])
    shared = method.state().shared
    assert all(not len(seen.features) for seen in method.memory_outputs_)
    kept = {k: v for k, v in shared.items() if k.startswith(("memory.encoder.", "memory.evidence."))}
    counted = sum(t.numel() * t.element_size() for t in kept.values())
    held = sum(t.numel() * t.element_size() for each in method.held_ for t in each.tensors().values())
    assert method.memory_bytes == counted + held
    numbers = sum(t.numel() for k, t in kept.items() if ".encoder." in k)
    dim = method.encoder.dim
    assert numbers == (6 * dim + 6 + 1 + dim * (dim + 1) // 2 if method.config.memory_kind == "features" else 0)
    assert [len(model.head_bias) for model in method.bank.tasks] == [2, 2, 2]  # no class for others


def test_answers_survive_storage_and_do_not_depend_on_the_batch(
    learner: Learner, pixels: torch.Tensor, tmp_path: Path
) -> None:
    answers = learner.method.log_probabilities(pixels)
    one_by_one = torch.cat([learner.method.log_probabilities(p) for p in pixels[::4].split(1)])
    torch.testing.assert_close(answers[::4], one_by_one, rtol=1e-3, atol=1e-3)
    learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu")
    assert torch.equal(again.method.log_probabilities(pixels), answers)
    assert differences(tensors_of(again.method), tensors_of(learner.method)) == []
    truth = torch.arange(6).repeat_interleave(2)
    assert float((answers.argmax(dim=1) == truth).double().mean()) > 0.5  # chance is 1/6


def test_a_resumed_model_ends_with_the_same_numbers(
    learner: Learner, pixels: torch.Tensor, small_stream: Stream, half: Path
) -> None:
    again = Learner.load(half / method_of(learner).config.memory_kind, device="cpu")
    again.learn(small_stream[2])
    assert torch.equal(again.method.log_probabilities(pixels), learner.method.log_probabilities(pixels))


def test_the_score_is_the_weighed_evidence(learner: Learner, pixels: torch.Tensor) -> None:
    """Against a computation of its own, from what is stored."""
    method, state = method_of(learner), learner.method.state()
    outputs, encoded = method.outputs(pixels), method.encoder_features(pixels).double()
    sums = [state.shared[f"memory.evidence.{side}_"].numpy() for side in ("own", "foreign")]
    assert sums[0][0, 0] == 2 * 28 and sums[1][0, 0] == 28 + 2 * 28  # newest images; seen by one old model, then two
    kinds = [1, 4, 5] if method.config.memory_kind == "features" else [1, 4]  # maximum logit, MD, encoder
    means = [s[0, kinds] / s[0, 0] for s in sums]
    spreads = [s[np.ix_(kinds, kinds)] / s[0, 0] - np.outer(m, m) for s, m in zip(sums, means, strict=True)]
    used = np.ones(len(kinds), dtype=bool)
    while True:
        spread = np.mean(spreads, axis=0)[np.ix_(used, used)]
        weights = np.zeros(len(kinds))
        weights[used] = np.linalg.solve(spread, (means[0] - means[1])[used])
        if (weights[used] > 0).all():
            break
        used &= weights > 0
    weights /= weights.sum()
    expected = []
    for t, (z, logits) in enumerate(outputs):
        score = method.scores_[t]
        closeness = score.centres.score_features(z, logits) / score.scales_[3]
        parts = [logits.double().amax(dim=1) / score.scales_[0], closeness.log()]
        if len(kinds) == 3:
            assert method.statistics is not None and method.statistics.space is not None
            squares = method.statistics.space.distances(encoded).view(len(pixels), 3, 2).amin(dim=2)
            others = squares.masked_fill(F.one_hot(torch.tensor(t), 3).bool(), torch.inf).amin(dim=1)
            parts.append((others - squares[:, t]) / encoded.shape[1])
        expected.append(torch.stack(parts, dim=1).numpy() @ weights)
    found = method.task_scores(outputs, method.common_features(pixels)).numpy()
    np.testing.assert_allclose(found, np.stack(expected, axis=1), rtol=1e-3, atol=1e-4)


def test_unknown_images_are_told_and_the_score_can_change(learner: Learner, pixels: torch.Tensor) -> None:
    method = method_of(learner)
    known, noise = (method.answer(p, {UNKNOWN}).unknown for p in (pixels, torch.randint_like(pixels[:4], 256)))
    assert known is not None and noise is not None
    assert noise.mean() > known.mean()
    pixels = pixels[:4]
    trained, answers = method.config.to_dict(), method.log_probabilities(pixels)
    for change in ({"calibration": "none"}, {"logit_score": "none"}, {"out_of_task": "constant"}):
        method.rescore(**change)
        torch.testing.assert_close(method.log_probabilities(pixels).exp().sum(dim=1), torch.ones(len(pixels)).double())
    method.rescore(**trained)
    assert torch.equal(method.log_probabilities(pixels), answers)
    with pytest.raises(TplError, match="compares with stored images"):
        method.rescore(in_task="knn")
    with pytest.raises(TplError, match="cannot change"):
        method.rescore(memory_kind="images")


def test_some_tasks_or_all_of_them_give_one_answer(learner: Learner, pixels: torch.Tensor) -> None:
    method, everyone = learner.method, learner.method.log_probabilities(pixels)
    if isinstance(method, TPLPlus):  # tpl asks all tasks in any case
        method.rescore(passes="3")
        torch.testing.assert_close(method.log_probabilities(pixels), everyone)
        method.rescore(passes="all")


def test_more_images_of_a_class_and_classes_that_go() -> None:
    learner = new_learner("tpl", "features")
    for t, names in enumerate((("zero", "one"), ("two",))):
        learner.learn(Task(f"task {t}", names, digits(range(2 * t, 2 * t + len(names)), 15)), held_out=0)
    method = method_of(learner)
    assert method.statistics is not None and method.statistics.space is not None
    before = method.statistics.space.means_.clone()
    more = digits([1], 5, start=40)
    learner.update(Task("more", ("one",), more), held_out=0)
    encoded = method.encoder_features(method.preprocess.batch(more)).double().mean(dim=0)
    torch.testing.assert_close(
        method.statistics.space.means_[1], (15 * before[1] + 5 * encoded) / 20, rtol=1e-4, atol=1e-4
    )
    assert torch.equal(method.statistics.space.means_[[0, 2]], before[[0, 2]])
    learner.remove("zero")
    assert len(method.statistics.space.means_) == 2 and learner.classes_ == ["one", "two"]
    probe = digits([1, 2], 5, start=100)
    assert learner.log_probabilities(probe).shape == (10, 2)
    learner.remove("one")  # and with it its task
    assert len(method.statistics.space.means_) == 1 and bool(learner.log_probabilities(probe).isfinite().all())
    with pytest.raises(TplError, match="Not known yet"):
        learner.update(Task("more", ("one",), more))


def test_with_and_without_images_side_by_side(small_stream: Stream) -> None:
    learners = [new_learner("tpl", kind) for kind in ("images", "features", "none")]
    methods = [method_of(learner) for learner in learners]
    for task in small_stream[:2]:
        learn_together(methods, [task] * 3, [no_callback] * 3)
    images, features, none = methods
    assert len(images.memory) > 0 == len(features.memory) and images.memory_bytes == images.memory.bytes_used
    assert features.memory_bytes > none.memory_bytes > 0
    heads = [method.bank.tasks[1].head_weight for method in methods]
    assert torch.equal(heads[1], heads[2]) and len(heads[0]) == 3  # those without images were trained once
    found = Evaluator(small_stream[:2], features).stage(1)
    assert found.detection is not None and np.mean(found.cil) > 0.4
    asked = features.outputs(learners[1].prepare(small_stream[0].test))
    assert torch.equal(features.task_scores(asked), none.task_scores(asked))  # but for what the encoder says


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TplError, match="trained from scratch"):
        Learner("tpl", "resnet18:8", device="cpu", memory_kind="features")
    with pytest.raises(TplError, match="memory_kind must be one of"):
        TPLConfig(memory_kind="pictures")
