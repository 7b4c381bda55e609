"""The family over one bank: equal jobs are learned once, and MORE, ROW and HAT answer as their formulas say."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax
from torch import Tensor

from small_encoder import SMALL_VIT
from tensors import ROUNDING, differences, tensors_of
from tpl import Learner
from tpl.engine import Event, Samples, choose_compute, no_callback
from tpl.errors import TplError
from tpl.methods import Method, find_method, learn_together, row
from tpl.methods.bank import Bank, BankMethod, Outputs, training
from tpl.methods.bank import heads as bank_heads
from tpl.methods.bank.heads import Heads
from tpl.methods.hat import HAT
from tpl.methods.more import MORE
from tpl.methods.row import ROW
from tpl.nets import Encoder, create_encoder
from tpl.scores import DETECTORS, NearestNeighbours
from tpl.stream import ArrayImages, Stream, Task

OPTIONS = {"latent": 16, "epochs": 1, "batch_size": 16, "lr": 0.05, "memory": 14}
SIZES = (2, 3, 2)  # classes of each task
Array = NDArray[np.float64]


def pictures(classes: list[int], per_class: int, seed: int) -> ArrayImages:
    """Noise around a colour for each class."""
    colours = np.random.default_rng(5).integers(0, 256, (sum(SIZES), 3))[classes]
    labels = np.repeat(np.arange(len(classes)), per_class)
    noise = np.random.default_rng(seed).normal(0, 40, (len(labels), 32, 32, 3))
    return ArrayImages((colours[labels][:, None, None] + noise).clip(0, 255).astype(np.uint8), labels)


@pytest.fixture(scope="module")
def stream() -> Stream:
    """Three tasks of unequal size, 8 training images and one test image a class."""
    tasks = []
    for t, size in enumerate(SIZES):
        classes = [sum(SIZES[:t]) + c for c in range(size)]
        names = tuple(f"class {c}" for c in classes)
        tasks.append(Task(f"task {t}", names, pictures(classes, 8, t), pictures(classes, 1, 100 + t)))
    return Stream(tasks)


@pytest.fixture(scope="module")
def pixels(stream: Stream) -> Tensor:
    """Test images of all tasks."""
    method = new("tpl")
    return torch.cat([method.samples_of(task.test, no_callback).pixels for task in stream if task.test is not None])


def new(name: str, seed: int = 0, **options: object) -> BankMethod:
    kind = find_method(name)
    method = kind(encoder(), kind.config_class.parse(OPTIONS | options), choose_compute("cpu"), seed)
    assert isinstance(method, BankMethod)
    return method


@cache
def encoder() -> Encoder:
    """One for all: nothing of it is ever trained."""
    return create_encoder(SMALL_VIT)


def spied(patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call of a module's function, which still does its work."""
    calls, real = [], getattr(module, name)

    def spy(*args: Any) -> Any:
        calls.append(args)
        return real(*args)

    patch.setattr(module, name, spy)
    return calls


