"""Ablations of TPL's score on one trained model: every variant is a choice made at evaluation time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpl.bench.benchmarks import find_benchmark
from tpl.bench.evaluate import Evaluator
from tpl.bench.results import RunResult
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.methods.tpl import TPL

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
        for calibration in ("none", "score", "probability")
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
        data, description["order"], tasks=tasks, validation=description["validation"], seed=description["seed"]
    )
    if json.loads(json.dumps([list(t.classes) for t in stream])) != description["classes"]:
        raise TplError(f"The images in {data} do not give the tasks of {run}.")
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
