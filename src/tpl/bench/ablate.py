"""Ablations of TPL's score on one trained model: every variant is a choice made at evaluation time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tpl.bench.benchmarks import find_benchmark
from tpl.bench.evaluate import Evaluator
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.tpl import TPL
from tpl.stream import fingerprint

# The paper's ablations (its Fig. 3, the beta table) and the readings in which paper and public code differ.
VARIANTS: dict[str, dict[str, Any]] = {
    "as trained": {},
    **{
        f"{compose}, {distance}, calibration {calibration}": {
            "compose": compose,
            "distance": distance,
            "calibration": calibration,
        }
        for compose in ("or", "and")
        for distance in ("l2", "squared")
        for calibration in ("none", "score", "shift", "probability")
    },
    "LR alone": {"logit": "none"},
    "MLS alone": {"in_task": "none"},
    "EBO instead of MLS": {"logit": "ebo"},
    "MSP instead of MLS": {"logit": "msp"},
    "E_t = MD, E_tc constant": {"out_of_task": "constant"},
    "E_t = MD, E_tc = MD": {"out_of_task": "md"},
    "E_t = KNN, E_tc = KNN": {"in_task": "knn"},
    "E_t = KNN, E_tc = MD": {"in_task": "knn", "out_of_task": "md"},
    "E_t = KNN, E_tc constant": {"in_task": "knn", "out_of_task": "constant"},
    **{
        # The paper's table is in units of 20/d^2, ours of 1/d^2.
        f"beta1 = {b1}, beta2 = {b2}": {"beta1": b1, "beta2": 20 * b2}
        for b1 in (0.5, 0.7, 0.9)
        for b2 in (15.0, 20.0, 25.0)
    },
    **{f"gamma = {g}": {"gamma": g} for g in (0.01, 0.1, 0.5, 1.0)},
    **{f"k = {k}": {"k": k} for k in (1, 2, 10, 50, 100)},
}


def ablate(run: Path, data: Path | None, weights: Path | None, device: str) -> list[dict[str, Any]]:
    """Last, task prediction and pooled AUROC of every variant, after the final task."""
    description = RunResult.read(run).description
    if description["method"] != TPL.name:
        raise TplError(f"{run} is a run of {description['method']}; only tpl has a score to take apart.")
    learner = Learner.load(run / "model", weights, device)
    method = learner.method
    assert isinstance(method, TPL)
    benchmark = find_benchmark(description["benchmark"])
    tasks = len(description["classes"])
    stream = benchmark.stream(
        data,
        description["order"],
        per_task=tuple(len(classes) for classes in description["classes"]),
        validation=description["validation"],
        seed=description["seed"],
    )
    if fingerprint([task.test for task in stream]) != description["data"]["test"]:
        raise TplError(f"The images in {data} are not those that {run} was measured on.")
    evaluator = Evaluator(stream, method)
    trained = method.config
    sizes = description["test_images"]
    rows = []
    for name, changes in VARIANTS.items():
        method.rescore(**(trained.to_dict() | changes))
        stage = evaluator.stage(tasks - 1)
        rows.append(
            {
                "variant": name,
                "changes": changes,
                "last": sum(n * a for n, a in zip(sizes, stage.cil, strict=True)) / sum(sizes),
                "tp": sum(n * a for n, a in zip(sizes, stage.tp, strict=True)) / sum(sizes),
                "auroc": stage.detection["auroc_pooled"] if stage.detection else None,
            }
        )
    return rows