def fits_of(method: BankMethod, fits: list[tuple[Any, ...]], patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Those of the recorded `fits` that are made while this method concludes a task."""
    own, real = [], method.conclude

    def conclude(*args: Any) -> None:
        first = len(fits)
        real(*args)
        own.extend(fits[first:])

    patch.setattr(method, "conclude", conclude)
    return own


def same_bank(a: Bank, b: Bank) -> bool:
    states = [[m.state_dict() for m in (bank.adapters, *bank.tasks)] for bank in (a, b)]
    pairs = zip(*states, strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


def same_heads(a: Heads, b: Heads) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Family:
    """TPL, MORE, MORE without back-update and ROW, taught three tasks together, with what happened on the way."""

    def __init__(self, stream: Stream, pixels: Tensor) -> None:
        self.tpl, self.more, self.still, self.row = (
            new("tpl"),
            new("more"),
            new("more", back_update_epochs=0),
            new("row"),
        )
        assert isinstance(self.more, MORE) and isinstance(self.still, MORE) and isinstance(self.row, ROW)
        self.events: list[list[Event]] = [[] for _ in self.methods]
        self.first_answers: list[Tensor] = []
        self.memories: list[Tensor] = []  # labels before each task
        self.task_heads: list[list[Heads]] = []  # ROW's after each task
        with pytest.MonkeyPatch.context() as patch:
            trainings = spied(patch, training, "train")
            fits = spied(patch, bank_heads, "fit_heads")
            patch.setattr(row, "fit_heads", bank_heads.fit_heads)
            self.more_fits, self.row_fits = (fits_of(method, fits, patch) for method in (self.more, self.row))
            for task in stream:
                assert self.more.memory is not None
                self.memories.append(self.more.memory.labels)
                learn_together(self.methods, [task] * 4, [own.append for own in self.events])
                self.first_answers = self.first_answers or [m.log_probabilities(pixels) for m in self.methods]
                self.task_heads.append(list(self.row.task_heads_))
            self.networks = [len(networks) for _, _, networks, *_ in trainings]

    @property
    def methods(self) -> list[BankMethod]:
        return [self.tpl, self.more, self.still, self.row]


@pytest.fixture(scope="module")
def family(stream: Stream, pixels: Tensor) -> Family:
    return Family(stream, pixels)


# Equal jobs


def test_methods_that_differ_in_their_answers_alone_are_trained_once(family: Family, pixels: Tensor) -> None:
    assert family.networks == [1, 1, 1]
    assert all(same_bank(family.tpl.bank, method.bank) for method in family.methods[1:])
    answers = [method.log_probabilities(pixels) for method in family.methods]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(answers, 2))


def test_every_method_hears_of_the_one_training(family: Family) -> None:
    told = [[(e.kind, e.data) for e in own if e.kind in ("epoch", "capacity")] for own in family.events]
    assert len(told[0]) == 3 * (1 + 1)
    assert all(own == told[0] for own in told)


@pytest.mark.parametrize("name", ["tpl", "more", "row"])
def test_taught_together_or_alone_the_answer_is_the_same(
    name: str, family: Family, stream: Stream, pixels: Tensor
) -> None:
    alone, together = new(name), getattr(family, name)
    for task in stream:
        alone.learn(task)
    assert same_bank(alone.bank, together.bank)
    assert torch.equal(alone.log_probabilities(pixels), together.log_probabilities(pixels))


def rotated(task: Task, by: int) -> Task:
    """The same images with the classes in another order."""
    labels = (task.train.labels - by) % len(task.classes)
    loaded = np.stack([np.asarray(task.train.load(i)) for i in range(len(labels))])
    return Task(task.name, (*task.classes[by:], *task.classes[:by]), ArrayImages(loaded, labels))


@pytest.mark.parametrize("differ", ["seeds", "orders"])
def test_other_seeds_and_other_class_orders_are_no_twins(
    differ: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = spied(monkeypatch, training, "train")
    names = ("more", "row", "more")
    methods = [new(name, seed=i * (differ == "seeds")) for i, name in enumerate(names)]
    tasks = [rotated(stream[1], i * (differ == "orders")) for i in range(3)]
    learn_together(methods, tasks, [no_callback] * 3)
    assert [len(networks) for _, _, networks, *_ in trainings] == [3]
    assert not any(same_bank(a.bank, b.bank) for a, b in itertools.combinations(methods, 2))


@pytest.mark.parametrize("differ", ["nothing", "generator", "samples", "replay", "used", "adapters", "recipe"])
def test_lessons_are_equal_if_all_that_goes_in_is(differ: str, family: Family, stream: Stream) -> None:
    samples = family.tpl.samples(stream[0], no_callback)
    job, other = (method.training_job(stream[0], samples, no_callback) for method in (family.tpl, family.row))
    bank = copy.copy(other.bank)
    assert other.replay is not None and bank.used is not None
    if differ == "generator":
        other.generator.manual_seed(1)
    elif differ == "samples":
        other = replace(other, samples=Samples(samples.pixels, 1 - samples.labels))
    elif differ == "replay":
        other = replace(other, replay=Samples(other.replay.pixels.flip(0), other.replay.labels))
    elif differ == "used":
        bank.used = 1 - bank.used
    elif differ == "adapters":
        bank.sets = new("tpl").bank.sets
    elif differ == "recipe":
        other = replace(other, recipe=other.recipe.replace(lr=0.1))
    assert job.equals(replace(other, bank=bank)) == (differ == "nothing")


def test_hat_shares_the_first_lesson_with_tpl_and_no_later_one(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a memory yet, both train the same; with one, only TPL replays it."""
    trainings = spied(monkeypatch, training, "train")
    methods: list[Method] = [new(name) for name in ("tpl", "hat")]
    for task in stream[:2]:
        learn_together(methods, [task] * 2, [no_callback] * 2)
    assert [len(networks) for _, _, networks, *_ in trainings] == [1, 1, 1]
    shapes = [[len(model.head_bias) for model in m.bank.tasks] for m in methods if isinstance(m, BankMethod)]
    assert shapes == [[2, 4], [2, 3]]


# MORE and ROW by hand


def features_of(method: BankMethod, pixels: Tensor) -> list[Array]:
    return [method.bank.outputs(pixels, t).features.double().numpy() for t in range(len(method.bank.tasks))]


def logits_of(head: Heads, z: Array) -> Array:
    """A head's answers, `others` last."""
    return np.asarray(z @ head.weight[0].double().numpy().T + head.bias[0].double().numpy())


def distance(z: Array, means: Array, precision: Array) -> Array:
    """The Mahalanobis distance to the nearest mean."""
    apart = z[:, None] - means
    return np.asarray(np.sqrt(np.einsum("ncd,de,nce->nc", apart, precision, apart)).min(axis=1))


def test_mores_answer_is_its_formula(family: Family, pixels: Tensor) -> None:
    """softmax(f / 2) over classes and others, own classes kept, times max_c 20 / d_M; then scaled to add up."""
    raw, best = [], []
    for t, z in enumerate(features_of(family.more, pixels)):
        centre, p = family.more.centres_[t], softmax(logits_of(family.more.heads_[t], z) / 2, axis=1)
        assert p.shape[1] == SIZES[t] + 1
        precision = (centre.whitening_ @ centre.whitening_.T).numpy()
        claim = p[:, :-1] * 20 / distance(z, centre.means_.numpy(), precision)[:, None]
        raw.append(claim)
        best.append(claim.max(axis=1))
    answers = np.concatenate(raw, axis=1)
    answers /= answers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(family.more.log_probabilities(pixels).exp().numpy(), answers, rtol=ROUNDING)
    found = family.more.task_scores(family.more.outputs(pixels))
    np.testing.assert_allclose(found.numpy(), np.stack(best, axis=1), rtol=ROUNDING)


def test_rows_answer_is_its_formula(family: Family, stream: Stream, pixels: Tensor) -> None:
    """softmax(WP / 5) * max softmax(TP / 5) * MD_j / sum_i MD_i, with 0.8 Sigma + 0.2 I from the training images."""
    within, sure, close = [], [], []
    for t, z in enumerate(features_of(family.row, pixels)):
        samples = family.row.samples(stream[t], no_callback)
        known, y = features_of(family.row, samples.pixels)[t], samples.labels.numpy()
        means = np.stack([known[y == c].mean(axis=0) for c in range(SIZES[t])])
        covariance = (known - means[y]).T @ (known - means[y]) / len(y)
        precision = np.linalg.inv(0.8 * covariance + 0.2 * np.eye(len(covariance)))
        close.append(1 / distance(z, means, precision))
        sure.append(softmax(logits_of(family.row.task_heads_[t], z) / 5, axis=1)[:, :-1].max(axis=1))
        within.append(softmax(logits_of(family.row.class_heads_[t], z)[:, :-1] / 5, axis=1))
    scores = np.stack(sure, axis=1) * np.stack(close, axis=1) / np.sum(close, axis=0)[:, None]
    answers = np.concatenate([p * scores[:, t : t + 1] for t, p in enumerate(within)], axis=1)
    answers /= answers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(family.row.task_scores(family.row.outputs(pixels)).numpy(), scores, rtol=1e-6)
    np.testing.assert_allclose(family.row.log_probabilities(pixels).exp().numpy(), answers, rtol=1e-6)


def test_after_one_task_the_answer_is_its_head_alone(family: Family, pixels: Tensor) -> None:
    logits = family.tpl.bank.outputs(pixels, 0).logits.double().numpy()
    for method, temperature in (("more", 2), ("row", 5)):
        found = family.first_answers[family.methods.index(getattr(family, method))]
        np.testing.assert_allclose(found.numpy(), log_softmax(logits / temperature, axis=1), rtol=1e-5, atol=1e-6)


# MORE's back-update


def bank_head(method: BankMethod, task: int) -> tuple[Tensor, Tensor]:
    return method.bank.tasks[task].head_weight.unsqueeze(0), method.bank.tasks[task].head_bias.unsqueeze(0)


def test_the_back_update_changes_earlier_heads_and_nothing_else(family: Family) -> None:
    assert same_bank(family.more.bank, family.tpl.bank)
    for t in range(3):
        (weight, bias), before, after = bank_head(family.more, t), family.still.heads_[t], family.more.heads_[t]
        assert torch.equal(before.weight[:, : weight.shape[1]], weight)
        assert torch.equal(before.bias[:, : bias.shape[1]], bias)
        assert same_heads(before, after) == (t == 2)


def test_the_back_update_fits_the_memory_better(family: Family) -> None:
    assert family.more.memory is not None
    owner, labels = family.more.memory_tasks(family.more.task_classes_), family.more.memory.labels
    for t, seen in enumerate(family.more.memory_outputs_[:2]):
        wanted = torch.where(owner == t, labels - sum(SIZES[:t]), SIZES[t])
        logits = (method.heads_[t].logits(seen.features[None])[0] for method in (family.still, family.more))
        before, after = (float(F.cross_entropy(answers, wanted)) for answers in logits)
        assert after < 0.9 * before


def among(some: Tensor, known: Tensor) -> bool:
    """Whether every row of one is a row of the other, up to rounding; rows of two images are much further apart."""
    return bool(((some[:, None] - known).abs() < ROUNDING * known.abs().max()).all(dim=2).any(dim=1).all())


def test_the_back_update_shows_every_head_its_own_masks_features(family: Family, stream: Stream) -> None:
    """The memory and as many new images, which are `others` to every earlier head."""
    assert [len(heads.bias) for heads, *_ in family.more_fits] == [1, 1, 1]  # of task 0, then of 0 and of 1
    remembered, owner = family.memories[2], family.more.memory_tasks(family.more.task_classes_)
    known = features_of(family.more, family.more.samples(stream[2], no_callback).pixels)
    for t, (heads, features, labels, rows, lr, _) in enumerate(family.more_fits[1:]):
        count = len(remembered)
        assert features.shape[1] == 2 * count and len(rows) == 10 * -(-2 * count // 16) and lr == 0.01
        assert among(features[0, count:], torch.from_numpy(known[t]).float())
        assert among(family.more.memory_outputs_[t].features[owner < 2], features[0, :count])  # what is left of it
        own = (remembered >= sum(SIZES[:t])) & (remembered < sum(SIZES[: t + 1]))
        assert torch.equal(labels[0, :count], torch.where(own, remembered - sum(SIZES[:t]), SIZES[t]))
        assert bool((labels[0, count:] == SIZES[t]).all())
        assert heads.bias.shape == (1, SIZES[t] + 1)


# ROW's two heads


def test_the_head_for_classes_sees_the_new_task_alone(family: Family, stream: Stream) -> None:
    calls = [family.row_fits[0], family.row_fits[3]]  # after it come the heads for tasks: two groups each time
    assert len(family.row_fits) == 6
    for t, (heads, features, labels, rows, lr, momentum) in enumerate(calls, start=1):
        samples = family.row.samples(stream[t], no_callback)
        assert torch.equal(features[0], family.row.bank.outputs(samples.pixels, t).features)
        assert torch.equal(labels[0], samples.labels)
        assert rows.shape == (5 * -(-len(samples) // 32), 1, 32) and (lr, momentum) == (0.05, 0.9)
        assert same_heads(heads, Heads(*bank_head(family.row, t)))  # where it starts
        assert not same_heads(heads, family.row.class_heads_[t])
    first = family.row.class_heads_[0]  # the first task has nobody to be told from: its head stays
    assert torch.equal(first.weight[:, :2], bank_head(family.row, 0)[0])


def test_every_tasks_head_for_tasks_is_trained_on_after_each_task(family: Family) -> None:
    assert [len(heads) for heads in family.task_heads] == [1, 2, 3]
    for before, after in itertools.pairwise(family.task_heads):
        assert not any(same_heads(a, b) for a, b in zip(before, after, strict=False))
    for t in (1, 2):  # it begins as a copy of the task's own head
        assert not same_heads(family.task_heads[t][t], Heads(*bank_head(family.row, t)))


def test_heads_for_tasks_meet_as_many_of_their_own_as_of_others(family: Family) -> None:
    groups = [[[0], [1]], [[0, 2], [1]]]  # equally many outputs are trained at once
    for fits, members in zip((family.row_fits[1:3], family.row_fits[4:6]), groups, strict=True):
        assert [len(heads.bias) for heads, *_ in fits] == [len(group) for group in members]
        for (heads, features, labels, rows, *_), group in zip(fits, members, strict=True):
            for i, t in enumerate(group):
                assert heads.bias.shape[1] == SIZES[t] + 1 and features.shape[:2] == labels.shape
                own, others = (part[part >= 0] for part in rows[:, i].split(32, dim=1))
                assert len(own) == len(others) > 0
                assert bool((labels[i, own] < SIZES[t]).all()) and bool((labels[i, others] == SIZES[t]).all())
                assert set(own.tolist()) | set(others.tolist()) == set(range(features.shape[1]))


def test_heads_for_tasks_are_shown_their_own_masks_features(family: Family, stream: Stream) -> None:
    owner = family.row.memory_tasks(family.row.task_classes_)
    known = features_of(family.row, family.row.samples(stream[2], no_callback).pixels)
    shown = [*family.row_fits[4][1].unbind(), *family.row_fits[5][1].unbind()]
    for t, features in zip((0, 2, 1), shown, strict=True):
        count = len(family.memories[2])
        assert among(features[count:], torch.from_numpy(known[t]).float())
        assert among(family.row.memory_outputs_[t].features[owner < 2], features[:count])


# HAT and its detectors


class Seen(NamedTuple):
    """Some images as every task's model sees them: all at once, and one by one."""

    together: list[Outputs]
    alone: list[list[Outputs]]


@pytest.fixture(scope="module")
def learner(stream: Stream) -> Learner:
    learner = Learner("hat", SMALL_VIT, device="cpu", extra_scores="all", **OPTIONS)  # type: ignore[arg-type]
    for task in stream:
        learner.learn(task)
    return learner


@pytest.fixture(scope="module")
def hat(learner: Learner) -> HAT:
    assert isinstance(learner.method, HAT)
    return learner.method


@pytest.fixture(scope="module")
def seen(hat: HAT, pixels: Tensor) -> dict[bool, Seen]:
    """By whether the detector is ODIN, which looks at other images."""
    found = {}
    for perturbed in (True, False):
        hat.rescore(score="odin" if perturbed else "msp")
        found[perturbed] = Seen(hat.outputs(pixels), [hat.outputs(one) for one in pixels[::3].split(1)])
    return found


@pytest.fixture(scope="module", params=DETECTORS)
def detector(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_answers_of_a_detector_add_up_and_do_not_depend_on_the_batch(
    hat: HAT, detector: str, seen: dict[bool, Seen]
) -> None:
    hat.rescore(score=detector, task_choice="hard")
    together = hat.log_probabilities_of(seen[detector == "odin"].together)
    alone = torch.cat([hat.log_probabilities_of(one) for one in seen[detector == "odin"].alone])
    torch.testing.assert_close(together.exp().sum(dim=1), torch.ones(len(together), dtype=torch.float64))
    assert torch.equal(together[::3].argmax(dim=1), alone.argmax(dim=1))
    torch.testing.assert_close(together[::3], alone, rtol=ROUNDING, atol=ROUNDING)


def test_a_hard_choice_is_the_best_class_of_the_best_scored_task(
    hat: HAT, detector: str, seen: dict[bool, Seen]
) -> None:
    hat.rescore(score=detector, task_choice="hard")
    outputs = seen[detector == "odin"].together
    scores, answers = hat.task_scores(outputs), hat.log_probabilities_of(outputs)
    assert scores.shape == (len(answers), 3) and scores.dtype == torch.float64
    for i, t in enumerate(scores.argmax(dim=1).tolist()):
        best = sum(SIZES[:t]) + int(outputs[t].logits[i].argmax())
        assert int(answers[i].argmax()) == best
        within = outputs[t].logits[i].double().softmax(dim=0)
        torch.testing.assert_close(answers[i].exp()[sum(SIZES[:t]) :][: SIZES[t]], within, rtol=1e-6, atol=1e-8)


def test_a_calibrated_choice_leaves_the_scores_raw(hat: HAT, detector: str, seen: dict[bool, Seen]) -> None:
    outputs = seen[detector == "odin"].together
    hat.rescore(score=detector, task_choice="hard")
    hard, raw = hat.log_probabilities_of(outputs), hat.task_scores(outputs)
    assert hat.calibration_ is None
    hat.rescore(task_choice="calibrated")
    assert hat.calibration_ is not None and hat.calibration_.shape == (2, 3)
    assert torch.equal(hat.task_scores(outputs), raw)
    answers = hat.log_probabilities_of(outputs)
    task_p = (raw * hat.calibration_[0] + hat.calibration_[1]).softmax(dim=1)
    parts = answers.exp().split(SIZES, dim=1)
    torch.testing.assert_close(torch.stack([part.sum(dim=1) for part in parts], dim=1), task_p)
    hat.rescore(task_choice="hard")
    assert torch.equal(hat.log_probabilities_of(outputs), hard)


def test_a_saved_detector_answers_the_same(
    learner: Learner, hat: HAT, detector: str, seen: dict[bool, Seen], tmp_path: Path
) -> None:
    outputs = seen[detector == "odin"].together
    hat.rescore(score=detector, task_choice="calibrated")
    learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu").method
    assert isinstance(again, HAT) and again.config == hat.config
    assert differences(tensors_of(again), tensors_of(hat)) == []
    assert torch.equal(again.log_probabilities_of(outputs), hat.log_probabilities_of(outputs))
    hat.rescore(task_choice="hard")
    again.rescore(task_choice="hard")
    assert torch.equal(again.log_probabilities_of(outputs), hat.log_probabilities_of(outputs))


def test_another_detector_is_asked_about_held_out_images_too(hat: HAT, seen: dict[bool, Seen]) -> None:
    for name in ("mls", "knn", "vim"):
        hat.rescore(score=name, task_choice="hard")
        hat.unknown_scores_of(seen[False].together)
        assert hat._held_scores is not None
        assert all(torch.equal(hat.held_out_scores(t), known) for t, known in enumerate(hat._held_scores))


def test_knn_compares_with_the_tasks_own_exemplars(hat: HAT) -> None:
    hat.rescore(score="knn", task_choice="hard")
    owner = hat.memory_tasks(hat.task_classes_)
    assert owner.bincount().tolist() == [4, 6, 4]
    stored = hat.memory.pixels(hat.preprocess, hat.compute.device)
    for t, detectors in enumerate(hat.detectors_):
        knn = detectors["knn"]
        assert isinstance(knn, NearestNeighbours)
        own = hat.bank.outputs(stored[owner == t], t).features.double()
        torch.testing.assert_close(knn.bank_, own / own.norm(dim=1, keepdim=True))


def test_odins_images_make_the_predicted_class_likelier(seen: dict[bool, Seen]) -> None:
    for plain, perturbed in zip(seen[False].together, seen[True].together, strict=True):
        clean, moved = plain.logits.double().softmax(dim=1), perturbed.features.double().softmax(dim=1)
        assert torch.equal(perturbed.logits, plain.logits) and moved.shape == clean.shape
        predicted = clean.argmax(dim=1, keepdim=True)
        assert float((moved - clean).gather(1, predicted).mean()) > 0


def test_to_odin_and_back_nothing_has_changed(hat: HAT, seen: dict[bool, Seen]) -> None:
    hat.rescore(score="knn", task_choice="calibrated")
    answers = hat.log_probabilities_of(seen[False].together)
    hat.rescore(score="odin")
    assert not torch.equal(hat.log_probabilities_of(seen[True].together), answers)
    assert [o.features.shape[1] for o in hat.memory_outputs_] == list(SIZES)  # it is calibrated on what it looks at
    hat.rescore(score="knn")
    assert torch.equal(hat.log_probabilities_of(seen[False].together), answers)


# Outliers


@pytest.mark.parametrize(("technique", "first"), [("oe", "misplaced"), ("oe", "none"), ("mixoe", "misplaced")])
def test_outliers_are_stored_images_and_before_there_are_any_misplaced_ones(
    stream: Stream, technique: str, first: str
) -> None:
    method = new("hat", technique=technique, memory=6, first_outliers=first)
    samples = [method.samples(task, no_callback) for task in stream[:2]]
    replay = method.training_job(stream[0], samples[0], no_callback).replay
    if (technique, first) != ("oe", "misplaced"):  # a box of a task's own image, as mixoe would paste, is no outlier
        assert replay is None
    else:
        assert replay is not None and len(replay) == 6  # no more than will be stored
        assert replay.labels.unique().tolist() == [len(stream[0].classes)]
        inks = {int(image.sum()) for image in samples[0].pixels}
        assert {int(image.sum()) for image in replay.pixels} <= inks  # the task's own, and yet none of them
        assert not any(torch.equal(a, b) for a in replay.pixels for b in samples[0].pixels)
    method.learn(stream[0])
    stored = method.training_job(stream[1], samples[1], no_callback).replay
    assert stored is not None and torch.equal(
        stored.pixels, method.memory.pixels(method.preprocess, method.compute.device)
    )


# What cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "knn", "memory": 0}, "score=knn compares with stored images: give it a memory"),
        ({"extra_scores": "msp,knn", "memory": 0}, "knn compares with stored images: give it a memory"),
        ({"technique": "oe", "memory": 0}, "technique=oe trains against stored images: give it a memory"),
        ({"technique": "mixup", "rotation_classes": True}, "rotation_classes=true and technique=mixup are two ways"),
        (
            {"task_choice": "calibrated", "memory": 0},
            "task_choice=calibrated is fitted on stored images: give it a memory",
        ),
        ({"extra_scores": "msp,nonsense"}, "There is no detector 'nonsense'; there are gradnorm"),
        ({"score": "nonsense"}, "score must be one of"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(TplError, match=message):
        new("hat", **options)


def test_a_model_without_exemplars_and_further_detectors_says_so(stream: Stream) -> None:
    method = new("hat")
    assert isinstance(method, HAT)
    method.learn(stream[0])
    before = method.config
    for changes, message in (
        ({"score": "mls"}, "mls was not fitted; the model has msp"),
        ({"score": "knn"}, "stored images, and this model has none"),
        ({"task_choice": "calibrated"}, "stored images, and this model has none"),
        ({"lr": 0.1}, "lr cannot change"),
        ({"score": "nonsense"}, "score must be one of"),
    ):
        with pytest.raises(TplError, match=message):
            method.rescore(**changes)
        assert method.config is before


def test_a_training_option_cannot_be_rescored(hat: HAT) -> None:
    with pytest.raises(TplError, match="technique, latent cannot change once a task is learned"):
        hat.rescore(score="mls", technique="mixup", latent=8)


def test_a_model_stays_ready_for_what_it_was_ready_for(small_stream: Stream, tmp_path: Path) -> None:
    options = {"latent": 16, "epochs": 1, "batch_size": 32, "memory": 24}
    learner = Learner(
        "hat", SMALL_VIT, device="cpu", score="mls", extra_scores="msp", task_choice="calibrated", **options
    )
    learner.learn(small_stream[0])
    assert isinstance(learner.method, HAT)
    learner.method.rescore(score="msp", task_choice="hard")
    learner.save(tmp_path / "model")
    again = Learner.load(tmp_path / "model", device="cpu")
    again.learn(small_stream[1])
    assert isinstance(again.method, HAT)
    assert len(again.method.memory) > 0 and all(set(found) == {"mls", "msp"} for found in again.method.detectors_)
    again.method.rescore(score="mls", task_choice="calibrated")
    assert again.method.calibration_ is not None


def test_a_supermask_is_a_share() -> None:
    with pytest.raises(TplError, match="at most 1; got 1.5"):
        Learner("supsup", SMALL_VIT, device="cpu", supermask=1.5)
