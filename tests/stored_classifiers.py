"""A `TPLClassifier` that an earlier version pickled, with the answers it gave then.

`python tests/stored_classifiers.py NAME` adds `tests/classifiers/NAME.pickle` and `NAME.json`. Do that before a change
of what is stored, never to make a failing test pass.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpl.estimator import TPLClassifier

PLACE = Path(__file__).parent / "classifiers"
OPTIONS = {"epochs": 4, "latent": 12, "width": 8, "memory": 40, "random_state": 3}
NAMES = np.array(["ant", "bee", "cat", "dog", "eel", "fox", "gnu"])


def blobs(classes: list[int], per_class: int = 30, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.str_]]:
    """Clouds of points around fixed centres, and the names of their classes."""
    rng = np.random.default_rng([seed, *classes])
    centres = np.random.default_rng(7).normal(0, 2, (len(NAMES), 5))
    x = np.concatenate([centres[c] + rng.normal(0, 1, (per_class, 5)) for c in classes])
    return x, NAMES[np.repeat(classes, per_class)]


PROBE, _ = blobs([0, 1, 2, 3, 4, 5, 6], per_class=4, seed=1)  # the last class is unknown to the classifier


def learned() -> TPLClassifier:
    """Three tasks, the second of a single class; the third comes with more samples of known classes."""
    classifier = TPLClassifier(**OPTIONS).partial_fit(*blobs([2, 0])).partial_fit(*blobs([5]))
    return classifier.partial_fit(*blobs([4, 0, 5, 1, 3], per_class=20))


def learned_on(classifier: TPLClassifier) -> TPLClassifier:
    """The same classifier after one more task."""
    return classifier.partial_fit(*blobs([6]))


def answers(classifier: TPLClassifier) -> dict[str, object]:
    """What the classifier says of the probe, and what it says it has learned."""
    tasks = [[task.classes, task.samples, task.updates, task.held_out] for task in classifier.tasks_]
    return {
        "classes": classifier.classes_.tolist(),
        "arrived": classifier.arrived_.tolist(),
        "tasks": json.loads(json.dumps(tasks)),
        "proba": classifier.predict_proba(PROBE).tolist(),
        "task_proba": classifier.task_proba(PROBE).tolist(),
        "unknown": classifier.unknown_score(PROBE).tolist(),
    }


def write(name: str) -> None:
    """Fit a classifier and store it with its answers, now and after one more task."""
    classifier = learned()
    PLACE.mkdir(exist_ok=True)
    (PLACE / f"{name}.pickle").write_bytes(pickle.dumps(classifier, protocol=4))
    text = json.dumps({"stored": answers(classifier), "later": answers(learned_on(classifier))})
    (PLACE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1])
