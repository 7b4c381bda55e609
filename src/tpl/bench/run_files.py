"""The schemas of a run's files, which may come from elsewhere or from an earlier version.

In run.json and results.json, keys that are not listed here may hold anything, and most may be missing: what a reader
needs it asks for itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tpl.files import read_bounded
from tpl.header import check_against

MAX_BYTES = 64 << 20

Text = Annotated[str, Field(max_length=10_000)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=True, ge=-1e18, le=1e18)]
Value = bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | float | Text | None
Rows = Annotated[list[Annotated[list[Share | None], Field(max_length=2000)]], Field(max_length=2000)]
Matrices = dict[Text, Rows]


class _Open(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class EncoderOfRun(_Open):
    """The encoder of a run."""

    name: Text
    sha256: Text | None = None


class Description(_Open):
    """run.json: what was run."""

    benchmark: Text = ""
    method: Text
    options: dict[Text, Value | list[Value]] = {}
    benchmark_options: dict[Text, Value | list[Value]] = {}
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    order: Text = ""
    classes: list[list[Text]] = []
    test_images: list[Count] = []
    encoder: EncoderOfRun | None = None
    data: dict[Text, Value] | Text | None = None
    environment: dict[Text, Value] = {}
    precision: Text | None = None
    validation: Share | None = None
    held_out: Share | None = None
    contamination: list[Text] | None = None


class Summary(_Open):
    """The numbers of a run."""

    last: Share | None = None
    aia: Share | None = None
    til: Share | None = None
    tp: Share | None = None
    forgetting_classic: Number | None = None
    detection: dict[Text, Number | None] | None = None
    capacity: dict[Text, Number] | None = None
    covariance_estimators: list[Any] | dict[Text, Any] | None = None
    contamination: list[Text] | None = None
    drift: Number | None = None
    passes: Number | None = None
    seconds: Number | None = None
    seconds_per_task: Number | None = None
    seconds_evaluation: Number | None = None
    steps_per_task: Number | None = None
    loss_by_epoch: Annotated[list[Number], Field(max_length=100_000)] | None = None
    training_images_per_second: Number | None = None
    parameters: Count | None = None
    memory_images: Count | None = None
    memory_bytes: Count | None = None
    network_bytes: Count | None = None
    network_and_memory_bytes: Count | None = None
    peak_device_bytes: Count | None = None
    together: Count | None = None


class Results(_Open):
    """results.json: what was measured."""

    summary: Summary
    matrices: Matrices
    parts: dict[Text, Matrices] = {}
    task_confusion: list[list[Count]] | None = None
    class_accuracy: list[list[Share | None]] | None = None


class DetectorNumbers(BaseModel):
    """What the study of detectors measured of one detector on one run."""

    model_config = ConfigDict(strict=True, extra="forbid")

    last: Share
    auroc: Share
    til: Share
    last_calibrated: Share


class DetectorsFile(BaseModel):
    """detectors.json: the numbers of detectors on the run whose results.json has this hash."""

    model_config = ConfigDict(strict=True, extra="forbid")

    results_sha256: Text
    detectors: dict[Text, DetectorNumbers]


class EventLine(_Open):
    """A line of events.jsonl; what an event of another kind says is not looked at."""

    kind: Text
    time: Number
    images: list[Annotated[int, Field(ge=0, lt=2**40)]] = Field([], max_length=100_000)
    learned: Count = 0
    epoch: Count = 0
    epochs: Count = 0
    stage: Count = 0


class PlannedRun(BaseModel):
    """One run in a suite's suite.json; its directory lies in the suite's own."""

    model_config = ConfigDict(strict=True, extra="forbid")

    method: Text
    benchmark: Text
    order: Text
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    directory: Annotated[str, Field(pattern=r"^[^/\\\\\x00]{1,255}$")]


def read_run_file(file: Path, schema: type[BaseModel], most: int = MAX_BYTES) -> dict[str, Any]:
    """The content of a run's file; ValueError, naming the first wrong key, unless it fits the schema.

    OSError for a file of more than `most` bytes.
    """
    try:
        content: dict[str, Any] = json.loads(read_bounded(file, most))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    try:
        check_against(schema, content)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error
    return content
