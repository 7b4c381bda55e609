"""Ablations of the scores of tpl and tpl-plus on one trained model: all variants differ at evaluation time only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tpl.bench import metrics
from tpl.bench.outputs import RunOutputs, run_outputs
from tpl.bench.results import RunResult
from tpl.engine import Callback, Event, no_callback
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.bank import Outputs
from tpl.methods.plus import TPLPlus
from tpl.methods.tpl import TPL

# Options that turn scores into probabilities: the scores do not depend on them.
AFTERWARDS = ("gamma", "calibration", "expert_weight", "passes", "passes_mass")


@dataclass(frozen=True)
class Variant:
    """One choice of the score's options, or of the share of the memory that it uses."""

    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    memory: float = 1.0  # share of every class's exemplars


# The paper's ablations (its Fig. 3, the beta table), and points where the paper and its public code differ.
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
    "LR alone": Variant("terms", {"logit_score": "none"}),
    "MLS alone": Variant("terms", {"in_task": "none"}),
    "EBO instead of MLS": Variant("terms", {"logit_score": "ebo"}),
    "MSP instead of MLS": Variant("terms", {"logit_score": "msp"}),
    "E_t = MD, E_tc constant": Variant("terms", {"out_of_task": "constant"}),
    "E_t = MD, E_tc = MD": Variant("terms", {"out_of_task": "md"}),
    "E_t = KNN, E_tc = KNN": Variant("terms", {"in_task": "knn"}),
    "E_t = KNN, E_tc = MD": Variant("terms", {"in_task": "knn", "out_of_task": "md"}),
    "E_t = KNN, E_tc constant": Variant("terms", {"in_task": "knn", "out_of_task": "constant"}),
    **{
        # The paper's grid, 15 to 25, is 0.78 to 1.3 times the inverse mean of its encoder (384 features: 384 / 20).
        f"beta1 = {b1:g} and beta2 = {b2:g} inverse means": Variant("beta", {"beta1": f"{b1:g}x", "beta2": f"{b2:g}x"})
        for b1 in (0.78, 1.0, 1.3)
        for b2 in (0.78, 1.0, 1.3)
        if (b1, b2) != (1.0, 1.0)
    },
    **{
        # The numbers of the paper's table, which is in units of 20/d^2; ours of 1/d^2.
        f"beta1 = {b1}, beta2 = {b2}": Variant("beta", {"beta1": b1, "beta2": 20 * b2})
        for b1 in (0.5, 0.7, 0.9)
        for b2 in (15.0, 20.0, 25.0)
    },
    **{f"gamma = {g}": Variant("gamma", {"gamma": g}) for g in (0.01, 0.1, 0.5, 1.0)},
    **{f"k = {k}": Variant("k", {"k": k}) for k in (1, 2, 10, 50, 100)},
    **{f"memory = {100 * share:.0f} %": Variant("memory", memory=share) for share in (0.1, 0.25, 0.5)},
}
# Options of tpl-plus. The expert alone answers like `ranpac`, the bank alone like `tpl`.
PLUS_VARIANTS: dict[str, Variant] = {
    "bank alone": Variant("expert", {"expert_weight": 0.0}),
    "expert alone": Variant("expert", {"passes": "0"}),
    **{f"expert weight = {w}": Variant("expert", {"expert_weight": w}) for w in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)},
    **{f"passes = {n}": Variant("passes", {"passes": str(n)}) for n in (1, 2, 3, 5)},
    **{
        f"passes = auto, mass = {share}": Variant("passes", {"passes": "auto", "passes_mass": share})
        for share in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
    },
}
BY_METHOD = {TPL.name: VARIANTS, TPLPlus.name: VARIANTS | PLUS_VARIANTS}


def groups_of(method: str) -> list[str]:
    """The groups of variants of a method."""
    return list(dict.fromkeys(variant.group for variant in BY_METHOD[method].values() if variant.group))


