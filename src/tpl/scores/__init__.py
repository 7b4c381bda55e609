"""Whose are they? Pure functions of features and logits, one idea a file."""

from tpl.scores.base import Score
from tpl.scores.gradnorm import GradNorm
from tpl.scores.klm import KLMatching
from tpl.scores.knn import NearestNeighbours
from tpl.scores.logits import Energy, MaxLogit, MaxSoftmax
from tpl.scores.mahalanobis import Mahalanobis
from tpl.scores.mds import MahalanobisDistance
from tpl.scores.odin import Odin
from tpl.scores.openmax import OpenMax
from tpl.scores.ratio import LikelihoodRatio, RatioConfig
from tpl.scores.react import ReAct
from tpl.scores.residual import Residual
from tpl.scores.vim import VirtualLogit

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
