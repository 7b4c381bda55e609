"""AnaCP: projections that follow from sums, whatever the order of tasks, and targets further apart than the means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from small_encoder import SMALL_VIT
from tpl import Learner
from tpl.methods.anacp import FLOOR, AnaCP, AnaCPConfig, ContrastiveClassifier, spread_means
from tpl.stream import Stream

DIM, WIDTH = 8, 40
CONFIG = AnaCPConfig(heads=2, ridge=1.0)


def problem(samples: int = 300, classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    y = torch.arange(samples) % classes
    return torch.randn(samples, DIM, generator=g) + 2 * torch.randn(classes, DIM, generator=g)[y], y


def classifier(config: AnaCPConfig = CONFIG) -> ContrastiveClassifier:
    g = torch.Generator().manual_seed(1)
    *randoms, outer = (torch.randn(DIM, WIDTH, generator=g) for _ in range(config.heads + 1))
    return ContrastiveClassifier(randoms, outer, config, lambda: torch.Generator().manual_seed(2))


def learned(order: list[int]) -> ContrastiveClassifier:
    """Three tasks of two classes; class numbers are those of arrival."""
    z, y = problem()
    found = classifier()
    for position, task in enumerate(order):
        own = y // 2 == task
        found.learn(z[own], y[own] % 2 + 2 * position, torch.Generator())
    return found


def test_theta_from_sums_is_that_of_all_data_at_once() -> None:
    z, y = problem()
    ours, x = learned([0, 1, 2]), F.normalize(z.double(), dim=1)
    means = torch.stack([x[y == c].mean(dim=0) for c in range(6)])
    deviations = x - means[y]
    covariance = deviations.T @ deviations / len(x) + FLOOR * torch.eye(DIM)
    values, vectors = torch.linalg.eigh(covariance)
    root, inverse = (vectors @ torch.diag(values**power) @ vectors.T for power in (0.5, -0.5))
    centred = means - means.mean(dim=0)
    left, sizes, right = torch.linalg.svd(centred @ inverse, full_matrices=False)
    sizes[:5] += 1  # six centred means span five directions
    targets = F.normalize(left @ torch.diag(sizes) @ right @ root + means.mean(dim=0), dim=1)
    for head in ours.heads:
        h = F.gelu(x @ head.random.double())
        expected = torch.linalg.solve(h.T @ h + torch.eye(WIDTH), h.T @ targets[y])  # a regression on every sample
        torch.testing.assert_close(head.theta, expected, rtol=1e-6, atol=1e-8)


def test_theta_does_not_depend_on_the_order_of_tasks() -> None:
    for one, two in zip(learned([0, 1, 2]).heads, learned([2, 0, 1]).heads, strict=True):
        torch.testing.assert_close(one.theta, two.theta, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_targets_lie_further_apart_than_the_means(spread: float) -> None:
    means = F.normalize(torch.tensor([[5.0, 1, 0], [5, 0, 1], [5, -1, -1]], dtype=torch.float64), dim=1)
    eye = torch.eye(3, dtype=torch.float64)
    targets = spread_means(means, (eye, eye), spread, "restore")
    torch.testing.assert_close(targets.norm(dim=1), torch.ones(3, dtype=torch.float64))
    if not spread:
        torch.testing.assert_close(targets, means)
    else:
        assert bool((torch.pdist(targets) > 2 * torch.pdist(means)).all())


def test_the_public_codes_second_whitening_is_another_target() -> None:
    means = F.normalize(torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64), dim=1)
    root = torch.diag(torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64))
    paper, code = (spread_means(means, (root, root.inverse()), 1.0, kind) for kind in ("restore", "twice"))
    assert not torch.allclose(paper, code, atol=0.01)


def test_one_image_a_class_and_a_single_class_are_no_trouble() -> None:
    for classes in (1, 2):
        ours = classifier()
        ours.learn(torch.eye(DIM)[:classes], torch.arange(classes), torch.Generator())
        answers = ours.log_probabilities(torch.eye(DIM)[:classes])
        assert bool(answers.isfinite().all()) and answers.argmax(dim=1).tolist() == list(range(classes))


def test_it_tells_classes_apart_and_a_class_can_go(small_stream: Stream) -> None:
    z, y = problem()
    assert float((learned([0, 1, 2]).log_probabilities(z).argmax(dim=1) == y).double().mean()) > 0.8
    learner = Learner("anacp", SMALL_VIT, device="cpu", latent=8, epochs=1, batch_size=16, random_features=64)
    assert isinstance(learner.method, AnaCP)
    first, second = small_stream[:2]
    learner.learn(first, held_out=0).learn(second, held_out=0)
    images = [second.train.load(i) for i in range(3)]
    learner.update(images, [second.classes[0]] * 3, held_out=0).remove(first.classes[1])
    assert learner.method.log_probabilities(learner.prepare(second.train)).shape[1] == 3
