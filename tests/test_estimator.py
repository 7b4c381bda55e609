"""TPLClassifier: scikit-learn's own checks, and what makes it TPL."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from tpl.errors import TplError
from tpl.estimator import TPLClassifier
from tpl.methods.vectors import VectorConfig, VectorMemory, VectorTPL
from tpl.stream import Task
from tpl.stream.vectors import Standardise, VectorSet, standardisation

Data = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]
TASKS = ([0, 1], [2, 3], [4, 5], [6, 7], [8, 9])


@parametrize_with_checks([TPLClassifier(random_state=0)])  # not one expected failure
def test_scikit_learns_own_checks(estimator, check) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def digits() -> Data:
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    return x, y, x_test, y_test


@pytest.fixture(scope="module")
def stages(digits: Data) -> list[TPLClassifier]:
    """The classifier as it was after each of five tasks."""
    x, y, *_ = digits
    classifier = TPLClassifier(batch_size=64, memory=200, random_state=0)
    copies = []
    for task in TASKS:
        rows = np.isin(y, task)
        copies.append(copy.deepcopy(classifier.partial_fit(x[rows], y[rows])))
    return copies


@pytest.fixture
def in_tasks(stages: list[TPLClassifier]) -> TPLClassifier:
    return stages[-1]


def blobs(classes, per_class: int = 30, seed: int = 0, features: int = 6):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(0, 4, (20, features))
    x = np.concatenate([centres[c] + rng.normal(0, 1, (per_class, features)) for c in classes])
    return x, np.repeat(classes, per_class)


QUICK = {"epochs": 4, "latent": 16, "width": 8, "random_state": 0}


# Quality on the digits


def test_five_tasks_come_close_to_learning_everything_at_once(digits, in_tasks) -> None:
    x, y, x_test, y_test = digits
    joint = TPLClassifier(batch_size=64, random_state=0).fit(x, y).score(x_test, y_test)
    accuracy = in_tasks.score(x_test, y_test)
    assert joint > 0.95
    assert accuracy > 0.93
    assert accuracy > joint - 0.04


def test_unseen_classes_stand_out_and_known_ones_are_rejected_rarely(digits, stages) -> None:
    _, _, x_test, y_test = digits
    classifier = stages[2]
    known = y_test < 6
    unknown = classifier.unknown_score(x_test)
    assert unknown.min() >= 0 and unknown.max() < 1
    assert roc_auc_score(~known, unknown) > 0.85
    for share in (0.05, 0.1, 0.2):
        rejected = (unknown[known] >= 1 - share).mean()
        held_out = sum(task.held_out for task in classifier.tasks_)
        assert rejected <= share + 3 * (share * (1 - share) * (1 / known.sum() + 1 / held_out)) ** 0.5


def test_task_probabilities_sum_class_probabilities(digits, in_tasks) -> None:
    x_test = digits[2][:50]
    classes, tasks = in_tasks.predict_proba(x_test), in_tasks.task_proba(x_test)
    assert tasks.shape == (50, 5)
    for t, task in enumerate(in_tasks.tasks_):
        columns = np.searchsorted(in_tasks.classes_, task.classes)
        np.testing.assert_allclose(classes[:, columns].sum(axis=1), tasks[:, t], atol=1e-12)


# No forgetting


def test_old_tasks_features_keep_every_bit() -> None:
    x, _ = blobs(range(8))
    classifier = TPLClassifier(**QUICK | {"epochs": 20}).partial_fit(*blobs([0, 1])).partial_fit(*blobs([2, 3]))
    vectors = classifier.model_.prepared(x)
    before = [classifier.model_.bank.outputs(vectors, t) for t in range(2)]
    weights = classifier.model_.bank.adapters.down_weight.clone()
    frozen = classifier.model_.bank.capacity()["frozen"]
    assert 0 < frozen < 1
    classifier.partial_fit(*blobs([4, 5])).partial_fit(*blobs([6, 7]))
    assert not torch.equal(weights, classifier.model_.bank.adapters.down_weight)  # something was trained
    for t, (features, logits) in enumerate(before):
        after = classifier.model_.bank.outputs(vectors, t)
        assert torch.equal(features, after.features) and torch.equal(logits, after.logits)


def test_a_failed_task_leaves_the_classifier_as_it_was() -> None:
    x, y = blobs([0, 1])
    classifier = TPLClassifier(**QUICK).fit(x, y)
    before = classifier.predict_proba(x)
    more, labels = blobs([2, 3])
    classifier.model_.config = classifier.model_.config.replace(lr=1e30)
    with pytest.raises(ValueError, match="learning rate"):
        classifier.partial_fit(more, labels)
    assert classifier.classes_.tolist() == [0, 1] and len(classifier.tasks_) == 1
    np.testing.assert_array_equal(before, classifier.predict_proba(x))


# Known classes again


def test_known_classes_refresh_statistics_and_train_nothing() -> None:
    x, y = blobs([0, 1, 2, 3])
    classifier = TPLClassifier(**QUICK, memory=40)
    classifier.partial_fit(x[y < 2], y[y < 2]).partial_fit(x[y >= 2], y[y >= 2])
    bank, probe = classifier.model_.bank, classifier.model_.prepared(x)
    weights = [w.clone() for w in bank.adapters.weights]
    outputs = bank.outputs(probe, 0)
    whole = classifier.model_.scores_[1].centres.means_.clone()
    drifted, labels = blobs([0, 1], per_class=50, seed=1)
    classifier.partial_fit(drifted + 0.5, labels)
    bank = classifier.model_.bank
    assert len(classifier.tasks_) == 2
    assert [(task.samples, task.updates, task.held_out) for task in classifier.tasks_] == [(54, 90, 16), (54, 0, 6)]
    assert all(torch.equal(a, b) for a, b in zip(weights, bank.adapters.weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outputs, bank.outputs(probe, 0), strict=True))
    assert torch.equal(whole, classifier.model_.scores_[1].centres.means_)  # the other task's
    # Half of the memory of a drifted class should be new by now: 27 samples came first, 45 later.
    memory = classifier.model_.memory
    assert [len(exemplars) for exemplars in memory.exemplars] == [10, 10, 10, 10]
    rows = {tuple(row) for row in classifier.model_.prepared(drifted + 0.5).tolist()}
    assert 1 <= sum(tuple(vector.tolist()) in rows for _, vector in memory.exemplars[0]) <= 10


def test_refreshed_means_are_those_of_all_samples() -> None:
    x, y = blobs([0, 1])
    more, labels = blobs([0, 1], seed=5)
    classifier = TPLClassifier(**QUICK, held_out=0).fit(x, y).partial_fit(more, labels)
    model = classifier.model_
    features = model.bank.outputs(model.prepared(np.concatenate([x, more])), 0).features
    both = np.concatenate([y, labels])
    expected = torch.stack([features[torch.from_numpy(both == c)].mean(dim=0) for c in (0, 1)])
    torch.testing.assert_close(model.scores_[0].centres.means_, expected)


def test_a_mixed_batch_refreshes_the_known_and_learns_the_new() -> None:
    x, y = blobs([4, 7])
    classifier = TPLClassifier(**QUICK).partial_fit(x, y)
    mixed, labels = blobs([7, 2, 5])
    classifier.partial_fit(mixed, labels)
    assert [task.classes for task in classifier.tasks_] == [(4, 7), (2, 5)]
    assert [task.updates for task in classifier.tasks_] == [27, 0]
    assert classifier.classes_.tolist() == [2, 4, 5, 7]
    assert classifier.arrived_.tolist() == [4, 7, 2, 5]
    everything, labels = blobs([2, 4, 5, 7], seed=3)
    assert classifier.score(everything, labels) > 0.9  # columns follow the sorted classes


# Labels, options, odd sizes


def test_labels_and_classes_are_checked() -> None:
    x, y = blobs([0, 1])
    classifier = TPLClassifier(**QUICK)
    with pytest.raises(ValueError, match="not in classes: \\[1\\]"):
        classifier.partial_fit(x, y, classes=[0])
    classifier.partial_fit(x, y, classes=[0, 1, 2])
    assert classifier.classes_.tolist() == [0, 1]  # 2 has not come yet
    with pytest.raises(ValueError, match="[Mm]ix of label"):
        classifier.partial_fit(x, np.where(y == 0, "a", "b"))
    assert len(classifier.tasks_) == 1


def test_words_of_growing_length_stay_whole() -> None:
    x, y = blobs([0, 1, 2])
    names = np.array(["ox", "cat", "elephant"])
    classifier = TPLClassifier(**QUICK)
    for c in range(3):
        classifier.partial_fit(x[y == c], names[y[y == c]])
    assert classifier.classes_.tolist() == ["cat", "elephant", "ox"]
    assert set(classifier.predict(x)) == {"ox", "cat", "elephant"}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"latent": 0}, "latent must be at least 1"), ({"held_out": 1.0}, "held_out must be below 1"),
     ({"standardise": "yes"}, "standardise must be one of"), ({"gamma": 0}, "gamma must be above 0"),
     ({"device": "abacus"}, "Device 'abacus' cannot be used here"), ({"lr": "fast"}, "lr must be a float")],
)  # fmt: skip
def test_bad_options_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        TPLClassifier(**options).fit(*blobs([0, 1]))


@pytest.mark.parametrize("options", [{"memory": 0}, {"memory": 3}, {"held_out": 0}, {"width": 0, "depth": 2}])
def test_no_memory_no_held_out_samples_no_random_units(options) -> None:
    classifier = TPLClassifier(**(QUICK | options))
    for c in (0, 1), (2,), (3, 4):
        classifier.partial_fit(*blobs(c))
    x, y = blobs(range(5), seed=8)
    assert classifier.score(x, y) > 0.5
    assert np.isfinite(classifier.predict_log_proba(x)).all()
    if options.get("held_out") == 0:
        assert (classifier.unknown_score(x) == 0).all()


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    x, y = blobs([0, 1, 2, 3])
    numbers = []
    for seed in (0, 0, 1):
        classifier = TPLClassifier(**QUICK | {"random_state": seed})
        for classes in ([0, 1], [2, 3]):
            rows = np.isin(y, classes)
            classifier.partial_fit(x[rows], y[rows])
        numbers.append(classifier.predict_proba(x))
    np.testing.assert_array_equal(numbers[0], numbers[1])
    assert not np.array_equal(numbers[0], numbers[2])


def test_answers_do_not_depend_on_the_batch(digits, in_tasks) -> None:
    x_test = digits[2][:40]
    alone = np.concatenate([in_tasks.predict_proba(x_test[i : i + 1]) for i in range(40)])
    np.testing.assert_allclose(alone, in_tasks.predict_proba(x_test), atol=1e-10)
    np.testing.assert_allclose(
        np.concatenate([in_tasks.unknown_score(part) for part in np.array_split(x_test, 3)]),
        in_tasks.unknown_score(x_test),
    )


def test_standardisation_survives_features_that_do_not_vary() -> None:
    x = np.array([[1.0, 5.0, 0.1], [3.0, 5.0, 0.3]])
    found = standardisation(x, "features")
    np.testing.assert_allclose(found["mean"], [2, 5, 0.2])
    usual = np.sqrt((1 + 0.01) / 2)
    np.testing.assert_allclose(found["scale"], [1, 1 / usual, 10])
    np.testing.assert_allclose(standardisation(x, "global")["scale"], 1 / usual)
    np.testing.assert_allclose(standardisation(x, "none")["scale"], 1)
    far = Standardise(found).batch(VectorSet(np.array([[1e9, 5.0, 0.1]])))
    torch.testing.assert_close(far, torch.tensor([[10.0, 0.0, -1.0]]))  # cut off


def test_the_memory_is_nested_and_within_its_budget() -> None:
    memory, vectors = VectorMemory(10), np.arange(60.0).reshape(30, 2)
    plain = Standardise(standardisation(vectors, "none"))
    kept: list[set[tuple[float, ...]]] = []
    for c in range(4):
        before = memory.pixels(plain)
        stayed = memory.add(VectorSet(vectors + 100 * c), 1, plain)
        stored, labels = memory.pixels(plain), memory.labels
        assert torch.equal(stored[: len(stayed)], before[stayed])
        assert len(stored) == len(labels) == 10 // (c + 1) * (c + 1)
        kept.append({tuple(row) for row in stored[labels == 0].tolist()})
    assert kept[0] > kept[1] > kept[2] > kept[3]
    before = memory.pixels(plain)
    origin = memory.redraw({0: VectorSet(vectors + 900)}, {0: 30}, plain)
    after = memory.pixels(plain)
    assert torch.equal(after[origin >= 0], before[origin[origin >= 0]])
    assert bool((after[origin < 0] >= 900).all())
    keys = [key for key, _ in memory.exemplars[0]]
    assert keys == sorted(keys) and len(keys) == 2
    again = VectorMemory(10)
    again.load_state(memory.state())
    assert torch.equal(again.pixels(plain), after) and torch.equal(again.labels, memory.labels)


# Saving, and life among other estimators


def test_pickle_and_joblib_give_back_the_same_and_go_on_learning(tmp_path: Path) -> None:
    x, y = blobs([0, 1, 2, 3])
    classifier = TPLClassifier(**QUICK).partial_fit(x[y < 2], y[y < 2])
    joblib.dump(classifier, tmp_path / "model.joblib", compress=3)
    for again in (pickle.loads(pickle.dumps(classifier)), joblib.load(tmp_path / "model.joblib")):
        np.testing.assert_array_equal(classifier.predict_proba(x), again.predict_proba(x))
        np.testing.assert_array_equal(classifier.unknown_score(x), again.unknown_score(x))
        more = clone(classifier).partial_fit(x[y < 2], y[y < 2]).partial_fit(x[y >= 2], y[y >= 2])
        np.testing.assert_array_equal(more.predict_proba(x), again.partial_fit(x[y >= 2], y[y >= 2]).predict_proba(x))
    assert classifier.classes_.tolist() == [0, 1]


def test_a_model_of_a_missing_device_is_read_on_the_cpu() -> None:
    x, y = blobs([0, 1])
    classifier = TPLClassifier(**QUICK).fit(x, y)
    classifier.model_.device = "cuda:99"
    written = pickle.dumps(classifier)
    with pytest.warns(UserWarning, match="computing on the CPU"):
        again = pickle.loads(written)
    np.testing.assert_array_equal(classifier.predict_proba(x), again.predict_proba(x))


def test_it_works_in_pipelines_and_searches() -> None:
    x, y = blobs([0, 1, 2])
    pipeline = make_pipeline(StandardScaler(), TPLClassifier(**QUICK))
    search = GridSearchCV(pipeline, {"tplclassifier__latent": [4, 16]}, cv=2).fit(x, y)
    assert search.best_score_ > 0.8
    assert set(search.cv_results_["param_tplclassifier__latent"]) == {4, 16}


def test_the_example_in_the_documentation_runs() -> None:
    page = (Path(__file__).parents[1] / "docs" / "estimator.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    names: dict[str, float] = {}
    exec(example[1], names)
    assert names["accuracy"] > 0.95
    assert names["caught"] > 0.8


@pytest.mark.parametrize("options", [{"augment": "flip"}, {"rotation_classes": True}, {"tta": "flip"}])
def test_vectors_are_not_mirrored_or_turned(options) -> None:
    with pytest.raises(TplError, match=f"{next(iter(options))}=.* is for images"):
        VectorConfig(**options)


@pytest.mark.parametrize("kind", ["features", "none"])
def test_it_is_tpl_with_all_its_options(kind: str) -> None:
    """Without a memory of vectors, say: what stands in for images stands in for vectors, too."""
    model = VectorTPL.new(blobs([0, 1])[0], VectorConfig(memory_kind=kind, lr=0.05), "cpu", seed=0)
    for t, classes in enumerate(([0, 1], [2, 3], [4, 5])):
        x, y = blobs(classes)
        model.learn(Task(f"task {t}", tuple(map(str, classes)), VectorSet(x, y - classes[0])))
    x, y = blobs(range(6), seed=8)
    answers = model.answer(model.prepared(x))
    assert len(model.memory) == 0
    assert (answers.log_p.argmax(dim=1).numpy() == y).mean() > 0.8
    before, kept = model.outputs(model.prepared(x), [])[0], copy.deepcopy(model)
    model.remove("4")
    assert model.classes_ == ["0", "1", "2", "3", "5"]
    assert torch.equal(model.outputs(model.prepared(x), [])[0].logits, before.logits)
    torch.testing.assert_close(kept.answer(kept.prepared(x)).log_p, answers.log_p)
