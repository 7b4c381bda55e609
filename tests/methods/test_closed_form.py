"""The classifiers in closed form: exact in any order, by leave-one-out, and with a graded unknown score."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.engine import Event
from tpl.methods import base, plus
from tpl.methods.closed_form import ClosedFormExperts
from tpl.methods.parts import closed_form
from tpl.methods.parts.closed_form import CentredRidge, ClosedForm, same_features
from tpl.methods.plus import TPLPlus
from tpl.scores.calibration import graded_p_values, p_values
from tpl.store import StoreError
from tpl.stream import Stream

DIM, WIDTH, CLASSES = 12, 40, 5
CPU = torch.device("cpu")


def blobs(each: int, seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Gaussian classes around random means, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    means = 1.5 * torch.randn(classes, DIM, generator=torch.Generator().manual_seed(99))
    y = torch.arange(classes).repeat(each)
    z = means[y] + torch.randn(len(y), DIM, generator=generator)
    order = torch.randperm(len(y), generator=generator)
    return z[order], y[order]


def new(seed: int = 0) -> ClosedForm:
    return ClosedForm.drawn(DIM, WIDTH, torch.Generator().manual_seed(seed), CPU)


def learned(z: Tensor, y: Tensor) -> ClosedForm:
    found = new()
    found.learn(z, y)
    return found


def test_task_by_task_is_all_at_once() -> None:
    z, y = blobs(8)
    test, _ = blobs(10, seed=1)
    whole, parts = learned(z, y), new()
    for a, b in pairwise([0, 2, 3, CLASSES]):
        rows = (y >= a) & (y < b)
        half = torch.arange(len(y)) % 2 == 0
        parts.learn(z[rows & half], y[rows & half])
        parts.update(z[rows & ~half], y[rows & ~half])
    torch.testing.assert_close(parts.log_probabilities(test), whole.log_probabilities(test), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(parts.unknown_scores(test), whole.unknown_scores(test), rtol=1e-6, atol=1e-8)


def test_many_samples_are_chosen_on_some_of_them_and_all_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen decides a temperature or two; left out, and so calibrated on, is every stored sample."""
    z, y = blobs(40)
    monkeypatch.setattr(closed_form, "CHOSEN_ON", 50)
    some = learned(z, y)
    again = ClosedForm.from_state(some.state())
    for found in (some, again):
        labels, left_out = found.measured()
        assert len(labels) == len(left_out) == len(found.calibration.known_scores) == len(y)
    assert torch.equal(again.calibration.left_out, some.calibration.left_out)
    assert float((left_out.argmax(dim=1) == labels).double().mean()) > 0.8


def test_few_more_samples_of_many_are_added_exactly_and_change_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = blobs(40)
    test, _ = blobs(10, seed=1)
    monkeypatch.setattr(closed_form, "CHOSEN_ON", 50)
    whole, parts = learned(z, y), learned(z[:-10], y[:-10])
    chosen = parts.ridge.strength, parts.ridge.temperature, parts.shrunk, parts.sharpness, parts.sureness
    parts.update(z[-10:], y[-10:])
    assert chosen == (parts.ridge.strength, parts.ridge.temperature, parts.shrunk, parts.sharpness, parts.sureness)
    torch.testing.assert_close(parts.ridge.gram, whole.ridge.gram)
    torch.testing.assert_close(parts.statistics.scatter, whole.statistics.scatter)
    whole.ridge.strength, whole.ridge.temperature, whole.shrunk, whole.sharpness, whole.sureness = chosen
    whole.ridge._solve()
    whole = ClosedForm.from_state(whole.state())
    torch.testing.assert_close(parts.log_probabilities(test), whole.log_probabilities(test))
    torch.testing.assert_close(parts.unknown_scores(test), whole.unknown_scores(test))


