"""Scores: how in-distribution an image is for a task. Pure functions of features and logits."""

from tpl.scores.base import Score
from tpl.scores.distances import Mahalanobis, NearestNeighbours
from tpl.scores.features import MahalanobisDistance, ReAct, Residual, VirtualLogit
from tpl.scores.logits import Energy, GradNorm, KLMatching, MaxLogit, MaxSoftmax, Odin, OpenMax
from tpl.scores.ratio import LikelihoodRatio, RatioConfig

# The post-hoc detectors of out-of-distribution samples that the paper compares as task scores, in its order.
DETECTORS: dict[str, type[Score]] = {
    s.name: s
    for s in (
        GradNorm,
        KLMatching,
        OpenMax,
        Odin,
        MaxSoftmax,
        MaxLogit,
        Energy,
        ReAct,
        NearestNeighbours,
        Residual,
        MahalanobisDistance,
        VirtualLogit,
    )
}

SCORES: dict[str, type[Score]] = {LikelihoodRatio.name: LikelihoodRatio, Mahalanobis.name: Mahalanobis, **DETECTORS}

__all__ = [
    "DETECTORS",
    "SCORES",
    "Energy",
    "GradNorm",
    "KLMatching",
    "LikelihoodRatio",
    "Mahalanobis",
    "MahalanobisDistance",
    "MaxLogit",
    "MaxSoftmax",
    "NearestNeighbours",
    "Odin",
    "OpenMax",
    "RatioConfig",
    "ReAct",
    "Residual",
    "Score",
    "VirtualLogit",
]
