"""Ablations of TPL's score on one trained model: every variant is a choice made at evaluation time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpl.bench import metrics
from tpl.bench.evaluate import accuracies
from tpl.bench.outputs import RunOutputs, run_outputs
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.bank import Outputs
from tpl.methods.base import task_of_class
from tpl.methods.tpl import TPL

AFTERWARDS = ("gamma", "calibration")  # options that turn scores into probabilities: the scores do not know them


@dataclass(frozen=True)
class Variant:
    """One choice of the score's options, or of how much memory it may see."""

    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    memory: float = 1.0  # share of every class's exemplars


# The paper's ablations (its Fig. 3, the beta table) and the readings in which paper and public code differ.
VARIANTS: dict[str, Variant] = {
    "as trained": Variant(""),
    **{
        f"{compose}, {distance}, calibration {calibration}": Variant(
            "compose", {"compose": compose, "distance": distance, "calibration": calibration}
        )
        for compose in ("or", "and")
        for distance in ("l2", "squared")
        for calibration in ("none", "score", "shift", "probability")
    },
    "LR alone": Variant("terms", {"logit": "none"}),
    "MLS alone": Variant("terms", {"in_task": "none"}),
    "EBO instead of MLS": Variant("terms", {"logit": "ebo"}),
    "MSP instead of MLS": Variant("terms", {"logit": "msp"}),
    "E_t = MD, E_tc constant": Variant("terms", {"out_of_task": "constant"}),
    "E_t = MD, E_tc = MD": Variant("terms", {"out_of_task": "md"}),
    "E_t = KNN, E_tc = KNN": Variant("terms", {"in_task": "knn"}),
    "E_t = KNN, E_tc = MD": Variant("terms", {"in_task": "knn", "out_of_task": "md"}),
    "E_t = KNN, E_tc constant": Variant("terms", {"in_task": "knn", "out_of_task": "constant"}),
    **{
        # The paper's table is in units of 20/d^2, ours of 1/d^2.
        f"beta1 = {b1}, beta2 = {b2}": Variant("beta", {"beta1": b1, "beta2": 20 * b2})
        for b1 in (0.5, 0.7, 0.9)
        for b2 in (15.0, 20.0, 25.0)
    },
    **{f"gamma = {g}": Variant("gamma", {"gamma": g}) for g in (0.01, 0.1, 0.5, 1.0)},
    **{f"k = {k}": Variant("k", {"k": k}) for k in (1, 2, 10, 50, 100)},
    **{f"memory = {100 * share:.0f} %": Variant("memory", memory=share) for share in (0.1, 0.25, 0.5)},
}
GROUPS = tuple(dict.fromkeys(variant.group for variant in VARIANTS.values() if variant.group))


def ablate(
    run: Path, data: Path | None, weights: Path | None, device: str, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Last, task prediction and pooled AUROC of every variant, after the final task.

    `only` names the groups of variants wanted, by default all; the score as it was trained comes first in any case.
    """
    unknown = [group for group in only if group not in GROUPS]
    if unknown:
        raise TplError(f"There is no group of variants '{unknown[0]}'; there are {', '.join(GROUPS)}.")
    description = RunResult.read(run).description
    if description["method"] != TPL.name:
        raise TplError(f"{run} is a run of {description['method']}; only tpl has a score to take apart.")
    method = Learner.load(run / "model", weights, device).method
    assert isinstance(method, TPL)
    outputs = run_outputs(run, description, data, lambda: method).to(method.compute.device)
    measure = _Measure(method, outputs)
    wanted = {name: v for name, v in VARIANTS.items() if not v.group or not only or v.group in only}
    return [
        {"variant": name, "group": v.group, "changes": v.changes, "memory_share": v.memory} | measure(v)
        for name, v in wanted.items()
    ]


class _Measure:
    """Measures variants of one model; task scores that several of them share are computed once."""

    def __init__(self, method: TPL, outputs: RunOutputs) -> None:
        self.method, self.outputs = method, outputs
        self.trained = method.config.to_dict()
        self.task_of_class = task_of_class(method.task_classes_)
        self.known: dict[str, tuple[Tensor, float | None]] = {}  # scores and their AUROC, by the options behind them

    def __call__(self, variant: Variant) -> dict[str, float | None]:
        options = self.trained | variant.changes
        with smaller_memory(self.method, variant.memory):
            self.method.rescore(**options)
            key = repr((variant.memory, {k: v for k, v in options.items() if k not in AFTERWARDS}))
            if key not in self.known:
                self.known[key] = self._scores()
            scores, auroc = self.known[key]
            answers = self.method.log_probabilities_of(self.outputs.models, scores).cpu()
        return self._accuracies(answers) | {"auroc": auroc}

    def _scores(self) -> tuple[Tensor, float | None]:
        scores = self.method.task_scores(self.outputs.models)
        if scores.shape[1] == 1:
            return scores, None
        return scores, metrics.detection(scores.cpu().numpy(), self.outputs.tasks.numpy())["auroc_pooled"]

    def _accuracies(self, answers: Tensor) -> dict[str, float | None]:
        labels, tasks = self.outputs.labels, self.outputs.tasks
        sizes = tasks.bincount().tolist()
        parts = zip(answers.split(sizes), labels.split(sizes), strict=True)
        rows = [accuracies(part, own, t, self.task_of_class) for t, (part, own) in enumerate(parts)]
        last, _, tp = (sum(n * a for n, a in zip(sizes, c, strict=True)) / sum(sizes) for c in zip(*rows, strict=True))
        return {"last": last, "tp": tp}


@contextmanager
def smaller_memory(method: TPL, share: float) -> Iterator[None]:
    """Leave the first `share` of every class's exemplars in the memory, at least one; then all are back.

    That is the memory as it would be with a smaller budget: it keeps the first of a fixed ranking. `rescore` takes note
    of it, within and after.
    """
    exemplars, seen = method.memory.exemplars, method.memory_outputs_
    kept = [images[: max(1, round(share * len(images)))] for images in exemplars]
    rows = torch.cat(
        [torch.arange(len(images)) < len(few) for images, few in zip(exemplars, kept, strict=True)]
        or [torch.zeros(0, dtype=torch.bool)]
    )
    try:
        method.memory.restore(kept)
        method.memory_outputs_ = [Outputs(*(column[rows.to(column.device)] for column in each)) for each in seen]
        yield
    finally:
        method.memory.restore(exemplars)
        method.memory_outputs_ = seen
