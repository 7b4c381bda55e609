"""Whose are they? Pure functions of features and logits, one idea a file."""

from tpl.scores.base import Score
from tpl.scores.knn import NearestNeighbours
from tpl.scores.logits import Energy, MaxLogit, MaxSoftmax
from tpl.scores.mahalanobis import Mahalanobis
from tpl.scores.ratio import LikelihoodRatio, RatioConfig

SCORES: dict[str, type[Score]] = {
    s.name: s for s in (LikelihoodRatio, Mahalanobis, NearestNeighbours, MaxLogit, MaxSoftmax, Energy)
}

__all__ = [
    "SCORES",
    "Energy",
    "LikelihoodRatio",
    "Mahalanobis",
    "MaxLogit",
    "MaxSoftmax",
    "NearestNeighbours",
    "RatioConfig",
    "Score",
]
