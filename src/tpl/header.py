"""The schema of `model.json`: every key with its type and bounds, and a seal over all of them.

A header is validated when it is read and before it is written, so whatever is read back was valid when it was written.
The seal is the sha256 of the header's own content. It proves that nothing changed by accident: a flipped bit, an edited
option, a half-copied file. It does not prove who wrote the model: whoever can write the file can write a new seal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Strict, ValidationError, model_validator

SEAL = "seal"
MAX_TASKS, MAX_CLASSES, MAX_OPTIONS = 10_000, 100_000, 200
MAX_PARTS, MAX_VERSIONS = 100_000, 10_000
FOLDER = r"tasks/[0-9]{3,9}"
SHARED, MEMORY = "shared", "memory"
# All files with tensors; large ones of what tasks share and of the memory have numbered files of their own.
PART = re.compile(rf"{FOLDER}/(?:task-[0-9]{{1,5}}|(?:shared|memory)(?:-[0-9]{{1,6}})?)\.safetensors")

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=10_000)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Field(ge=0, le=2**40)]
Part = Annotated[str, Field(pattern=rf"^{PART.pattern}\Z")]
Number = Annotated[int, Field(ge=0, lt=10**9)]  # of a version
Share = Annotated[float, Field(ge=0, le=1)]
Option = bool | Annotated[int, Field(ge=-(2**63), lt=2**63)] | FiniteFloat | Text | None


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", regex_engine="python-re")


class EncoderHeader(_Strict):
    """The network that a model was learned on; `weights` is the file, if one was given."""

    name: Name
    sha256: Hash
    fingerprint: Hash
    weights: Text | None


class TaskHeader(_Strict):
    """One task; schema 1 had its classes and its file alone."""

    name: Name = "task"
    classes: list[Name] = Field(min_length=1, max_length=MAX_CLASSES)
    images: list[Count] = []
    held_out: list[Count] = []
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    learned: Text = ""
    source: Text = ""
    confusions: list[Annotated[tuple[Name, Name, Count], Strict(False)]] = []
    measured_on: Count = 0
    file: Part

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        for counts in (self.images, self.held_out):
            if counts and len(counts) != len(self.classes):
                raise ValueError("it has other numbers of classes and of counts")
        return self


class MemoryFacts(_Strict):
    """What the memory holds."""

    kind: Name
    images: Count
    budget: Count
    bytes: Count


class FactsHeader(_Strict):
    """What `tpl show` tells beside tasks and encoder."""

    memory: MemoryFacts
    capacity: dict[Name, FiniteFloat] | None
    weighting: dict[Name, FiniteFloat | Text] | None
    covariance_estimators: Annotated[list[Name], Field(max_length=MAX_TASKS)] | None
    smallest_reject: Share | None  # None: the method has no unknown score


class PartsHeader(_Strict):
    """The files of what tasks share and of the memory."""

    shared: list[Part] = Field(min_length=1, max_length=MAX_PARTS)
    memory: list[Part] = Field(min_length=1, max_length=MAX_PARTS)


class Header(_Strict):
    """The whole of `model.json` but the seal."""

    schema_: Literal[1, 2, 3] = Field(alias="schema")
    tpl: Text = ""
    method: Name
    options: dict[Name, Option] = Field(max_length=MAX_OPTIONS)
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    encoder: EncoderHeader
    preset: Text = ""
    removed_tasks: Annotated[int, Field(ge=0, le=2**31)] = 0
    tasks: list[TaskHeader] = Field(max_length=MAX_TASKS)
    newest: Annotated[str, Field(pattern=rf"^{FOLDER}\Z")]
    commits: Annotated[int, Field(ge=1, lt=10**9)]
    files: dict[Part, Hash] | None = None
    facts: FactsHeader | None = None
    parts: PartsHeader | None = None  # from schema 3 on, as all below
    older: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}\Z")], Hash] = Field({}, max_length=MAX_VERSIONS)
    keep: Number = 0
    parent: Number | None = None
    same_as: Number | None = None
    committed: Text = ""
    change: Text = ""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        classes = [name for task in self.tasks for name in task.classes]
        if len(set(classes)) != len(classes):
            raise ValueError("a class is listed twice")
        needed = parts_of(self.model_dump(include={"tasks": {"__all__": {"file"}}, "newest": True, "parts": True}))
        if len(set(needed)) != len(needed):
            raise ValueError("a file is listed twice")
        if self.schema_ > 1 and (self.files is None or set(self.files) != set(needed)):
            raise ValueError("the files that are needed are not those that have checksums")
        return self


def files_of(header: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """The files that a header names: those of what tasks share, of the memory, and one a task."""
    plain = {part: [f"{header['newest']}/{part}.safetensors"] for part in (SHARED, MEMORY)}  # up to schema 2
    parts = header.get("parts") or plain
    return list(parts[SHARED]), list(parts[MEMORY]), [task["file"] for task in header["tasks"]]


def parts_of(header: dict[str, Any]) -> list[str]:
    """All files that a header names."""
    return [*itertools.chain.from_iterable(files_of(header))]


def seal_of(header: dict[str, Any]) -> str:
    """sha256 of a header's content without its seal, whatever the order of its keys."""
    content = {key: value for key, value in header.items() if key != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_header(header: dict[str, Any]) -> None:
    """Raise ValueError, naming the first wrong key, unless a header without its seal fits the schema."""
    check_against(Header, header)


def check_against(schema: type[BaseModel], content: dict[str, Any]) -> None:
    """Raise ValueError, naming the first wrong key, unless the content of a JSON file fits its schema."""
    try:
        schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:5]).replace("schema_", "schema")
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error
