"""SLDA: task by task it is the linear discriminant analysis of all data at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.covariance import empirical_covariance
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.errors import TplError
from tpl.methods.slda import SLDA, Discriminant
from tpl.scores.distances import ClassStatistics
from tpl.stream import Stream

CPU = torch.device("cpu")
SHRINKAGE = 0.05


def test_the_size_of_the_network_counts_float64_twice(small_stream: Stream) -> None:
    learner = Learner("slda", SMALL_VIT, device="cpu").learn(small_stream[0])
    method = learner.method
    assert isinstance(method, SLDA)
    trunk = sum(p.numel() for p in method.encoder.parameters())
    statistics = sum(part.numel() for part in method.statistics)
    assert method.parameters() == trunk + statistics
    assert method.network_bytes() == 4 * trunk + 8 * statistics


class Shrunk(BaseEstimator):  # type: ignore[misc]
    """(1 - e) S + e I; scikit-learn's own shrinkage takes a multiple of the identity."""

    def fit(self, x: NDArray[np.float64]) -> Shrunk:
        self.covariance_ = (1 - SHRINKAGE) * empirical_covariance(x) + SHRINKAGE * np.eye(x.shape[1])
        return self


def problem(dim: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Five classes of different sizes, correlated features."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(5).repeat_interleave(torch.tensor([40, 9, 25, 60, 3]))
    centres = torch.randn(5, dim, generator=g)
    return torch.randn(len(y), dim, generator=g) @ torch.randn(dim, dim, generator=g) + centres[y] + 10, y


def analysis(*parts: tuple[torch.Tensor, torch.Tensor]) -> Discriminant:
    statistics = ClassStatistics.empty(parts[0][0].shape[1], CPU)
    for part in parts:
        statistics = statistics.add(*part)
    return Discriminant(statistics, SHRINKAGE)


def reference(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """scikit-learn's scores of the samples themselves, without the frequency of classes."""
    lda = LinearDiscriminantAnalysis(solver="lsqr", covariance_estimator=Shrunk())
    lda.fit(z.double().numpy(), y.numpy())
    return torch.from_numpy(lda.decision_function(z.double().numpy()) - np.log(lda.priors_))


def test_it_equals_an_analysis_of_all_data_at_once_task_by_task() -> None:
    z, y = problem()
    ours = analysis(*((z[task], y[task]) for task in (y < 2, (y == 2) | (y == 3), y == 4)))
    torch.testing.assert_close(ours.logits(z), reference(z, y), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", [1, 13])
def test_it_equals_an_analysis_of_all_data_at_once_in_any_order(size: int) -> None:
    z, y = problem()
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(1))
    ours = analysis(*((z[rows], y[rows]) for rows in order.split(size)))
    torch.testing.assert_close(ours.logits(z), reference(z, y), rtol=1e-8, atol=1e-8)


def test_one_image_a_class_is_the_nearest_mean() -> None:
    ours = analysis((torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]), torch.tensor([0, 1])))
    x = torch.tensor([[0.9, 5.0, 0.0], [1.1, -5.0, 0.0]])
    assert ours.logits(x).argmax(dim=1).tolist() == [0, 1]


def test_the_method_analyses_the_frozen_encoders_features(small_stream: Stream) -> None:
    learner = Learner("slda", SMALL_VIT, device="cpu", shrinkage=SHRINKAGE)
    z, y = [], []
    for t, task in enumerate(small_stream):
        learner.learn(task, held_out=0)
        pixels = learner.prepare(task.train)
        with torch.no_grad():
            z.append(learner.method.encoder.plain(learner.method.preprocess.normaliser(CPU)(pixels)))
        y.append(torch.tensor(np.asarray(task.train.labels)) + 2 * t)
    pixels = torch.cat([learner.prepare(task.train) for task in small_stream])
    expected = reference(torch.cat(z), torch.cat(y)).log_softmax(dim=1)
    # Blocks of other sizes round features otherwise, and the scores amplify that.
    torch.testing.assert_close(learner.method.log_probabilities(pixels), expected, rtol=1e-3, atol=1e-3)


def test_more_images_of_known_classes_join_and_a_class_can_go(small_stream: Stream) -> None:
    first = small_stream[0]
    whole, parts = Learner("slda", SMALL_VIT, device="cpu"), Learner("slda", SMALL_VIT, device="cpu")
    assert isinstance(whole.method, SLDA) and isinstance(parts.method, SLDA)
    whole.learn(first, held_out=0)
    images, names = (
        [first.train.load(i) for i in range(len(first.train))],
        [first.classes[i] for i in first.train.labels],
    )
    parts.learn(images[::2], names[::2], held_out=0).update(images[1::2], names[1::2], held_out=0)
    for name in ("counts", "means", "scatter"):
        one, two = getattr(whole.method.statistics, name), getattr(parts.method.statistics, name)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)
    parts.learn(small_stream[1]).remove(first.classes[0])
    assert parts.method.statistics.means.shape == (3, parts.method.encoder.dim)
    assert parts.predict(first.train)[-1] == first.classes[1]


def test_too_much_shrinkage_is_explained() -> None:
    with pytest.raises(TplError, match="shrinkage must be at most 1"):
        Learner("slda", SMALL_VIT, device="cpu", shrinkage=2.0)