def ablate(
    run: Path,
    data: Path | None,
    weights: Path | None,
    device: str,
    only: Sequence[str] = (),
    callback: Callback = no_callback,
) -> list[dict[str, Any]]:
    """Last, task prediction and pooled AUROC of every variant, after the final task.

    `only` names the groups of variants wanted, by default all; the score as it was trained comes first in any case.
    """
    description = RunResult.read(run).description
    name = description["method"]
    if name not in BY_METHOD:
        raise TplError(f"{run} is a run of {name}; only {' and '.join(BY_METHOD)} have a score to take apart.")
    unknown = [group for group in only if group not in groups_of(name)]
    if unknown:
        raise TplError(f"{name} has no group of variants '{unknown[0]}'; there are {', '.join(groups_of(name))}.")
    method = cast(TPL, Learner.load(run / "model", weights, device).method)
    outputs = run_outputs(run, description, data, lambda: method, callback).to(method.compute.device)
    return measure_variants(method, outputs, only, callback)


def measure_variants(
    method: TPL, outputs: RunOutputs, only: Sequence[str] = (), callback: Callback = no_callback
) -> list[dict[str, Any]]:
    """Last, task prediction and pooled AUROC of every variant of a loaded method, which is left unchanged."""
    measure = _Measure(method, outputs)
    wanted = {
        name: v
        for name, v in BY_METHOD[method.name].items()
        if (not v.group or not only or v.group in only) and _possible(method, v)
    }
    callback(Event("phase", {"phase": "measuring variants", "steps": len(wanted)}))
    rows = []
    for name, v in wanted.items():
        rows.append({"variant": name, "group": v.group, "changes": v.changes, "memory_share": v.memory} | measure(v))
        callback(Event("step", {"steps": 1}))
    method.rescore(**measure.trained)
    return rows


def _possible(method: TPL, variant: Variant) -> bool:
    """Whether the variant changes anything: without stored images there are no neighbours to vary.

    Weights are then fitted to the evidence itself, so that composition and scale matter only without calibration.
    """
    if method.config.memory_kind == "images":
        return True
    changes = variant.changes
    if changes.get("compose") and changes["calibration"] != "none":
        return False
    nearest = changes.get("distance") == "squared" or changes.get("in_task") == "knn"
    return not nearest and changes.get("out_of_task") != "md" and variant.group not in ("k", "memory", "beta")


class _Measure:
    """Measures variants of one model; task scores that several of them share are computed once."""

    def __init__(self, method: TPL, outputs: RunOutputs) -> None:
        self.method, self.outputs = method, outputs
        self.trained = method.config.to_dict()
        self.known: dict[str, tuple[Tensor, float | None]] = {}  # scores and their AUROC, by the options behind them

    def __call__(self, variant: Variant) -> dict[str, float | None]:
        method, outputs, options = self.method, self.outputs, self.trained | variant.changes
        with smaller_memory(method, variant.memory):
            method.rescore(**options)
            key = repr((variant.memory, {k: v for k, v in options.items() if k not in AFTERWARDS}))
            if key not in self.known:
                self.known[key] = self._scores()
            scores, auroc = self.known[key]
            answers = method.decide(outputs.seen, scores=scores)
        assert answers.passes is not None
        found, passes = outputs.accuracies(answers.log_p), float(answers.passes.double().mean())
        return {"last": found.last, "tp": found.tp, "auroc": auroc if passes else None, "passes": passes}

    def _scores(self) -> tuple[Tensor, float | None]:
        scores = self.method.task_scores(self.outputs.models, self.outputs.common)
        if scores.shape[1] == 1:
            return scores, None
        return scores, metrics.detection(scores.cpu().numpy(), self.outputs.tasks.numpy())["auroc_pooled"]


@contextmanager
def smaller_memory(method: TPL, share: float) -> Iterator[None]:
    """Reduce the memory to the first `share` of every class's exemplars, at least one, and restore it at the end.

    A smaller budget would store the same exemplars, since their ranking is fixed. Call `rescore` within the context and
    after it to make the change effective.
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
