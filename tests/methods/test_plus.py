"""TPL with a global expert: the product's arithmetic, and which tasks are asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import Learner
from tpl.errors import TplError
from tpl.methods.bank import ForwardPass
from tpl.methods.base import KEEP, UNKNOWN, task_of_class
from tpl.methods.plus import PlusConfig, TPLPlus
from tpl.methods.tpl import TPL
from tpl.stream import Stream

OPTIONS = {
    "expert_views": "encoder",
    "expert_weight": 1.0,
    "latent": 16,
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.05,
    "memory": 24,
}


@pytest.fixture(scope="module")
def method(small_stream: Stream) -> TPLPlus:
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **OPTIONS)
    for task in small_stream:
        learner.learn(task, held_out=0)
    assert isinstance(learner.method, TPLPlus)
    return learner.method


@pytest.fixture(scope="module")
def pixels(method: TPLPlus, small_stream: Stream) -> torch.Tensor:
    return torch.cat([method.preprocess.batch(task.test) for task in small_stream if task.test is not None])


def test_the_answer_is_the_product_of_bank_and_expert(method: TPLPlus, pixels: torch.Tensor) -> None:
    bank = TPL.log_probabilities_of(method, method.outputs(pixels))
    expert = method.expert_log_probabilities(method.common_features(pixels)).exp()
    product = bank.exp() * expert
    torch.testing.assert_close(method.log_probabilities(pixels).exp(), product / product.sum(dim=1, keepdim=True))


def test_without_weight_it_is_tpl(method: TPLPlus, pixels: torch.Tensor) -> None:
    method.rescore(expert_weight=0.0)
    bank = TPL.log_probabilities_of(method, method.outputs(pixels))
    torch.testing.assert_close(method.log_probabilities(pixels), bank)
    method.rescore(expert_weight=1.0)


def test_asking_as_many_tasks_as_there_are_is_exact(method: TPLPlus, pixels: torch.Tensor) -> None:
    everyone = method.log_probabilities(pixels)
    method.rescore(passes="3")
    torch.testing.assert_close(method.log_probabilities(pixels), everyone)
    method.rescore(passes="all")


@pytest.mark.parametrize("passes", ["auto", "1", "2"])
def test_only_the_tasks_worth_asking_are_asked(method: TPLPlus, pixels: torch.Tensor, passes: str) -> None:
    method.rescore(passes=passes)
    common = method.common_features(pixels)
    says = method.expert_log_probabilities(common)
    asked = method.tasks_to_query(says)
    answer = method.log_probabilities(pixels)
    owner = task_of_class(method.task_classes_)
    dense = method.decide([ForwardPass(method.outputs(pixels), common)]).log_p  # as if every task had been asked
    torch.testing.assert_close(answer, dense)
    torch.testing.assert_close(answer.exp().sum(dim=1), torch.ones(len(pixels), dtype=torch.float64))
    assert bool(
        asked.gather(1, owner[answer.argmax(dim=1)].unsqueeze(1)).all()
    )  # never a class that nobody was asked for
    if passes == "auto":
        share = torch.stack([says.exp()[:, owner == t].sum(dim=1) for t in range(3)], dim=1)
        assert bool(((share * asked).sum(dim=1) >= method.config.passes_mass - 1e-12).all())
        assert asked.double().sum(dim=1).mean() < 3
    else:
        assert asked.sum(dim=1).unique().tolist() == [int(passes)]
    told = method.answer(pixels).passes
    assert told is not None and torch.equal(told, asked.sum(dim=1))
    method.rescore(passes="all")
    assert passes_of(method, pixels) == 3


def test_an_unsure_expert_does_not_select_every_task(
    method: TPLPlus, pixels: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpl.methods.plus.MOST_QUERIED", 2)
    method.rescore(passes="auto", passes_mass=0.99)
    unsure = torch.full((4, 6), 1 / 6, dtype=torch.float64).log()  # every task has a third
    assert method.tasks_to_query(unsure).sum(dim=1).tolist() == [2] * 4
    method.rescore(passes="all", passes_mass=PlusConfig().passes_mass)


def passes_of(method: TPLPlus, pixels: torch.Tensor) -> float:
    told = method.answer(pixels).passes
    assert told is not None
    return float(told.double().mean())


def test_no_task_asked_is_the_expert_alone(method: TPLPlus, pixels: torch.Tensor) -> None:
    method.rescore(passes="0")
    told = method.answer(pixels, {UNKNOWN})
    torch.testing.assert_close(told.log_p, method.expert_log_probabilities(method.common_features(pixels)))
    assert told.scores is not None and bool(told.scores.isneginf().all())
    assert told.unknown is not None and method.closed_ is not None  # it needs no task's model
    torch.testing.assert_close(told.unknown, method.closed_.unknown_scores(method.encoder_features(pixels)))
    assert passes_of(method, pixels) == 0
    method.rescore(passes="all")


def test_impossible_choices_are_explained() -> None:
    with pytest.raises(TplError, match="passes must be all, auto or a number"):
        Learner("tpl-plus", SMALL_VIT, device="cpu", passes="some")
    with pytest.raises(TplError, match="needs passes=all"):
        Learner("tpl-plus", SMALL_VIT, device="cpu", passes="auto", calibration="probability")


def test_the_expert_may_see_through_the_first_task(small_stream: Stream, tmp_path: Path) -> None:
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **(OPTIONS | {"epochs": 1, "expert_views": "first"}))
    for task in small_stream[:2]:
        learner.learn(task)
    method = learner.method
    assert isinstance(method, TPLPlus)
    assert small_stream[1].test is not None
    pixels = method.preprocess.batch(small_stream[1].test)
    common = method.common_features(pixels)
    dim = method.encoder.dim
    torch.testing.assert_close(common[:, :dim], method.encoder_features(pixels))
    torch.testing.assert_close(common[:, dim:], method.outputs_of(0, pixels).features)
    everyone = method.log_probabilities(pixels)
    method.rescore(passes="2")  # what the expert saw of the first task's model serves that task's answer
    torch.testing.assert_close(method.log_probabilities(pixels), everyone)
    asked = method.tasks_to_query(method.expert_log_probabilities(common))
    assert bool(asked[:, 0].all())  # the expert has seen through it
    method.rescore(passes="1")
    assert 1 <= passes_of(method, pixels) <= 2
    method.rescore(passes="all")
    learner.remove("class 0")
    learner.remove("class 1")  # the first task is gone; what its model sees, the expert still sees
    assert learner.classes_ == ["class 2", "class 3"]
    torch.testing.assert_close(method.common_features(pixels), common, rtol=1e-4, atol=1e-5)
    learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu").method
    torch.testing.assert_close(again.log_probabilities(pixels), method.log_probabilities(pixels))
    assert differences(tensors_of(again), tensors_of(method)) == []
    assert passes_of(method, pixels) == 1


def test_the_expert_may_see_through_several_tasks(
    small_stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpl.methods.plus.MOST_VIEWS", 2)
    monkeypatch.setattr("tpl.methods.plus.MANY_IMAGES", 1)
    learner = Learner(
        "tpl-plus", SMALL_VIT, device="cpu", **(OPTIONS | {"epochs": 1, "memory": 64, "expert_views": "several"})
    )
    method = learner.method
    assert isinstance(method, TPLPlus) and small_stream[1].test is not None
    pixels = method.preprocess.batch(small_stream[1].test)
    learner.learn(small_stream[0], held_out=0.25)
    before = method.forward(pixels, {KEEP})
    for task in small_stream[1:3]:
        learner.learn(task, held_out=0.25)
    assert method.views_ == method.bank.tasks[:2]
    dim, common = method.encoder.dim, method.common_features(pixels)
    torch.testing.assert_close(common[:, dim : 2 * dim], method.outputs_of(0, pixels).features)
    torch.testing.assert_close(common[:, 2 * dim :], method.outputs_of(1, pixels).features)
    assert all(held.common is not None and held.common.shape[1] == 3 * dim for held in method.held_)
    everyone = method.answer(pixels).log_p
    kept = method.forward(pixels, {KEEP}, before)  # of a stage at which there was one view less
    torch.testing.assert_close(method.decide([kept]).log_p, everyone)
    method.rescore(passes="1")
    asked = method.answer(pixels, {UNKNOWN})
    assert bool((method.tasks_to_query(method.expert_log_probabilities(common))[:, :2]).all())
    assert asked.unknown is not None and bool(asked.unknown.isfinite().all())
    method.rescore(passes="all")
    for name in small_stream[0].classes:
        learner.remove(name)  # the first task is gone; what its model sees, the expert still sees
    torch.testing.assert_close(method.common_features(pixels), common, rtol=1e-4, atol=1e-5)
    learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu").method
    assert torch.equal(again.log_probabilities(pixels), method.log_probabilities(pixels))
    assert differences(tensors_of(again), tensors_of(method)) == []


@pytest.mark.parametrize(("images", "memory"), [(1, 4), (1000, 64)])
def test_too_few_images_for_a_view_add_none(
    small_stream: Stream, monkeypatch: pytest.MonkeyPatch, images: int, memory: int
) -> None:
    """Too few of old classes in the memory, or too few of the first task."""
    monkeypatch.setattr("tpl.methods.plus.MANY_IMAGES", images)
    choices = OPTIONS | {"epochs": 1, "expert_views": "several", "memory": memory}
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **choices)
    for task in small_stream[:2]:
        learner.learn(task)
    assert isinstance(learner.method, TPLPlus) and learner.method.views_ == learner.method.bank.tasks[:1]


def test_held_out_images_say_how_far_bank_and_expert_count(small_stream: Stream, tmp_path: Path) -> None:
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **OPTIONS)
    for task in small_stream[:2]:
        learner.learn(task, held_out=0.25)
    method = learner.method
    assert isinstance(method, TPLPlus)
    assert method.balance_.images == 2 * 2 * 4  # tasks, classes, a quarter of 16
    assert small_stream[1].test is not None
    pixels = method.preprocess.batch(small_stream[1].test)
    a, w = method.exponents
    common = method.common_features(pixels)
    bank = TPL.log_probabilities_of(method, method.outputs(pixels), common=common)
    product = (a * bank + w * method.expert_log_probabilities(common)).log_softmax(dim=1)
    torch.testing.assert_close(method.log_probabilities(pixels), product)
    learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu").method
    assert isinstance(again, TPLPlus) and again.exponents == (a, w)
    method.rescore(expert_weighting="fixed")
    assert method.exponents == (1.0, OPTIONS["expert_weight"])


@pytest.mark.parametrize("passes", ["auto", "1", "0"])
def test_held_out_images_are_shown_to_the_queried_tasks_alone(small_stream: Stream, passes: str) -> None:
    """The exponents are fitted to answers as they are given: by the queried tasks, of images whose task is queried."""
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **(OPTIONS | {"passes": passes, "epochs": 1}))
    for task in small_stream[:2]:
        learner.learn(task, held_out=0)
    method = learner.method
    assert isinstance(method, TPLPlus)
    tests = [task.test for task in small_stream[:2] if task.test is not None]
    pixels = torch.cat([method.preprocess.batch(images) for images in tests])
    numbers = torch.cat([torch.tensor(images.labels) + 2 * t for t, images in enumerate(tests)])
    method._fit_exponents(pixels, numbers)
    owner, common = task_of_class(method.task_classes_), method.common_features(pixels)
    expert = method.expert_log_probabilities(common)
    queried = method.tasks_to_query(expert, "auto" if passes == "0" else passes)
    outputs = method.outputs(pixels)
    scores = method.task_scores(outputs, common)
    images = 0
    likelihoods = torch.zeros_like(method.balance_.likelihoods)
    for row, number in enumerate(numbers.tolist()):
        tasks = queried[row].nonzero().squeeze(1)
        if int(owner[number]) not in tasks.tolist():
            continue
        images += 1
        classes = torch.nonzero(torch.isin(owner, tasks)).squeeze(1)
        alone = scores[row : row + 1].clone()
        alone[:, ~queried[row]] = -torch.inf
        of_task = method.task_log_probabilities(alone)[0, owner[classes]]
        within = torch.cat([outputs[t].logits[row, :2].double().log_softmax(dim=0) for t in tasks.tolist()])
        for i, a in enumerate(method.balance_.bank_exponents):
            for j, w in enumerate(method.balance_.expert_grid):
                log_p = (a * (of_task + within) + w * expert[row, classes]).log_softmax(dim=0)
                likelihoods[i, j] += log_p[int((classes == number).nonzero())]
    assert 0 < images == method.balance_.images
    torch.testing.assert_close(method.balance_.likelihoods, likelihoods)


def test_an_update_adds_held_out_images(small_stream: Stream) -> None:
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **(OPTIONS | {"epochs": 1}))
    learner.learn(small_stream[0], held_out=0.25)
    learner.update(small_stream[0], held_out=0.25)
    assert isinstance(learner.method, TPLPlus) and learner.method.balance_.images == 2 * 8