def test_choices_are_made_again_when_there_are_a_tenth_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the last choice, not from the last task: many small tasks do not put it off for ever."""
    z, y = blobs(40)
    last = y == CLASSES - 1
    monkeypatch.setattr(closed_form, "CHOSEN_ON", 50)
    parts = learned(z[~last], y[~last])
    rows = torch.nonzero(last).squeeze(1)
    for chosen_with, more in ((160, rows[:8]), (160, rows[8:16]), (180, rows[16:20]), (180, rows[20:30])):
        parts.learn(z[more], y[more])
        parts = ClosedForm.from_state(parts.state())
        assert parts.chosen_with == chosen_with


def test_a_classifier_of_an_early_version_is_loaded_and_chooses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = blobs(40)
    monkeypatch.setattr(closed_form, "CHOSEN_ON", 50)
    whole = learned(z, y)
    for numbers in (2, 3):
        state = whole.state()
        found = ClosedForm.from_state(state | {"sharpness": state["sharpness"][:numbers]})
        assert found.chosen_with == 0
        assert (found.sharpness, found.sureness) == (whole.sharpness, whole.sureness)
        found.learn(z[:1], y[:1])
        assert found.chosen_with == len(y) + 1


def test_which_vectors_are_stored_does_not_depend_on_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "STORED", 20)
    z, y = blobs(30)
    whole, parts = learned(z, y), new()
    for c in range(CLASSES):
        parts.learn(z[y == c], y[y == c])
    assert len(whole.labels) == 20 and whole.labels.bincount().tolist() == [4] * CLASSES
    assert torch.equal(whole.features, parts.features)


def test_leave_one_out_in_closed_form_is_leaving_one_out() -> None:
    """Strength, shrinkage and temperatures stay those of all samples; so they are set in the smaller models."""
    z, y = blobs(4)
    whole = learned(z, y)
    classes, log_p = whole.measured()
    for row in range(0, len(classes), 3):
        place = int(torch.nonzero((z == whole.features[row]).all(dim=1)))
        rest = torch.arange(len(y)) != place
        smaller = learned(z[rest], y[rest])
        ridge = smaller.ridge
        ridge.strength = whole.ridge.strength * float(
            _diagonal(whole) / _diagonal(smaller)
        )  # in units of the mean diagonal, which one sample less changes
        ridge._solve()
        torch.testing.assert_close(
            ridge.predicted(z[place : place + 1]), whole.ridge.left_out(z[place : place + 1], y[place : place + 1])
        )
        discriminant = whole.discriminant
        assert discriminant is not None and smaller.discriminant is not None
        x = torch.nn.functional.normalize(z[place : place + 1].double(), dim=1)
        found = discriminant.left_out(x, y[place : place + 1])
        expected = _distances(whole, smaller, x)
        torch.testing.assert_close(found, expected)
    assert log_p.shape == (len(y), CLASSES)


def _diagonal(model: ClosedForm) -> Tensor:
    centre = model.ridge.centre
    return (model.ridge.gram - model.ridge.counts.sum() * torch.outer(centre, centre)).diagonal().mean()


def _distances(whole: ClosedForm, smaller: ClosedForm, x: Tensor) -> Tensor:
    """-1/2 squared distances by the smaller model's means and scatter, in the whole model's shrinkage."""
    discriminant = whole.discriminant
    assert discriminant is not None
    scatter = discriminant.own * (smaller.statistics.scatter - whole.statistics.scatter)
    inverse = torch.linalg.inv(torch.linalg.inv(discriminant.inverse) + scatter)
    apart = x - smaller.statistics.means
    return -0.5 * ((apart @ inverse) * apart).sum(dim=1).unsqueeze(0)


@pytest.mark.parametrize("each", [2, 4])
def test_few_samples_give_the_same_by_their_inner_products(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = blobs(each)
    test, _ = blobs(10, seed=1)
    few = learned(z, y)
    assert few.ridge._inner_products(few.ridge.hidden(few.features)) is not None
    with monkeypatch.context() as patch:
        patch.setattr(CentredRidge, "_inner_products", lambda ridge, hidden: None)
        by_features = learned(z, y)
    assert few.ridge.strength == by_features.ridge.strength
    for found, wanted in (
        (few.ridge.weights, by_features.ridge.weights),
        (few.calibration.left_out, by_features.calibration.left_out),
        (few.log_probabilities(test), by_features.log_probabilities(test)),
        (few.unknown_scores(test), by_features.unknown_scores(test)),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_inner_products_are_used_only_if_all_samples_of_the_sums_are_there() -> None:
    z, y = blobs(4)
    found = learned(z, y)
    hidden = found.ridge.hidden(found.features)
    assert found.ridge._inner_products(hidden[1:]) is None
    found.ridge.forget(0)  # its part of the Gram matrix stays
    assert found.ridge._inner_products(hidden[found.labels != 0]) is None
    many = learned(*blobs(5))
    assert many.ridge._inner_products(many.ridge.hidden(many.features)) is None  # 25 samples, 40 random features


def test_merging_is_learning_both() -> None:
    z, y = blobs(6)
    test, _ = blobs(5, seed=1)
    first, second = y < 3, y >= 3
    merged, other = learned(z[first], y[first]), learned(z[second], y[second] - 3)
    assert same_features(merged, other) and not same_features(merged, new(seed=1))
    merged.merge(other)
    whole = learned(z, y)
    torch.testing.assert_close(merged.log_probabilities(test), whole.log_probabilities(test), rtol=1e-6, atol=1e-8)


def test_one_image_a_class_or_one_class_is_enough() -> None:
    z, y = blobs(1)
    few = learned(z, y)
    assert few.log_probabilities(z).argmax(dim=1).equal(y)
    assert bool((few.unknown_scores(z) == 0).all()) and len(few.measured()[0]) == 0
    alone = learned(z[:1], y[:1] * 0)
    assert float(alone.log_probabilities(z[:1]).exp()) == pytest.approx(1)


def test_an_equal_image_twice_does_not_break_anything() -> None:
    z = torch.ones(6, DIM)
    found = learned(z, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert bool(found.log_probabilities(z).isfinite().all())


def test_probabilities_are_as_sure_as_they_are_right() -> None:
    z, y = blobs(20)
    test, truth = blobs(200, seed=1)
    log_p = learned(z, y).log_probabilities(test)
    accuracy = float((log_p.argmax(dim=1) == truth).double().mean())
    assert accuracy > 0.8 and float(log_p.exp().amax(dim=1).mean()) == pytest.approx(accuracy, abs=0.08)


def test_unknown_samples_score_higher_and_the_share_of_known_ones_is_kept() -> None:
    z, y = blobs(20)
    test, _ = blobs(200, seed=1)
    found = learned(z, y)
    strange = 3 * torch.randn(300, DIM, generator=torch.Generator().manual_seed(5))
    known, unknown = found.unknown_scores(test), found.unknown_scores(strange)
    assert float((known >= 0.8).double().mean()) < 0.3 and float(unknown.mean()) > float(known.mean()) + 0.2
    assert len(known.unique()) > 500  # graded, not steps


def test_graded_p_values_are_never_below_the_conformal_ones_that_they_replace() -> None:
    held = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sort().values
    scores = torch.linspace(-6, 4, 500, dtype=torch.float64)
    graded, steps = graded_p_values(scores, held), p_values(scores, held)
    inside = scores >= held[0]
    assert bool((graded[inside] >= steps[inside] - 1e-12).all()) and bool((graded <= 1).all())
    assert bool((graded[~inside] < 1 / 31).all()) and bool((graded.diff() >= 0).all())
    assert float(graded_p_values(scores, held[:0]).min()) == 1


def test_the_method_learns_all_images_and_is_measured_by_leaving_each_out(small_stream: Stream) -> None:
    learner = Learner("closed-form", SMALL_VIT, device="cpu")
    learner.learn(small_stream[0], held_out=0.25).learn(small_stream[1], held_out=0)
    method = learner.method
    assert isinstance(method, ClosedFormExperts)
    assert int(method.learned.statistics.seen) == sum(len(task.train) for task in small_stream[:2])
    record = learner.tasks_[0]
    assert record.images == len(small_stream[0].train) and record.held_out == 0 and record.accuracy is not None
    effect = learner.effect_
    assert effect is not None and effect.before.images == effect.after.images == record.images
    assert effect.before.right / record.images == record.accuracy and effect.by == "model"
    found = method.left_out()
    assert found is not None and len(found.labels) == int(method.learned.statistics.seen)


def test_held_out_or_not_gives_the_same_classifier(small_stream: Stream, tmp_path: Path) -> None:
    images = small_stream[0].test
    assert images is not None
    answers = []
    for share in (0.0, 0.4):
        learner = Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0], held_out=share)
        answers.append(learner.log_probabilities(images))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-6)


def test_two_models_merged_are_one_that_learned_both(small_stream: Stream) -> None:
    whole = Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0]).learn(small_stream[1])
    merged = Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0])
    other = Learner("closed-form", SMALL_VIT, device="cpu", seed=7).learn(small_stream[1])
    assert merged.merge(other) == "added" and merged.classes_ == whole.classes_
    images = small_stream[1].test
    assert images is not None
    torch.testing.assert_close(merged.log_probabilities(images), whole.log_probabilities(images), rtol=1e-5, atol=1e-6)


def test_few_images_make_a_closed_form_in_tpl_plus_and_many_do_not(
    small_stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"latent": 16, "epochs": 1, "batch_size": 16, "memory": 30, "random_features": 64}
    learner = Learner("tpl-plus", SMALL_VIT, device="cpu", **options).learn(small_stream[0], held_out=0.25)
    learner.learn(small_stream[1], held_out=0.25)
    method = learner.method
    assert isinstance(method, TPLPlus) and method.closed_ is not None
    assert int(method.closed_.statistics.seen) == sum(
        len(task.train) for task in small_stream[:2]
    )  # held-out ones, too
    assert learner.effect_ is not None and learner.effect_.by == "classifier over all classes"
    learner.save(tmp_path / "model")
    images = small_stream[1].test
    assert images is not None
    again = Learner.load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(again.unknown_score(images), learner.unknown_score(images))
    monkeypatch.setattr(plus, "MANY_IMAGES", 10)
    many = Learner("tpl-plus", SMALL_VIT, device="cpu", **options).learn(small_stream[0])
    assert isinstance(many.method, TPLPlus) and many.method.closed_ is None


@pytest.mark.parametrize("method", ["closed-form", "slda", "ranpac"])
def test_encoding_is_told_part_by_part_and_changes_no_number(
    method: str, small_stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, options = small_stream[0], {"adapt": "none"} if method == "ranpac" else {}
    whole = Learner(method, SMALL_VIT, device="cpu", **options).learn(task, held_out=0)
    monkeypatch.setattr(base, "BLOCK", 12)
    events: list[Event] = []
    told = Learner(method, SMALL_VIT, device="cpu", **options).learn(task, held_out=0, callback=events.append)
    assert [event.data for event in events if event.kind == "encode"] == [
        {"done": done, "images": len(task.train)} for done in (12, 12, 8)
    ]
    assert task.test is not None
    torch.testing.assert_close(told.log_probabilities(task.test), whole.log_probabilities(task.test))


def test_what_fails_while_it_learns_leaves_all_as_it_was(small_stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0])
    before = {name: part.clone() for name, part in learner.method.snapshot().shared.items()}
    images = small_stream[0].test
    assert images is not None
    answers = learner.answers(images)

    def fail(*_: object) -> None:
        raise RuntimeError("the sums are added already")

    with monkeypatch.context() as patch:
        patch.setattr(ClosedForm, "_choose", fail)
        with pytest.raises(RuntimeError, match="added already"):
            learner.learn(small_stream[1])
    after = learner.method.snapshot().shared
    assert after.keys() == before.keys() and all(torch.equal(after[name], part) for name, part in before.items())
    assert learner.answers(images) == answers and learner.classes_ == list(small_stream[0].classes)


def test_a_model_to_be_learned_on_is_tried_without_its_encoder(
    small_stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0]).save(tmp_path / "model")
    cold, warm = (Learner.load(tmp_path / "model", device="cpu", warm=warm) for warm in (False, True))
    images = small_stream[0].test
    assert images is not None and cold.answers(images) == warm.answers(images)

    def passes(*_: object) -> Tensor:
        raise AssertionError("an image is encoded")

    monkeypatch.setattr(ClosedFormExperts, "forward", passes)
    Learner.load(tmp_path / "model", device="cpu", warm=False)
    with pytest.raises(StoreError, match="an image is encoded"):
        Learner.load(tmp_path / "model", device="cpu")
    monkeypatch.setattr(ClosedForm, "log_probabilities", lambda self, z: torch.zeros(len(z), 7))
    with pytest.raises(StoreError, match="gets 7 probabilities for 2 classes"):
        Learner.load(tmp_path / "model", device="cpu", warm=False)


def test_update_and_remove(small_stream: Stream) -> None:
    learner = Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0]).learn(small_stream[1])
    gone = learner.classes_[0]
    learner.remove(gone)
    assert gone not in learner.classes_ and len(learner.classes_) == 3
    method = learner.method
    assert isinstance(method, ClosedFormExperts) and set(method.learned.labels.tolist()) == {0, 1, 2}
    images = small_stream[1].test
    assert images is not None
    assert np.isfinite(learner.predict_proba(images)).all() and (learner.unknown_score(images) <= 1).all()


@pytest.mark.parametrize(("each", "distinct"), [(6, 5), (3, 4)])
def test_the_covariance_is_shrunk_as_far_as_leave_one_out_says(each: int, distinct: int) -> None:
    z, y = blobs(each)
    few = learned(z * torch.linspace(0.2, 3, DIM), y)  # with equal variances, the estimate is the identity anyway
    x = torch.nn.functional.normalize(few.features.double(), dim=1)
    entropies = {}
    for least in closed_form.SHRUNK_AT_LEAST:
        logits = closed_form.Discriminant(few.statistics, least).left_out(x, few.labels)
        entropies[least] = closed_form._sharpness(logits, few.labels, closed_form.USUAL[0])[1]
    assert few.shrunk == max(entropies, key=entropies.__getitem__) and len(set(entropies.values())) == distinct
    again = ClosedForm.from_state(few.state())
    test, _ = blobs(10, seed=1)
    assert again.shrunk == few.shrunk and torch.equal(again.log_probabilities(test), few.log_probabilities(test))
    earlier = few.state() | {"sharpness": few.state()["sharpness"][:2]}  # of a version that did not choose
    assert ClosedForm.from_state(earlier).shrunk == 0


def test_a_class_that_is_forgotten_leaves_nothing_while_all_samples_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    z, y = blobs(6)
    rest = y != 2
    never = learned(z[rest], y[rest] - (y[rest] > 2).long()).state()
    forgotten = learned(z, y)
    forgotten.forget(2)
    for name, part in forgotten.state().items():
        torch.testing.assert_close(part, never[name], rtol=1e-9, atol=1e-12)
    monkeypatch.setattr(closed_form, "STORED", 10)
    partly = learned(z, y)
    partly.forget(2)
    assert partly.classes == CLASSES - 1 and int(partly.statistics.seen) == len(y)  # what is pooled stays


def test_a_picture_that_comes_twice_counts_once(small_stream: Stream) -> None:
    learner = Learner("closed-form", SMALL_VIT, device="cpu").learn(small_stream[0])
    method = learner.method
    assert isinstance(method, ClosedFormExperts) and method.repeated_ == 0
    before = method.state().shared
    learner.update(small_stream[0])
    assert method.repeated_ == len(small_stream[0].train)
    after = method.state().shared
    assert all(torch.equal(part, after[name]) for name, part in before.items())
    z, y = blobs(4)
    found = learned(z, y)
    again = torch.cat([z[:3], z[:3] + 0.01, z[1:2] + 0.01])
    assert found.new_pictures(again, torch.cat([y[:3], y[:3], y[1:2]])).tolist() == [False] * 3 + [True] * 3 + [False]
    assert found.new_pictures(z[:1], (y[:1] + 1) % CLASSES).tolist() == [True]  # the same in another class is a mistake


def test_an_accuracy_has_the_counts_that_it_was_measured_on(small_stream: Stream, tmp_path: Path) -> None:
    task = small_stream[0]
    first = np.flatnonzero(task.train.labels == 0)[:1]  # a class's only image cannot be left out
    others = np.flatnonzero(task.train.labels == 1)
    few = replace(task, train=task.train.select(np.concatenate([first, others])), test=None)
    learner = Learner("closed-form", SMALL_VIT, device="cpu").learn(few)
    record = learner.tasks_[0]
    assert record.images == len(others) + 1 and record.measured is not None and record.measured.images == len(others)
    learner.update(task)
    learner.save(tmp_path / "model")
    assert Learner.load(tmp_path / "model", device="cpu").tasks_[0].measured == record.measured
    assert learner.effect_ is not None
    assert (learner.effect_.before.images, learner.effect_.after.images) == (len(others), len(task.train))
