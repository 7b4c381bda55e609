"""TPL over feature vectors, as a scikit-learn classifier.

from tpl import TPLClassifier

classifier = TPLClassifier(random_state=0)
classifier.partial_fit(X1, y1)      # a first task
classifier.partial_fit(X2, y2)      # new classes: one more task, the first does not change
classifier.predict(X)

The samples are embeddings of any kind (text, audio, images), and a small network replaces the pre-trained encoder.
Bank, training, scores and calibration are the same as for images.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor

from tpl.engine import Samples, no_callback
from tpl.errors import TplError
from tpl.methods.bank import ENOUGH_TO_HOLD_OUT
from tpl.methods.base import task_of_class
from tpl.methods.vectors import VectorConfig, VectorTPL
from tpl.stream import Task
from tpl.stream.vectors import VectorSet


@dataclass(frozen=True)
class VectorTask:
    """One task of a classifier: its classes, and the numbers of samples for training, for updates, and held out."""

    classes: tuple[Any, ...]
    samples: int
    updates: int
    held_out: int


class TPLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that keeps learning new classes and does not forget the old ones.

    Every `partial_fit` with new classes is one more task: it trains free weights of a small masked network, a head and
    statistics of its own. At prediction every task's model scores a sample by a likelihood ratio, which gives
    P(task | x), times P(class | x, task). The outputs of an earlier task's model never change.

    Samples of known classes are not trained on: they update the class's statistics and its share of the memory.

    Parameters
    ----------
    latent : int, default=64
        Hidden units of an adapter. Tasks share them; more tasks need more.
    width : int, default=32
        Frozen random features appended to the vectors. They help where vectors are short; 0 adds none.
    depth : int, default=1
        Adapters in a row.
    standardise : {"features", "global", "none"}, default="features"
        Shift and scale by the first task's statistics, frozen afterwards: each feature by its own deviation, all by
        their average one (keeps the geometry of an embedding), or not at all.
    epochs, batch_size, lr, momentum
        Training of a task by SGD; every batch of new samples is joined by as many replayed ones.
    sparsity, s_max
        Weight of HAT's regulariser, and the largest scale of a mask's sigmoid.
    memory : int, default=2000
        Number of stored vectors of all classes, for replay, the likelihood ratio and calibration.
    gamma : float, default=0.05
        Temperature of P(task | x).
    k : int, default=5
        The likelihood ratio uses the distance to the k-th nearest stored vector of other tasks.
    calibrate : bool, default=True
        Whether the tasks' scores are made comparable on the memory after every task.
    held_out : float, default=0.1
        Share of every class (of five samples or more) that is held out of training, for `unknown_score`.
    device : str, default="cpu"
        Where to compute: "cpu", "cuda", "cuda:1", or "auto".
    random_state : int, RandomState instance or None, default=None
        Makes results repeatable. Later tasks use the seed of the first one.

    Attributes
    ----------
    classes_ : ndarray
        All classes known, sorted; the columns of `predict_proba`.
    tasks_ : list of VectorTask
        The tasks in order of arrival; the columns of `task_proba`.
    arrived_ : ndarray
        All classes known, in the order of arrival.
    n_features_in_ : int
        Number of features, as in the first task.
    feature_names_in_ : ndarray
        Names of the features, if the first task was a data frame with strings as column names.

    Notes
    -----
    Parameters are read when the first task is learned; later changes apply from the next `fit` on. Sample weights are
    not supported. A `partial_fit` that fails leaves the classifier unchanged.
    """

    model_: VectorTPL
    classes_: NDArray[Any]
    arrived_: NDArray[Any]
    tasks_: list[VectorTask]

    def __init__(
        self,
        latent: int = 64,
        width: int = 32,
        depth: int = 1,
        standardise: str = "features",
        epochs: int = 20,
        batch_size: int = 32,
        lr: float = 0.05,
        momentum: float = 0.9,
        sparsity: float = 0.75,
        s_max: float = 400.0,
        memory: int = 2000,
        gamma: float = 0.05,
        k: int = 5,
        calibrate: bool = True,
        held_out: float = 0.1,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.latent = latent
        self.width = width
        self.depth = depth
        self.standardise = standardise
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.momentum = momentum
        self.sparsity = sparsity
        self.s_max = s_max
        self.memory = memory
        self.gamma = gamma
        self.k = k
        self.calibrate = calibrate
        self.held_out = held_out
        self.device = device
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Forget everything and learn all classes of `y` as one task."""
        return self._learn(X, y, None, afresh=True)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None) -> Self:  # noqa: N803
        """Learn the new classes in `y` as one more task, and update the known ones.

        `classes` is part of scikit-learn's interface: labels in `y` must be among them. A class without samples is not
        learned; it may follow in a later call.
        """
        return self._learn(X, y, classes, afresh=not hasattr(self, "model_"))

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """The most probable class of every sample."""
        best = self.predict_log_proba(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[best]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """P(class | x), columns as in `classes_`."""
        probabilities: NDArray[np.float64] = np.exp(self.predict_log_proba(X))
        return probabilities

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """log P(class | x), columns as in `classes_`."""
        vectors = self._vectors(X)
        by_arrival = self.model_.answer(vectors).log_p.cpu().numpy()
        sorted_: NDArray[np.float64] = by_arrival[:, np.argsort(self.arrived_)]
        return sorted_

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """log P(class | x); with two classes the log-odds of the second, as in scikit-learn."""
        logs = self.predict_log_proba(X)
        return logs[:, 1] - logs[:, 0] if logs.shape[1] == 2 else logs

    def task_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """P(task | x), columns as in `tasks_`."""
        classes = self.model_.answer(self._vectors(X)).log_p.double().exp()
        owner = task_of_class(self.model_.task_classes_).to(classes.device)
        tasks = classes.new_zeros(len(classes), len(self.model_.task_classes_)).index_add_(1, owner, classes)
        probabilities: NDArray[np.float64] = tasks.cpu().numpy()
        return probabilities

    def unknown_score(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """How unlikely a sample is to belong to any known class, from 0 to 1.

        Rejecting scores of at least 1 - a rejects known samples with a probability of at most a: the score is one minus
        the largest conformal p-value over the tasks, each against the task's own held-out samples. With n of those, no
        score exceeds n / (n + 1).
        """
        outputs = self.model_.outputs(self._vectors(X))
        scores: NDArray[np.float64] = self.model_.unknown_scores_of(outputs).cpu().numpy()
        return scores

    # Learning

    def _learn(self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None, afresh: bool) -> Self:  # noqa: N803
        vectors, labels = validate_data(self, X, y, reset=afresh, dtype=[np.float64, np.float32])
        labels = column_or_1d(labels, warn=True)
        check_classification_targets(labels)
        if classes is not None:
            unexpected = np.setdiff1d(labels, np.asarray(classes))
            if len(unexpected):
                raise ValueError(f"y has labels that are not in classes: {unexpected.tolist()[:5]}.")
        known = np.empty(0, dtype=labels.dtype) if afresh else self.arrived_
        fresh = np.setdiff1d(labels, known)
        all_classes = np.asarray(unique_labels(known, fresh) if len(known) and len(fresh) else np.union1d(known, fresh))
        with _as_value_errors():
            # On a copy: a task that fails or is interrupted leaves the classifier unchanged.
            model = self._new_model(vectors) if afresh else copy.deepcopy(self.model_)
            old = ~np.isin(labels, fresh)
            if old.any():
                _update(model, vectors[old], _positions(known, labels[old]))
            if len(fresh):
                _learn(model, vectors[~old], _positions(fresh, labels[~old]), len(fresh))
        trained = [] if afresh else [task.samples for task in self.tasks_]
        self.model_, self.classes_ = model, all_classes
        self.arrived_ = np.concatenate([known.astype(all_classes.dtype), fresh.astype(all_classes.dtype)])
        parts = np.split(self.arrived_, np.cumsum([len(names) for names in model.task_classes_])[:-1])
        trained += model.samples_seen[len(trained) :]
        self.tasks_ = [
            VectorTask(tuple(part.tolist()), first, count - first, len(held.labels))
            for part, first, count, held in zip(parts, trained, model.samples_seen, model.held_, strict=True)
        ]
        return self

    def _new_model(self, vectors: NDArray[Any]) -> VectorTPL:
        options = self.get_params(deep=False)
        seed = int(check_random_state(options.pop("random_state")).randint(2**31 - 1))
        device = options.pop("device")
        options["calibration"] = "score" if options.pop("calibrate") else "none"
        return VectorTPL.new(vectors, VectorConfig.parse(options), device, seed)

    def _vectors(self, X: ArrayLike) -> Tensor:  # noqa: N803
        check_is_fitted(self)
        vectors = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return self.model_.prepared(vectors)


def _learn(model: VectorTPL, vectors: NDArray[Any], labels: NDArray[np.int64], own: int) -> None:
    """Learn one more task of `own` new classes; `labels` count from 0 within it."""
    known = len(model.classes_)
    names = tuple(str(known + c) for c in range(own))
    train, held = _split(model, VectorSet(vectors, labels), "held out", len(model.task_classes_))
    model.learn(Task("new classes", names, train), held=held)


def _update(model: VectorTPL, vectors: NDArray[Any], labels: NDArray[np.int64]) -> None:
    """Add samples of known classes; `labels` are in the order of arrival."""
    numbers, own = np.unique(labels, return_inverse=True)
    train, held = _split(model, VectorSet(vectors, own), "held out again", sum(model.samples_seen))
    model.update(Task("known classes", tuple(str(c) for c in numbers), train), held)


def _split(model: VectorTPL, samples: VectorSet, purpose: str, number: int) -> tuple[VectorSet, Samples]:
    """Training and held-out samples; at least one of every class with enough samples is held out."""
    held, share, generator = np.zeros(len(samples), bool), model.config.held_out, model.generator(purpose, number)
    for c in np.unique(samples.labels):
        rows = np.flatnonzero(samples.labels == c)
        if share and len(rows) >= ENOUGH_TO_HOLD_OUT:
            chosen = torch.randperm(len(rows), generator=generator)[: max(1, round(share * len(rows)))]
            held[rows[chosen.numpy()]] = True
    return samples.select(~held), model.samples_of(samples.select(held), no_callback)


def _positions(classes: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.int64]:
    """The index of every label in `classes`, which may be in any order."""
    order = np.argsort(classes)
    places: NDArray[np.int64] = order[np.searchsorted(classes[order], labels)]
    return places


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Raise errors of this package as ValueError, as in scikit-learn, with options named as arguments, not flags."""
    try:
        yield
    except TplError as error:
        raise ValueError(str(error).replace("--", "")) from error
