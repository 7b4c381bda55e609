"""Answers that look at an image more than once, and heads that know turned classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from small_encoder import SMALL_VIT
from tensors import differences, tensors_of
from tpl import Learner
from tpl.bench.evaluate import Evaluator
from tpl.engine import choose_compute, no_callback
from tpl.errors import TplError
from tpl.export.file import export_onnx
from tpl.methods import learn_together
from tpl.methods.bank.bank import ORIGINAL, TTA
from tpl.methods.pass_ import PASS, PASSConfig
from tpl.methods.tpl import TPL, TPLConfig
from tpl.nets import create_encoder
from tpl.stream import Stream

OPTIONS = {"encoder": SMALL_VIT, "latent": 8, "epochs": 2, "batch_size": 8, "lr": 0.05, "memory": 24}


def learner_for(**options: object) -> Learner:
    return Learner("tpl", device="cpu", **(OPTIONS | options))  # type: ignore[arg-type]


def method_of(learner: Learner) -> TPL:
    assert isinstance(learner.method, TPL)
    return learner.method


@pytest.fixture(scope="module")
def learner(small_stream: Stream) -> Learner:
    """Two tasks, one output for each replayed class, all views."""
    learner = learner_for(rotation_classes=True, tta="both", others="per_class")
    for task in small_stream[:2]:
        learner.learn(task)
    return learner


@pytest.fixture(scope="module")
def probe(learner: Learner, small_stream: Stream) -> Tensor:
    assert small_stream[0].test is not None
    return learner.prepare(small_stream[0].test)


def test_views_are_every_flip_and_rotation_once() -> None:
    assert {name: len(set(views)) for name, views in TTA.items()} == {
        "none": 1, "flip": 2, "rotate": 4, "both": 8
    }  # fmt: skip
    image = torch.arange(3 * 16, dtype=torch.uint8).view(1, 3, 4, 4)
    assert len({view.of(image).numpy().tobytes() for view in TTA["both"]}) == 8
    assert all(views[0] == ORIGINAL[0] for views in TTA.values())


def test_a_head_has_outputs_for_classes_for_others_and_for_every_rotation(learner: Learner) -> None:
    first, second = method_of(learner).bank.tasks
    own = len(learner.method.task_classes_[0]), len(learner.method.task_classes_[1])
    assert (len(first.head_bias), len(second.head_bias)) == (4 * own[0], own[1] + own[0] + 3 * own[1])


def test_features_and_logits_are_means_over_views(learner: Learner, probe: Tensor) -> None:
    """By hand, from eight answers of the same task with one view each."""
    bank = method_of(learner).bank
    for task, model in enumerate(bank.tasks):
        own, seen = model.own, {}
        try:
            bank.views = ORIGINAL
            for rotation in range(4):
                rotated = (image.rot90(rotation, dims=(-2, -1)) for image in (probe, probe.flip(-1)))
                seen[rotation] = sum(bank.outputs(image, task).features.double() for image in rotated) / 2
        finally:
            bank.views = TTA["both"]
        weight, bias = model.head_weight.double(), model.head_bias.double()
        logits = F.linear(seen[0], weight[:own], bias[:own])
        for rotation in (1, 2, 3):
            end = len(bias) - (3 - rotation) * own
            logits += F.linear(seen[rotation], weight[end - own : end], bias[end - own : end])
        found = bank.outputs(probe, task)
        torch.testing.assert_close(found.features.double(), seen[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.logits.double(), logits / 4, rtol=1e-5, atol=1e-5)


def test_an_answer_does_not_depend_on_the_batch_and_survives_saving(
    learner: Learner, probe: Tensor, tmp_path: Path
) -> None:
    answer = learner.method.log_probabilities(probe)
    alone = torch.cat([learner.method.log_probabilities(image) for image in probe.split(1)])
    torch.testing.assert_close(alone, answer, rtol=1e-5, atol=1e-5)
    learner.save(tmp_path / "model")
    again = method_of(Learner.load(tmp_path / "model", device="cpu"))
    assert torch.equal(again.log_probabilities(probe), answer)
    assert differences(tensors_of(again), tensors_of(learner.method)) == []
    assert again.bank.views == TTA["both"] and again.answer(probe).passes.unique().tolist() == [16]


def test_a_class_that_goes_takes_its_rotated_ones_along(learner: Learner, tmp_path: Path) -> None:
    learner.save(tmp_path / "model")
    smaller = Learner.load(tmp_path / "model", device="cpu")
    name = learner.method.task_classes_[0][0]
    before = [model.own_head(q) for model in method_of(learner).bank.tasks for q in range(4)]
    smaller.remove(name)
    after = [model.own_head(q) for model in method_of(smaller).bank.tasks for q in range(4)]
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        gone = 1 if number < 4 else 0  # the class is the first of the first task
        assert all(torch.equal(a[gone:], b) for a, b in zip(old, new, strict=True))


def test_views_do_not_change_what_is_trained_and_are_no_twins(small_stream: Stream) -> None:
    """Two methods that differ in their views train once, and each is measured by its own."""
    learners = [learner_for(tta=tta) for tta in ("none", "flip")]
    evaluators = [Evaluator(small_stream, each.method) for each in learners]
    evaluators[1].beside = evaluators[:1]
    learn_together([each.method for each in learners], [small_stream[0]] * 2, [no_callback] * 2)
    first, second = (method_of(each).bank for each in learners)
    assert second.same_as is first
    for evaluator in evaluators:
        evaluator.stage(0)
    plain, flipped = (evaluator.seen[0].outputs[0].features for evaluator in evaluators)
    assert not torch.equal(plain, flipped)


@pytest.mark.parametrize("tta", ["rotate", "both"])
def test_rotated_views_need_rotation_classes(tta: str) -> None:
    with pytest.raises(TplError, match=f"tta={tta} reads the outputs for rotated images: train with rotation_classes"):
        TPLConfig(tta=tta)


def test_images_that_are_not_square_cannot_be_rotated() -> None:
    encoder = create_encoder("compact")
    encoder.data_config = encoder.data_config | {"input_size": (3, 32, 64)}
    compute = choose_compute("cpu")
    TPL(encoder, TPLConfig(), compute)
    with pytest.raises(TplError, match="rotation_classes=true rotates images; those of 'compact' are not square"):
        TPL(encoder, TPLConfig(rotation_classes=True), compute)
    with pytest.raises(TplError, match="PASS rotates images"):
        PASS(encoder, PASSConfig(), compute)


def test_where_test_time_augmentation_is_not_possible_it_says_so(learner: Learner, tmp_path: Path) -> None:
    with pytest.raises(TplError, match="tpl-plus has no test-time augmentation"):
        Learner("tpl-plus", SMALL_VIT, device="cpu", tta="flip")
    with pytest.raises(TplError, match="tta=both cannot be exported"):
        export_onnx(learner, tmp_path / "model.onnx")
