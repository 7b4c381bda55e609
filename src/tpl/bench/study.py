"""The paper's study of OOD detectors as task predictors: one bank, twelve detectors, eight training techniques.

Post-hoc detectors share one HAT run. Each training technique has a run of its own, scored by MSP. The task is predicted
in two ways: the paper's hard choice of the largest raw score, and the choice after calibration on stored images.

Every run's directory keeps the numbers of its detectors in detectors.json, so an interrupted study measures none twice.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tpl.bench import metrics
from tpl.bench.metrics import line_through
from tpl.bench.outputs import RunOutputs, compute_outputs, run_outputs, stream_of
from tpl.bench.paper import load_rows
from tpl.bench.results import RunResult
from tpl.bench.run import execute_together
from tpl.bench.run_files import DetectorNumbers, DetectorsFile, read_run_file
from tpl.bench.spec import RunSpec
from tpl.engine import Callback, Event, RunLabel, labelled, no_callback
from tpl.errors import TplError
from tpl.files import replace_atomically, sha256_of
from tpl.learner import Learner
from tpl.methods.bank.techniques import TECHNIQUES
from tpl.methods.hat import HAT
from tpl.scores import DETECTORS

PLAIN = "none"
NUMBERS = "detectors.json"
NUMBERS_LIMIT = 1 << 20  # bytes
MEASURED = tuple(DetectorNumbers.model_fields)
TRAINED = tuple(name for name in TECHNIQUES if name != PLAIN)
ALL = (*DETECTORS, *TRAINED)
PRINTED_AS = {"klm": "kl-matching"}  # keys that differ in the paper's table


def study(
    spec: RunSpec, orders: Sequence[str], out: Path, names: Sequence[str] = ALL, callback: Callback = no_callback
) -> dict[str, Any]:
    """Train what is not trained yet under `out`, measure every detector of `names`, and fit accuracy against AUROC.

    `spec` is a run of `hat`; its class order is replaced by each of `orders`, which train side by side.
    """
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise TplError(f"There is no detector '{unknown[0]}'; there are {', '.join(ALL)}.")
    found: dict[str, list[dict[str, float]]] = {}
    post_hoc = [name for name in DETECTORS if name in names]
    todo = {PLAIN: post_hoc} if post_hoc else {}
    todo |= {technique: ["msp"] for technique in TRAINED if technique in names}
    for number, (technique, detectors) in enumerate(todo.items()):
        label = RunLabel("hat" if technique == PLAIN else technique, number, len(todo))
        places = _trained(spec, orders, out, technique, labelled(callback, label))
        callback(
            Event("phase", {"phase": f"measuring detectors of {label.name}", "steps": len(places) * len(detectors)})
        )
        for place in places:
            for name, row in _measured(place, spec, detectors):
                found.setdefault(name if technique == PLAIN else technique, []).append(row)
                callback(Event("step", {"steps": 1}))
    rows = [_row(name, spec.benchmark, found[name]) for name in names]
    result = {
        "benchmark": spec.benchmark,
        "encoder": spec.encoder,
        "orders": list(orders),
        "rows": rows,
        "fit": {column: line_through(rows, column) for column in ("last", "last_calibrated")},
        "paper_fit": line_through([row["paper"] for row in rows if row["paper"]], "last"),
        "runs": sorted(str(place.relative_to(out)) for place in out.glob("*/*") if (place / "run.json").exists()),
    }
    replace_atomically(out / "study.json", json.dumps(result, indent=2) + "\n")
    return result


def _trained(spec: RunSpec, orders: Sequence[str], out: Path, technique: str, callback: Callback) -> list[Path]:
    """Train what is not trained yet; the directories of the finished runs, one per class order."""
    options = {"extra_scores": "all"} if technique == PLAIN else {"technique": technique, "keep_images": True}
    specs = [dataclasses.replace(spec, method="hat", order=order, options=spec.options | options) for order in orders]
    places = [out / technique / order.replace(":", "-").replace("/", "_") for order in orders]
    execute_together(specs, places, resume=True, callback=callback)
    return places


def _measured(place: Path, spec: RunSpec, detectors: Sequence[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """The numbers of every detector on one run; those that were measured before need no model."""
    run = sha256_of(place / "results.json")
    known = _measured_before(place / NUMBERS, run)
    yield from ((name, known[name]) for name in detectors if name in known)
    if missing := [name for name in detectors if name not in known]:
        for name, row in _measure(place, spec, missing):
            known[name] = row
            content = {"results_sha256": run, "detectors": known}
            replace_atomically(place / NUMBERS, json.dumps(content, indent=2) + "\n")
            yield name, row


def _measured_before(file: Path, run: str) -> dict[str, dict[str, float]]:
    """The numbers in a detectors.json; none if it is missing, damaged, or of another run than that of results.json."""
    try:
        content = read_run_file(file, DetectorsFile, NUMBERS_LIMIT)
    except (OSError, ValueError):
        return {}
    found: dict[str, dict[str, float]] = content["detectors"]
    return found if content["results_sha256"] == run else {}


def _measure(place: Path, spec: RunSpec, detectors: Sequence[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """The numbers of every detector on one run's model, with hard and with calibrated choice of the task."""
    description = RunResult.read(place).description
    loaded = Learner.load(place / "model", spec.weights, spec.device, spec.precision, spec.compile)
    method = cast(HAT, loaded.method)  # `_trained` runs no other
    plain = run_outputs(place, description, spec.data, lambda: method).to(method.compute.device)
    for name in detectors:
        method.rescore(score=name, task_choice="hard")
        outputs = plain
        if name == "odin":  # it perturbs the images, so it needs its own forward pass
            outputs = compute_outputs(method, stream_of(description, spec.data)).to(method.compute.device)
        yield name, _answers(method, outputs)


def _answers(method: HAT, outputs: RunOutputs) -> dict[str, float]:
    answers = method.decide(outputs.seen)
    assert answers.scores is not None
    hard = outputs.accuracies(answers.log_p)
    auroc = metrics.detection(answers.scores.cpu().numpy(), outputs.tasks.numpy())["auroc_pooled"]
    method.rescore(task_choice="calibrated")
    calibrated = outputs.accuracies(method.decide(outputs.seen, scores=answers.scores).log_p)
    method.rescore(task_choice="hard")
    return {"last": hard.last, "auroc": auroc, "til": hard.til, "last_calibrated": calibrated.last}


def _row(name: str, benchmark: str, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Mean and standard deviation over the class orders in percent, and the paper's numbers."""
    kind = "post-hoc" if name in DETECTORS else "trained"
    row: dict[str, Any] = {"detector": name, "kind": kind, "runs": len(runs)}
    for key in MEASURED:
        values = [100 * run[key] for run in runs]
        row[key] = float(np.mean(values))
        row[f"{key}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    row["paper"] = paper_numbers(name, benchmark)
    return row


def paper_numbers(name: str, benchmark: str) -> dict[str, float] | None:
    """The paper's numbers for a detector on a benchmark, or None if it has none."""
    wanted = f"ood/{PRINTED_AS.get(name, name)}/{benchmark}"
    row = next((row for row in load_rows() if row.name == wanted), None)
    return None if row is None else {key: row.target(key) for key in row.values if key in MEASURED}
