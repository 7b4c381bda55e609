"""The demo: three learners on the bundled digits, side by side, in a few minutes and offline."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpl.bench.results import RunResult
from tpl.bench.run import execute
from tpl.bench.spec import RunSpec
from tpl.engine import Callback, RunLabel, labelled

BENCHMARK = "digits-5t"
METHODS: dict[str, dict[str, Any]] = {"finetune": {}, "tpl": {}, "joint": {"stages": "last"}}  # and their options


@dataclass(frozen=True)
class DemoResult:
    """The three runs of the demo."""

    runs: dict[str, RunResult]
    places: list[Path]

    def placed(self) -> list[tuple[Path, RunResult]]:
        """The runs with their directories."""
        return list(zip(self.places, self.runs.values(), strict=True))

    def rows(self) -> dict[str, dict[str, Any]]:
        """The numbers of the final table, by method."""
        joint = self.runs["joint"]
        keys = ("last", "aia", "til", "tp")
        return {
            name: {key: run.summary[key] for key in keys} | run.against(joint) | {"seconds": run.summary["seconds"]}
            for name, run in self.runs.items()
        }


def run_demo(out: Path, device: str, resume: bool, callback: Callback, epochs: int | None = None) -> DemoResult:
    """Make the three runs one after the other; `resume` continues an interrupted demo.

    `epochs` replaces the benchmark's own number of epochs a task.
    """
    runs, places = {}, []
    given = {} if epochs is None else {"epochs": epochs}
    for number, (method, options) in enumerate(METHODS.items()):
        spec = RunSpec(BENCHMARK, method, device=device, options=options | given)
        place = out / f"demo-{spec.directory_name()}"  # with a prefix, so that no other run is ever removed
        if not resume and (place / "run.json").exists():
            shutil.rmtree(place)  # an earlier demo's run: the demo is meant to be watched
        label = RunLabel(method, number, len(METHODS))
        runs[method] = execute(spec, place, resume, labelled(callback, label))
        places.append(place)
    return DemoResult(runs, places)
