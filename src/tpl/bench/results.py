"""What a run directory holds: the numbers of every stage, the result, the machine, and who works in it.

Imports no torch: finished runs are listed and compared in a second.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpl._version import __version__
from tpl.bench import metrics
from tpl.bench.benchmarks import BENCHMARKS, CHOSEN_BY_USER
from tpl.bench.metrics import Matrix, matrix_of
from tpl.bench.run_files import Description, Results, read_run_file
from tpl.errors import TplError
from tpl.files import replace_atomically
from tpl.migrate import current_options
from tpl.pretraining import contamination
from tpl.store import ModelStore

if TYPE_CHECKING:
    import torch

KINDS = ("cil", "til", "tp")
PART = "part"  # key of a description: the part of a prediction that a result is about
DETAILS = ("task_confusion", "class_accuracy")


@dataclass(frozen=True)
class RunResult:
    """The numbers of one finished run."""

    description: dict[str, Any]  # run.json
    summary: dict[str, Any]
    matrices: dict[str, Matrix]
    # None for runs made before these were recorded.
    task_confusion: list[list[int]] | None = None  # test images by true task and predicted task, at the end
    class_accuracy: list[list[float | None]] | None = None  # one row a stage, one entry for each class so far
    part_matrices: dict[str, dict[str, Matrix]] = field(default_factory=dict)  # of parts of a prediction, by name

    @property
    def sizes(self) -> list[int]:
        """Number of test images per task."""
        return list(self.description["test_images"])

    @property
    def contamination(self) -> list[str]:
        """The data sets of the encoder's pre-training that share classes with the benchmark's."""
        return contamination_of(self.description)

    def parts(self) -> dict[str, RunResult]:
        """The accuracies of each part of the method's predictions alone, by the part's name.

        A part is trained and stored with the whole, so it has no costs of its own.
        """
        return {
            name: RunResult(self.description | {PART: name}, accuracies(matrices, self.sizes), matrices)
            for name, matrices in self.part_matrices.items()
        }

    def against(self, joint: RunResult) -> dict[str, float | None]:
        """The paper's rectified forgetting, relative to a joint run over the same classes and images.

        None for what needs stages that one of the runs has left out. A joint run over the same images in other tasks
        has no stages in common with this one, but it ends with the same classes: the difference in Last is what was
        lost, as a mean over images. It is the paper's mean over tasks where these have equally many test images.
        """
        if not same_tasks(self.description, joint.description):
            if not same_images(self.description, joint.description):
                what = _differing(self.description, joint.description)
                raise TplError(f"Rectified forgetting compares runs over the same {what}; these differ in theirs.")
            lasts = [float(last) for run in (joint, self) if (last := run.summary.get("last")) is not None]
            return {"forgetting_last": lasts[0] - lasts[1] if len(lasts) == 2 else None, "forgetting_aia": None}
        mine, other = self.matrices["cil"], joint.matrices["cil"]
        return {
            "forgetting_last": _measured(metrics.rectified_forgetting_last(mine, other)),
            "forgetting_aia": _measured(metrics.rectified_forgetting_aia(mine, other)),
        }

    def write(self, out: Path) -> None:
        """Write results.json and one CSV per matrix."""
        for kind, matrix in self.matrices.items():
            with (out / f"{kind}.csv").open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(["stage", *(f"task {i}" for i in range(len(matrix)))])
                for t, row in enumerate(matrix):
                    writer.writerow([t, *("" if np.isnan(v) else f"{v:.6f}" for v in row)])
        content: dict[str, Any] = {"summary": self.summary, "matrices": _as_rows(self.matrices)}
        if self.part_matrices:
            content["parts"] = {name: _as_rows(matrices) for name, matrices in self.part_matrices.items()}
        content |= {key: value for key in DETAILS if (value := getattr(self, key)) is not None}
        replace_atomically(out / "results.json", json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, out: Path) -> RunResult:
        """Read the result of a finished run."""
        try:
            description = read_description(out)
            content = read_run_file(out / "results.json", Results)
            details = {key: content.get(key) for key in DETAILS}
            parts = {name: _as_matrices(rows) for name, rows in content.get("parts", {}).items()}
            matrices = _as_matrices(content["matrices"])
            return cls(description, content["summary"], matrices, **details, part_matrices=parts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TplError(f"{out} holds no finished run ({error}).") from error


def _as_rows(matrices: dict[str, Matrix]) -> dict[str, list[list[float]]]:
    """Accuracy matrices as lists, with an empty row for a stage that was left out."""
    return {
        kind: [[] if np.isnan(row).all() else row[: t + 1].tolist() for t, row in enumerate(matrix)]
        for kind, matrix in matrices.items()
    }


def _as_matrices(rows: dict[str, list[list[float]]]) -> dict[str, Matrix]:
    return {kind: matrix_of(of) for kind, of in rows.items()}


def accuracies(matrices: dict[str, Matrix], sizes: list[int]) -> dict[str, float | None]:
    """The metrics that follow from accuracy matrices; None for those that need stages which were left out."""
    cil = matrices["cil"]
    found = {
        "last": metrics.last(cil, sizes),
        "aia": metrics.average_incremental(cil, sizes),
        "forgetting_classic": metrics.classic_forgetting(cil),
    }
    found |= {kind: metrics.last(matrices[kind], sizes) for kind in ("til", "tp") if kind in matrices}
    return {name: _measured(value) for name, value in found.items()}


def _measured(value: float) -> float | None:
    return None if np.isnan(value) else value


def read_description(out: Path) -> dict[str, Any]:
    """The content of run.json, with options under today's names."""
    description = read_run_file(out / "run.json", Description)
    for key in {"options", "benchmark_options"} & set(description):
        description[key] = current_options(description["method"], description[key], complete=key == "options")
    return description


