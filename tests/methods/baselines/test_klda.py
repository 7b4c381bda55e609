"""KLDA: linear discriminant analysis of random Fourier features, which approximate a Gaussian kernel."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.methods.klda import KLDA, Ensemble, FourierAnalysis, KLDAConfig
from tpl.stream import Stream


def problem(samples: int = 400, classes: int = 4, dim: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Equally many samples of every class."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % classes
    return torch.randn(samples, dim, generator=g) + 2 * torch.randn(classes, dim, generator=g)[y], y


def analysis(width: int = 24, seed: int = 1, **options: float) -> FourierAnalysis:
    config = KLDAConfig(**{"gamma": 0.05, "ridge": 1e-9} | options)  # type: ignore[arg-type]
    return FourierAnalysis.drawn(6, width, config, torch.Generator().manual_seed(seed))


def test_a_member_is_scikit_learns_analysis_of_the_same_random_features() -> None:
    z, y = problem()
    ours = analysis()
    for task in (0, 1):
        own = y // 2 == task
        ours.add(z[own], y[own])
    h = ours.hidden(z).numpy()
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(h, y.numpy())
    expected = torch.from_numpy(theirs.predict_log_proba(h))
    torch.testing.assert_close(ours.logits(z).log_softmax(dim=1), expected, rtol=1e-5, atol=1e-5)


def test_products_of_random_features_approximate_the_kernel() -> None:
    z, _ = problem(40)
    h = analysis(width=20_000).hidden(z)
    kernel = torch.exp(-0.05 * torch.cdist(z, z).square()).double()
    # The standard deviation of an entry is at most 1 / sqrt(20 000) = 0.007.
    torch.testing.assert_close(h @ h.T, kernel, rtol=0, atol=0.05)


def test_the_ensemble_answers_by_the_mean_probability() -> None:
    z, y = problem()
    both = Ensemble([analysis(seed=1), analysis(seed=2)])
    both.update(z, y)
    mean = sum(member.logits(z).softmax(dim=1) for member in both.members) / 2
    torch.testing.assert_close(both.log_probabilities(z).exp(), mean)


def test_one_image_a_class_is_the_nearest_in_the_kernel() -> None:
    ours = analysis(width=500, ridge=1e-3)
    z = torch.tensor([[0.0] * 6, [2.0] + [0.0] * 5])
    ours.add(z, torch.tensor([0, 1]))
    assert ours.logits(z + 0.2).argmax(dim=1).tolist() == [0, 1] and bool(ours.logits(z).isfinite().all())


def test_more_images_join_and_a_class_can_go(small_stream: Stream) -> None:
    options = {"random_features": 64, "ensemble": 2}
    whole, parts = (Learner("klda", SMALL_VIT, device="cpu", **options) for _ in range(2))
    first = small_stream[0]
    images = [first.train.load(i) for i in range(len(first.train))]
    names = [first.classes[i] for i in first.train.labels]
    whole.learn(first, held_out=0)
    parts.learn(images[::2], names[::2], held_out=0).update(images[1::2], names[1::2], held_out=0)
    assert isinstance(whole.method, KLDA) and isinstance(parts.method, KLDA)
    one, two = whole.method.state().shared, parts.method.state().shared
    for name in one:
        if not name.endswith("weights"):  # which amplify the rounding of features
            torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-4)
    parts.learn(small_stream[1], held_out=0).remove(first.classes[0])
    assert parts.classes_ == [first.classes[1], *small_stream[1].classes]
    assert np.isin(parts.predict(first.train), parts.classes_).all()
