"""Outputs of every task's model for a run's test images: computed once, then read from the run's directory.

outputs/000.safetensors    features and logits of all test images under the first task's model, and their labels;
                           and the features that all tasks have in common, if the method has any
outputs/001.safetensors    and so on, one file per task

Every file names the images and the model it was made from. Files of other images or of another model are not used but
made again, for which the images are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tpl.bench.benchmarks import find_benchmark
from tpl.bench.evaluate import ReadTable
from tpl.engine import Callback, Event, no_callback
from tpl.errors import TplError
from tpl.files import sha256_of
from tpl.methods import Method
from tpl.methods.bank import ForwardPass, Outputs
from tpl.methods.base import KEEP, task_of_class
from tpl.stream import Stream, fingerprint


class StaleOutputs(TplError):
    """The stored outputs are not those of this run's images and model."""


class Accuracies(NamedTuple):
    """Accuracy over all test images: of the class, of the class within the true task, of the task."""

    last: float
    til: float
    tp: float


@dataclass(frozen=True)
class RunOutputs:
    """Outputs of every task's model for all test images of a run, ordered by task."""

    models: list[Outputs]  # one entry a task
    labels: Tensor  # [n], among all classes in the order of arrival
    tasks: Tensor  # [n], the task of every image
    common: Tensor | None = None  # [n, dim], a method's `common_features`

    def to(self, device: torch.device) -> RunOutputs:
        """A copy with features and logits on a device."""
        moved = [Outputs(*(column.to(device) for column in seen)) for seen in self.models]
        common = None if self.common is None else self.common.to(device)
        return RunOutputs(moved, self.labels, self.tasks, common)

    @property
    def seen(self) -> list[ForwardPass]:
        """The argument of a method's `decide`."""
        return [ForwardPass(self.models, self.common)]

    def accuracies(self, log_probabilities: Tensor) -> Accuracies:
        """The accuracies of class probabilities for all images."""
        owner = self.tasks.new_zeros(int(self.labels.max()) + 1)
        owner[self.labels] = self.tasks
        return Accuracies(*ReadTable.of(log_probabilities, self.labels, owner).accuracies())


def run_outputs(
    run: Path,
    description: dict[str, Any],
    data: Path | None,
    load: Callable[[], Method],
    callback: Callback = no_callback,
) -> RunOutputs:
    """The run's outputs: read from its directory if stored, else computed from the images in `data` and stored.

    `description` is the run's run.json; `load` gives its trained method, and is called only if outputs are computed.
    """
    problem = ""
    try:
        found = read_outputs(run, description)
        if found is not None:
            return found
    except StaleOutputs as stale:
        problem = f"{stale} To make them anew, the images are needed: "
    try:
        stream = stream_of(description, data)
        if fingerprint([task.test for task in stream]) != description["data"]["test"]:
            raise TplError(f"The images in {data or 'the data set'} are not those that {run} was measured on.")
    except TplError as error:
        raise TplError(f"{problem}{error}") from error
    outputs = compute_outputs(load(), stream, callback)
    _keep(run, description, outputs)
    return outputs


def check_unchanged(method: Method, classes: Sequence[Sequence[str]]) -> None:
    """Refuse a model whose numbers of classes have changed since the run was measured."""
    if [len(names) for names in method.task_classes_] != [len(names) for names in classes]:
        raise TplError("The run's model has gained or lost classes since: it is not the one that was measured.")


def read_outputs(run: Path, description: dict[str, Any]) -> RunOutputs | None:
    """The stored outputs, or None if they are not (all) there."""
    files = _files(run, description)
    if not all(file.is_file() for file in files):
        return None
    origin = _origin(run, description)
    models = []
    labels, common = torch.zeros(0, dtype=torch.long), None
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                noted = content.metadata() or {}
                models.append(Outputs(content.get_tensor("features"), content.get_tensor("logits")))
                labels = content.get_tensor("labels")
                common = content.get_tensor("common") if "common" in content.keys() else common  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise StaleOutputs(f"{file} cannot be read ({error}).") from error
        if noted.get("images") != origin["images"]:
            raise StaleOutputs(f"{file} was made from other images than {run} was measured on.")
        if noted.get("model") != origin["model"]:
            raise StaleOutputs(f"{file} was made by another model than the one that is now in {run}.")
    return RunOutputs(models, labels, task_of_class(description["classes"])[labels], common)


def stream_of(description: dict[str, Any], data: Path | None) -> Stream:
    """The tasks of a run."""
    return find_benchmark(description["benchmark"]).stream(
        data,
        description["order"],
        per_task=tuple(len(classes) for classes in description["classes"]),
        validation=description["validation"],
        seed=description["seed"],
    )


def compute_outputs(method: Method, stream: Stream, callback: Callback = no_callback) -> RunOutputs:
    """Run every task's model on every task's test images; only one task's images are in memory at a time."""
    callback(Event("phase", {"phase": "test images, by task", "steps": len(stream)}))
    check_unchanged(method, [task.classes for task in stream])
    parts: list[ForwardPass] = []
    labels, offset = [], 0
    for task in stream:
        assert task.test is not None  # Benchmark.stream sees to it
        fits = method.compute.room_for(len(task.test) * method.preprocess.bytes_per_image)
        pixels = method.preprocess.batch(task.test, device=method.compute.device if fits else None)
        parts.append(method.forward(pixels, {KEEP}).cpu())
        labels.append(torch.tensor(np.asarray(task.test.labels)) + offset)
        offset += len(task.classes)
        callback(Event("step", {"steps": 1}))
    seen, joined = ForwardPass.joined(parts), torch.cat(labels)
    owner = task_of_class([task.classes for task in stream])
    return RunOutputs(seen.outputs, joined, owner[joined], seen.common)


def _keep(run: Path, description: dict[str, Any], outputs: RunOutputs) -> None:
    """Write the files, each atomically. If that fails, the outputs are computed again next time."""
    origin = _origin(run, description)
    with suppress(OSError, SafetensorError):
        (run / "outputs").mkdir(exist_ok=True)
        common = {} if outputs.common is None else {"common": outputs.common}
        for file, seen in zip(_files(run, description), outputs.models, strict=True):
            _write(file, seen._asdict() | {"labels": outputs.labels} | common, origin)
            common = {}  # once is enough


def _write(file: Path, tensors: dict[str, Tensor], origin: dict[str, str]) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")  # another process may write the same file
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata=origin)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _files(run: Path, description: dict[str, Any]) -> list[Path]:
    return [run / "outputs" / f"{t:03d}.safetensors" for t in range(len(description["classes"]))]


def _origin(run: Path, description: dict[str, Any]) -> dict[str, str]:
    """What the outputs depend on: the test images, and the model with all its files' checksums."""
    try:
        return {"images": description["data"]["test"], "model": sha256_of(run / "model" / "model.json")}
    except OSError as error:
        raise TplError(f"{run} holds no model ({error}).") from error