def same_tasks(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs, given their run.json, had the same images in the same tasks."""
    return all(one.get(key) == other.get(key) for key in ("classes", "data", "validation"))


def same_images(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs, given their run.json, ended with the same classes and images, in whatever tasks these came.

    The hashes of the data are over labels within tasks and images in order of arrival, so they say this for the same
    tasks only. Otherwise it takes a data set known by name, all classes and as many test images. What is held out by
    `validation` depends on the seed, the class and its images only.
    """
    if same_tasks(one, other):
        return True
    benchmarks = [BENCHMARKS.get(str(each.get("benchmark"))) for each in (one, other)]
    sources = {None if benchmark is None or benchmark.blurry else benchmark.source for benchmark in benchmarks}
    if len(sources) > 1 or sources & {None, *CHOSEN_BY_USER} or one.get("classes") == other.get("classes"):
        return False  # the same classes in the same tasks, but another hash: these are other images
    return _differing(one, other) == "images" and sum(one["test_images"]) == sum(other["test_images"])


def all_classes(description: Mapping[str, Any]) -> list[str]:
    """The classes of all tasks of a run, given its run.json, in order of arrival."""
    return [str(name) for names in description["classes"] for name in names]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What two runs over different tasks differ in, in words; the images, if it is nothing else."""
    if sorted(all_classes(one)) != sorted(all_classes(other)):
        return "classes"
    seeded = one.get("validation") is not None and one.get("seed") != other.get("seed")
    return "held-out images" if seeded or one.get("validation") != other.get("validation") else "images"


def contamination_of(description: Mapping[str, Any]) -> list[str]:
    """What run.json says about contamination; for runs made before that was recorded, what the encoder declares."""
    known = description.get("contamination")
    benchmark = BENCHMARKS.get(str(description.get("benchmark")))
    if known is not None or benchmark is None:
        return list(known or [])
    return contamination(str(description["encoder"]["name"]), benchmark.source)


def stage_file(out: Path, stage: int) -> Path:
    """The file with the numbers of a stage."""
    return out / "stages" / f"{stage:03d}.json"


def write_stage(out: Path, stage: int, content: dict[str, Any]) -> None:
    """Write the numbers of a stage, atomically."""
    replace_atomically(stage_file(out, stage), json.dumps(content, indent=2) + "\n")


def numbers_so_far(out: Path, stage: int) -> dict[str, float]:
    """The finite numbers of a run's summary after a stage."""
    summary = summarise(out, stage + 1).summary
    keys = ("last", "aia", "til", "tp", "forgetting_classic", "memory_images", "parameters", "seconds_per_task")
    found = {key: summary[key] for key in keys} | (summary["detection"] or {})
    return {key: float(value) for key, value in found.items() if value is not None and np.isfinite(value)}


def summarise(out: Path, upto: int | None = None) -> RunResult:
    """The result of all stages of a run, or of the first `upto`."""
    description = read_description(out)
    found = {int(f.stem): json.loads(f.read_text(encoding="utf-8")) for f in sorted((out / "stages").glob("*.json"))}
    found = {number: stage for number, stage in found.items() if upto is None or number < upto}
    stages, count = list(found.values()), max(found) + 1  # the first ones may have been left out
    matrices = _as_matrices({kind: [found[t][kind] if t in found else [] for t in range(count)] for kind in KINDS})
    parts = {
        name: _as_matrices(
            {kind: [found[t]["parts"][name][kind] if t in found else [] for t in range(count)] for kind in KINDS}
        )
        for name in stages[-1].get("parts") or ()
        if all(name in (stage.get("parts") or ()) for stage in stages)  # not in stages of an earlier version
    }
    sizes = description["test_images"]
    learning = [stage["seconds_learning"] for stage in stages]
    evaluation = [stage["seconds_evaluation"] for stage in stages]
    final = stages[-1]
    network_bytes = final.get("network_bytes", 4 * final["parameters"])  # older stages do not know the precision
    summary = {
        **accuracies(matrices, sizes),
        "detection": final["detection"],
        "passes": final.get("passes"),
        "drift": _largest([stage.get("drift") for stage in stages]),
        "seconds": sum(learning) + sum(evaluation),
        "seconds_per_task": sum(learning) / len(learning),
        "seconds_evaluation": sum(evaluation),
        "parameters": final["parameters"],
        "memory_images": final["memory_images"],
        "memory_bytes": final["memory_bytes"],
        "network_bytes": network_bytes,
        "network_and_memory_bytes": network_bytes + final["memory_bytes"],
        "capacity": final["capacity"],
        "covariance_estimators": final.get("covariance_estimators"),  # of every task; not in older stages
        "steps_per_task": _mean([(stage.get("trained") or {}).get("steps") for stage in stages]),
        "loss_by_epoch": _loss_by_epoch([stage.get("losses") for stage in stages]),
        "together": final.get("together", 1),  # number of runs trained side by side
        "training_images_per_second": _rate([stage.get("trained") or {} for stage in stages]),
        "peak_device_bytes": final.get("peak_device_bytes"),
        "contamination": contamination_of(description),
    }
    classes = [stage.get("class_accuracy") for stage in stages]
    # A resumed run may have stages that did not record it, or stages were left out.
    known = None if None in classes or len(classes) < count else classes
    return RunResult(description, summary, matrices, final.get("task_confusion"), known, parts)


def _mean(values: list[float | None]) -> float | None:
    """The mean of all values; None if one is missing, as in stages that did not record it."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _loss_by_epoch(losses: list[list[list[float]] | None]) -> list[float] | None:
    """The mean loss of every epoch over the tasks that were trained, of each task's first training.

    None if a stage did not record losses, if nothing was trained, or if trainings differ in their epochs.
    """
    first = [trainings[0] for trainings in losses if trainings]
    if not first or None in losses or len({len(epochs) for epochs in first}) > 1:
        return None
    return [sum(epoch) / len(first) for epoch in zip(*first, strict=True)]


def _largest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rate(trained: list[dict[str, Any]]) -> float | None:
    """Training images (forward and backward) per second, summed over the runs that were trained side by side."""
    seconds = sum(stage.get("seconds", 0.0) for stage in trained)
    return sum(stage["images"] for stage in trained if stage) / seconds if seconds else None


def describe_environment(device: torch.device) -> dict[str, Any]:
    """The machine and the versions behind a number: device, packages, the commit and a hash of the sources."""
    import torch

    from tpl.engine import current

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "tpl": __version__,
        "commit": _commit(),
        "sources": hash_sources(Path(__file__).parents[1]),
        "python": platform.python_version(),
        "platform": platform.system(),
        "device": f"{device.type}: {name}",
        "threads": torch.get_num_threads(),
        "processes": current().size,
        **{package: _version(package) for package in ("torch", "torchvision", "timm", "numpy", "scikit-learn")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """The checkout's commit, with `+changes` if files of the package differ from it.

    A copy of the sources without their history says `unknown`, or the value of TPL_COMMIT with `+unverified`.
    """
    package = Path(__file__).parents[1]
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")  # an installed copy may lie in another checkout
        head = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        given = os.environ.get("TPL_COMMIT")
        return f"{given}+unverified" if given else "unknown"
    return head + ("+changes" if changed else "")


def hash_sources(package: Path) -> str:
    """sha256 over the Python files of a package, by name: the same for a checkout and for a copy of it."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py"), key=lambda file: file.relative_to(package).as_posix()):
        content = file.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def is_held(place: Path) -> bool:
    """Whether a process works in a run directory; on another machine, whether it has not signed off."""
    try:
        holder = json.loads(ModelStore(place / "model").holder_file.read_text(encoding="utf-8"))
        return holder["host"] != socket.gethostname() or is_alive(int(holder["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process
    return True
