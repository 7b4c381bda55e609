"""Metrics, each with its formula.

An accuracy matrix A has one row a stage and one column a task: A[t, i] is the accuracy on task i's
test images after task t was learned, NaN where i > t. All values are fractions; tables show percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


def matrix_of(rows: Sequence[Sequence[float]]) -> Matrix:
    """The accuracy matrix with these rows, one a stage and each one entry longer than the one before."""
    matrix = np.full((len(rows), len(rows)), np.nan)
    for stage, row in enumerate(rows):
        matrix[stage, : len(row)] = row
    return matrix


def accuracy_so_far(matrix: Matrix, sizes: Sequence[int]) -> Matrix:
    """A^(<=t): share of correctly classified images among the test images of tasks 0..t, per stage.

    A^(<=t) = sum_{i<=t} n_i A[t, i] / sum_{i<=t} n_i.
    """
    weights = np.asarray(sizes, dtype=np.float64)
    return np.array([matrix[t, : t + 1] @ weights[: t + 1] / weights[: t + 1].sum() for t in range(len(matrix))])


def last(matrix: Matrix, sizes: Sequence[int]) -> float:
    """Last = A^(<=T): accuracy on all classes after the final task."""
    return float(accuracy_so_far(matrix, sizes)[-1])


def average_incremental(matrix: Matrix, sizes: Sequence[int]) -> float:
    """AIA = (1/T) sum_t A^(<=t): accuracy on the classes so far, averaged over the stages."""
    return float(accuracy_so_far(matrix, sizes).mean())


def classic_forgetting(matrix: Matrix) -> float:
    """F = 1/(T-1) sum_{i<T} (A[i, i] - A[T, i]): each task's loss since it was learned.

    Fit for task-incremental learning; in class-incremental learning it also counts that more classes
    are harder to tell apart. 0 for a single task.
    """
    final = len(matrix) - 1
    return float(np.mean([matrix[i, i] - matrix[final, i] for i in range(final)])) if final else 0.0


def rectified_forgetting_per_stage(matrix: Matrix, joint: Matrix) -> Matrix:
    """F_Last^(t) = 1/t sum_{i<=t} (A_joint[t, i] - A[t, i]), for every stage t."""
    return np.array([np.mean(joint[t, : t + 1] - matrix[t, : t + 1]) for t in range(len(matrix))])


def rectified_forgetting_last(matrix: Matrix, joint: Matrix) -> float:
    """F_CIL,Last^(T): what is lost against joint training on the same classes, after the final task.

    A mean over tasks, as the paper defines it; equal to Last_joint - Last where tasks have equally many test images.
    """
    return float(rectified_forgetting_per_stage(matrix, joint)[-1])


def rectified_forgetting_aia(matrix: Matrix, joint: Matrix) -> float:
    """F_CIL,AIA^(T) = 1/T sum_t F_CIL,Last^(t)."""
    return float(rectified_forgetting_per_stage(matrix, joint).mean())


def auroc(inside: Vector, outside: Vector) -> float:
    """Area under the ROC curve: P(score inside > score outside), ties counted half."""
    return float(_share_above(_sorted(inside), _finite(outside)).mean())


def false_positives_at_95(inside: Vector, outside: Vector) -> float:
    """FPR95: share of outside samples accepted by the threshold that accepts 95 % of the inside ones."""
    return float((_finite(outside) >= _threshold_at_95(_sorted(inside))).mean())


def detection(scores: Matrix, tasks: NDArray[np.int64]) -> dict[str, float]:
    """How well task scores `[n, T]` separate each task's images from the others, averaged over tasks.

    `auroc_pairwise`: mean over ordered pairs (j, i) of AUROC of S_j on task j against task i.
    `auroc_pooled`: mean over j of AUROC of S_j on task j against all other tasks at once.
    `fpr95`: mean over j of FPR95, pooled likewise. Equal task sizes make the two AUROCs equal.
    """
    count = scores.shape[1]
    sizes = np.bincount(tasks, minlength=count)
    pairs, pooled, fpr = [], [], []
    for j in range(count):
        own, others = _sorted(scores[tasks == j, j]), tasks != j
        rest = _finite(scores[others, j])
        # One search per outside sample serves all pairs: an AUROC is a mean over the outside samples.
        above = _share_above(own, rest)
        pairs.append(np.delete(np.bincount(tasks[others], above, minlength=count) / sizes, j))
        pooled.append(above.mean())
        fpr.append((rest >= _threshold_at_95(own)).mean())
    return {
        "auroc_pairwise": float(np.mean(pairs)),
        "auroc_pooled": float(np.mean(pooled)),
        "fpr95": float(np.mean(fpr)),
    }


def line_through(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, float] | None:
    """Accuracy as a linear function of AUROC: Pearson's r, slope and intercept; None for fewer than three points."""
    if len(rows) < 3:
        return None
    x, y = (np.array([row[key] for row in rows], dtype=np.float64) for key in ("auroc", column))
    if x.std() == 0 or y.std() == 0:
        return None
    slope, intercept = np.polyfit(x, y, 1)
    return {"r": float(np.corrcoef(x, y)[0, 1]), "slope": float(slope), "intercept": float(intercept)}


def _share_above(ordered: Vector, outside: Vector) -> Vector:
    """For each outside sample, the share of the `ordered` ones that score higher, ties counted half."""
    not_above = np.searchsorted(ordered, outside, "left") + np.searchsorted(ordered, outside, "right")
    return 1 - not_above / (2 * len(ordered))


def _threshold_at_95(ordered: Vector) -> float:
    """The largest score that 95 % of the `ordered` ones reach."""
    enough = int(np.searchsorted(np.arange(1, len(ordered) + 1) / len(ordered), 0.95))
    return float(ordered[len(ordered) - 1 - enough])


def _sorted(scores: Vector) -> Vector:
    return np.sort(_finite(scores))


def _finite(scores: Vector) -> Vector:
    if not np.isfinite(scores).all():
        raise ValueError("a task score is not a finite number: it cannot be ranked")
    return scores
