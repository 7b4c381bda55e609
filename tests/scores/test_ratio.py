"""TPL's score put together by hand from its parts, for every choice there is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from numpy.typing import NDArray
from sklearn.covariance import EmpiricalCovariance
from torch import Tensor

from tpl.errors import TplError
from tpl.scores import DETECTORS, SCORES, LikelihoodRatio, Mahalanobis, RatioConfig

Array = NDArray[np.float64]
N, D, CLASSES = 90, 6, 3


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Y = torch.arange(N) % CLASSES
Z = randn(CLASSES, D, seed=0)[Y] * 3 + randn(N, D, seed=1)
F = randn(N, CLASSES, seed=2) + 5 * torch.nn.functional.one_hot(Y, CLASSES)
OWN, OTHERS = Z[::10], randn(24, D, seed=3) * 2 - 4
OTHERS_Y = torch.arange(24) % 4 + 7  # global class numbers, not starting at zero
QUERY, QUERY_F = torch.cat([Z[:20], OTHERS[:5] + 0.1, randn(10, D, seed=4)]), randn(35, CLASSES, seed=5) * 3


def fitted(**choices: Any) -> LikelihoodRatio:
    return LikelihoodRatio(RatioConfig(**choices)).fit_features(Z, F, Y).refresh(OWN, OTHERS, OTHERS_Y)


def md_by_hand(train: Array, labels: Array, query: Array) -> Array:
    means = np.stack([train[labels == c].mean(axis=0) for c in np.unique(labels)])
    centred = train - means[np.searchsorted(np.unique(labels), labels)]
    precision = EmpiricalCovariance(assume_centered=True).fit(centred).precision_
    distances = [min((q - m) @ precision @ (q - m) for m in means) for q in query]
    return 1 / np.maximum(distances, 1e-3 * train.shape[1])


def knn_by_hand(bank: Array, query: Array, k: int, squared: bool) -> Array:
    unit_bank = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    unit = query / np.linalg.norm(query, axis=1, keepdims=True)
    nearest = np.sort(np.linalg.norm(unit[:, None] - unit_bank[None], axis=2), axis=1)[:, min(k, len(bank)) - 1]
    return nearest**2 if squared else nearest


LOGIT = {
    "mls": lambda f: f.max(axis=1),
    "msp": lambda f: scipy.special.softmax(f, axis=1).max(axis=1),
    "ebo": lambda f: scipy.special.logsumexp(f, axis=1),
}


def beta_by_hand(beta: float | str | None, mean: float) -> float:
    return {None: 1 / mean, "1.3x": 1.3 / mean, "0x": 0.0}.get(beta, beta)  # type: ignore[arg-type, return-value]


def by_hand(config: RatioConfig) -> Array:
    z, f, q, qf = Z.numpy(), F.numpy(), QUERY.numpy(), QUERY_F.numpy()
    squared = config.distance == "squared"
    ratio = np.zeros(len(q))
    if config.in_task == "md":
        beta2 = beta_by_hand(config.beta2, md_by_hand(z, Y.numpy(), z).mean())
        ratio = beta2 * md_by_hand(z, Y.numpy(), q)
    elif config.in_task == "knn":
        ratio = -knn_by_hand(OWN.numpy(), q, config.k, squared)
    if config.out_of_task == "knn":
        ratio = ratio + knn_by_hand(OTHERS.numpy(), q, config.k, squared)
    elif config.out_of_task == "md":
        o, oy = OTHERS.numpy(), OTHERS_Y.numpy()
        ratio = ratio - md_by_hand(o, oy, q) / md_by_hand(o, oy, o).mean()
    if config.logit_score == "none":
        return ratio
    score = LOGIT[config.logit_score]
    beta1 = beta_by_hand(config.beta1, score(f).mean())
    logit = beta1 * score(qf)
    if config.in_task == "none":
        return np.asarray(logit)
    if config.compose == "or":
        return np.log(np.exp(logit) + np.exp(ratio))
    return -np.log(np.exp(-logit) + np.exp(-ratio))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"compose": "and"},
        {"logit_score": "msp"},
        {"logit_score": "ebo", "compose": "and"},
        {"logit_score": "none"},
        {"in_task": "none"},
        {"in_task": "none", "logit_score": "ebo", "beta1": 0.5},
        {"in_task": "knn"},
        {"in_task": "knn", "k": 2, "distance": "squared"},
        {"in_task": "knn", "k": 100},
        {"out_of_task": "md"},
        {"out_of_task": "constant"},
        {"in_task": "knn", "out_of_task": "md"},
        {"distance": "squared", "compose": "and"},
        {"k": 1},
        {"k": 1000},
        {"beta1": 0.7, "beta2": 20.0},
        {"beta1": 0.0, "beta2": 0.0},
        {"beta1": "1.3x", "beta2": "1.3x"},
        {"beta2": "1.3x", "compose": "and"},
        {"beta1": "0x"},
        {"beta2": 15.0, "logit_score": "none", "out_of_task": "constant"},
    ],
    ids=str,
)
def test_every_choice_is_what_the_formula_says(choices: dict[str, Any]) -> None:
    config = RatioConfig(shrinkage="none", **choices)
    score = LikelihoodRatio(config).fit_features(Z, F, Y).refresh(OWN, OTHERS, OTHERS_Y)
    np.testing.assert_allclose(score.score_features(QUERY, QUERY_F).numpy(), by_hand(config), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("beta", ["x", "1.3", "-1x", "nanx", "infx", "1.3y", -1.0, float("nan")])
def test_a_scale_is_a_number_or_a_number_of_inverse_means(beta: Any) -> None:
    with pytest.raises(TplError, match=r"beta2 must be a number of at least 0, a number of inverse means such as 1.3x"):
        RatioConfig(beta2=beta)


def test_scales_as_typed() -> None:
    config = RatioConfig.parse({"beta1": "1.3x", "beta2": "20"})
    assert (config.beta1, config.beta2) == ("1.3x", 20.0)
    assert RatioConfig.parse({"beta1": "none"}).beta1 is None
    once = fitted(beta1="1x", beta2="1x").score_features(QUERY, QUERY_F)
    assert torch.equal(once, fitted().score_features(QUERY, QUERY_F))


def test_the_choices_make_a_difference() -> None:
    base = fitted().score_features(QUERY, QUERY_F)
    for choice in (
        {"compose": "and"},
        {"logit_score": "msp"},
        {"logit_score": "none"},
        {"in_task": "knn"},
        {"in_task": "none"},
        {"out_of_task": "md"},
        {"out_of_task": "constant"},
        {"distance": "squared"},
        {"k": 2},
        {"beta1": 3.0},
        {"beta2": 3.0},
        {"shrinkage": "oas"},
    ):
        assert not torch.allclose(fitted(**choice).score_features(QUERY, QUERY_F), base), choice


@pytest.mark.parametrize("logit", ["mls", "msp", "ebo"])
def test_betas_bring_the_mean_on_the_training_data_to_one(logit: str) -> None:
    score = fitted(logit_score=logit)
    assert float(score.logit_part(Z, F).mean()) == pytest.approx(1)
    assert float(score.in_task_part(Z, F).mean()) == pytest.approx(1)


def test_soft_minimum_and_maximum_bound_the_parts() -> None:
    soft_min, soft_max = (fitted(compose=c).score_features(QUERY, QUERY_F) for c in ("and", "or"))
    score = fitted()
    parts = torch.stack(
        [score.logit_part(QUERY, QUERY_F), score.in_task_part(QUERY, QUERY_F) - score.out_of_task_part(QUERY)]
    )
    low, high = parts.amin(dim=0), parts.amax(dim=0)
    assert bool((soft_min <= low).all())
    assert bool((high <= soft_max).all())
    assert float((low - soft_min).max()) <= math.log(2) + 1e-12
    assert float((soft_max - high).max()) <= math.log(2) + 1e-12


@pytest.mark.parametrize("compose", ["or", "and"])
def test_composition_survives_large_scores(compose: str) -> None:
    score = fitted(beta1=1e4, compose=compose).score_features(QUERY, QUERY_F)
    assert bool(score.isfinite().all())


@pytest.mark.parametrize("logit", ["mls", "ebo"])
@pytest.mark.parametrize("shift", [-50.0, -1e3])
def test_a_negative_mean_logit_does_not_turn_the_order_around(logit: str, shift: float) -> None:
    score = LikelihoodRatio(RatioConfig(logit_score=logit, in_task="none")).fit_features(Z, F + shift, Y)
    scores = score.score_features(Z, F + shift)
    raw = LOGIT[logit]((F + shift).numpy())
    assert raw.mean() < 0
    np.testing.assert_array_equal(np.argsort(scores.numpy()), np.argsort(raw))
    assert float(scores.abs().mean()) == pytest.approx(1)


def test_logits_that_are_all_zero_stay_finite() -> None:
    score = LikelihoodRatio().fit_features(Z, torch.zeros_like(F), Y)
    assert bool(score.score_features(QUERY, torch.zeros(35, CLASSES)).isfinite().all())


@pytest.mark.parametrize("out_of_task", ["knn", "md", "constant"])
def test_without_other_tasks_the_ratio_is_md(out_of_task: str) -> None:
    config = RatioConfig(logit_score="none", out_of_task=out_of_task)
    score = LikelihoodRatio(config).fit_features(Z, F, Y).score_features(QUERY, QUERY_F)
    md = Mahalanobis("auto").fit_features(Z, F, Y)
    expected = md.score_features(QUERY, QUERY) / md.score_features(Z, Z).mean()
    torch.testing.assert_close(score, expected)
    assert bool(score.isfinite().all())


def test_others_can_be_given_when_fitting() -> None:
    direct = LikelihoodRatio().fit_features(Z, F, Y, others=OTHERS)
    assert torch.equal(direct.score_features(QUERY, QUERY_F), fitted().score_features(QUERY, QUERY_F))


def test_refreshing_forgets_the_memory_before() -> None:
    score = fitted(out_of_task="md").refresh(OWN[:0], OTHERS[:0])
    alone = LikelihoodRatio(RatioConfig(out_of_task="md")).fit_features(Z, F, Y)
    assert torch.equal(score.score_features(QUERY, QUERY_F), alone.score_features(QUERY, QUERY_F))


def test_skipping_leaves_a_memory_sample_out() -> None:
    score = fitted(logit_score="none", in_task="md")
    found = score.score_features(OTHERS, F[:24], skip_others=torch.arange(24))
    for i in (0, 11, 23):
        rest = torch.cat([OTHERS[:i], OTHERS[i + 1 :]])
        alone = fitted(logit_score="none", in_task="md").refresh(OWN, rest)
        torch.testing.assert_close(found[i], alone.score_features(OTHERS[i : i + 1], F[:1])[0])
    assert bool((found >= score.score_features(OTHERS, F[:24]) - 1e-12).all())


@pytest.mark.parametrize("choices", [{}, {"in_task": "knn"}, {"out_of_task": "md"}, {"logit_score": "ebo"}], ids=str)
def test_state_and_memory_restore_the_score_bit_for_bit(choices: dict[str, Any]) -> None:
    score = fitted(**choices)
    state = score.state()
    assert sorted(state) == ["counts_", "means_", "pooled_", "scales_", "scatter_", "whitening_"]
    again = LikelihoodRatio(RatioConfig(**choices)).load_state(state).refresh(OWN, OTHERS, OTHERS_Y)
    assert torch.equal(again.score_features(QUERY, QUERY_F), score.score_features(QUERY, QUERY_F))


def test_a_stored_state_serves_any_other_choice() -> None:
    other = {"logit_score": "msp", "compose": "and", "out_of_task": "md", "distance": "squared", "k": 3}
    again = LikelihoodRatio(RatioConfig(**other)).load_state(fitted().state()).refresh(OWN, OTHERS, OTHERS_Y)
    assert torch.equal(again.score_features(QUERY, QUERY_F), fitted(**other).score_features(QUERY, QUERY_F))


def test_loaded_without_memory_it_still_scores() -> None:
    score = LikelihoodRatio().load_state(fitted().state()).score_features(QUERY, QUERY_F)
    assert torch.equal(score, LikelihoodRatio().fit_features(Z, F, Y).score_features(QUERY, QUERY_F))


def test_float32_features_are_scored_in_float64() -> None:
    score = LikelihoodRatio().fit_features(Z.float(), F.float(), Y).refresh(OWN.float(), OTHERS.float())
    found = score.score_features(QUERY.float(), QUERY_F.float())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, fitted().score_features(QUERY, QUERY_F), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"compose": "xor"}, ["compose", "or, and", "xor"]),
        ({"logit_score": "max"}, ["logit_score", "mls, msp, ebo, none"]),
        ({"in_task": "constant"}, ["in_task", "md, knn, none"]),
        ({"out_of_task": "none"}, ["out_of_task", "knn, md, constant"]),
        ({"distance": "cosine"}, ["distance", "l2, squared"]),
        ({"shrinkage": "lw"}, ["shrinkage", "auto, none, oas"]),
        ({"k": 0}, ["k must be at least 1", "0"]),
        ({"logit_score": "none", "in_task": "none"}, ["at least one part", "logit_score", "in_task"]),
    ],
    ids=str,
)
def test_impossible_choices_are_explained(choices: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TplError) as error:
        RatioConfig(**choices)
    for word in words:
        assert word in str(error.value)


def test_every_score_is_listed_under_its_name() -> None:
    assert set(SCORES) == {"tpl", "md", *DETECTORS}
    assert all(SCORES[name].name == name and SCORES[name].summary for name in SCORES)


def test_knownness_is_the_scaled_distance_score_whatever_the_choices() -> None:
    g = torch.Generator().manual_seed(0)
    z, logits = torch.randn(60, 4, generator=g), torch.randn(60, 3, generator=g) + 2
    y = torch.arange(60) % 3
    plain = LikelihoodRatio().fit_features(z, logits, y)
    other = LikelihoodRatio(RatioConfig(logit_score="ebo", compose="and", in_task="knn", beta1=3.0)).fit_features(
        z, logits, y
    )
    md = plain.centres.score_features(z, logits)
    expected = md / md.mean()
    torch.testing.assert_close(plain.in_distribution_score(z, logits), expected)
    torch.testing.assert_close(other.in_distribution_score(z, logits), expected)
    before = plain.in_distribution_score(z, logits)
    plain.refresh(z[:5], z[5:])  # a later task's memory
    assert torch.equal(plain.in_distribution_score(z, logits), before)


def test_merged_scales_are_means_over_all_samples() -> None:
    g = torch.Generator().manual_seed(1)
    z, logits = torch.randn(90, 4, generator=g), torch.randn(90, 3, generator=g) + 4
    y = torch.arange(90) % 3
    merged = LikelihoodRatio().fit_features(z[:60], logits[:60], y[:60]).merge(z[60:], logits[60:], y[60:])
    at_once = LikelihoodRatio().fit_features(z, logits, y)
    torch.testing.assert_close(merged.scales_[:-1], at_once.scales_[:-1])  # logit scores: exactly
    torch.testing.assert_close(merged.scales_[-1], at_once.scales_[-1], rtol=0.3, atol=0)  # MD: by old distances
    assert merged.counted(0) == at_once.counted(0) == 30


def test_statistics_of_an_early_version_cannot_be_merged_but_score() -> None:
    z = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
    y = torch.arange(60) % 3
    score = LikelihoodRatio().fit_features(z, z, y)
    early = LikelihoodRatio().load_state({k: score.state()[k] for k in ("means_", "whitening_", "scales_")})
    assert torch.equal(early.in_distribution_score(z, z), score.in_distribution_score(z, z))
    with pytest.raises(TplError, match="earlier version"):
        early.counted(0)
