"""The shapes of answers, for the OpenAPI description alone: what is sent is built by the parts themselves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Shape(BaseModel):
    model_config = ConfigDict(populate_by_name=True)


class Error(_Shape):
    """What went wrong and what to do."""

    error: str


class ClassProbability(_Shape):
    """One class and its probability."""

    class_: str = Field(alias="class")
    probability: float


class TaskProbability(_Shape):
    """One task and its probability: that of all its classes together."""

    task: str
    probability: float


class StoredExample(_Shape):
    """A stored image, near as the predicted task's model sees it."""

    class_: str = Field(alias="class")
    distance: float
    picture: str = Field(description="a data: address of a small PNG")


class Answer(_Shape):
    """What the model says of one file. A file that cannot be read has `path` and `error` alone."""

    path: str = Field(description="the file's name as it was sent")
    class_: str | None = Field(None, alias="class", description="the most probable class")
    probability: float | None = None
    task: str | None = Field(None, description="the task that brought the class")
    unknown: float | None = Field(None, description="0 to 1; at 0.95, 5 % of known images are as strange as this")
    passes: int | None = Field(None, description="task models asked, for methods that have any")
    top: list[ClassProbability] | None = None
    tasks: list[TaskProbability] | None = Field(None, description="with tasks=true")
    examples: list[StoredExample] | None = Field(None, description="with examples=N")
    error: str | None = None


class Answers(_Shape):
    """One answer a file, in the order of the files."""

    answers: list[Answer]


class Job(_Shape):
    """A task on its way into the model."""

    id: str
    name: str
    classes: list[str]
    state: Literal["queued", "learning", "done", "failed"]
    progress: float = Field(description="0 to 1")
    message: str
    warnings: list[str]
    created: float = Field(description="seconds since 1970")
    finished: float | None
    task: dict[str, Any] | None = Field(description="once done: images, held-out accuracy, ...")


class JobList(_Shape):
    """The tasks this server has been sent."""

    tasks: list[Job]


class Encoder(_Shape):
    """The frozen network under the model."""

    name: str
    sha256: str
    image_size: list[int]


class Sizes(_Shape):
    """How large the model is."""

    parameters: int
    directory_bytes: int
    stored_images: int
    stored_image_bytes: int


class Model(_Shape):
    """The model that answers now."""

    method: str
    commits: int
    classes: list[str]
    tasks: list[dict[str, Any]]
    encoder: Encoder
    sizes: Sizes
    capacity: dict[str, float] | None
    rejection_floor: float = Field(description="of known images, the least that can be told to be unknown")
    device: str
    read_only: bool
    pictures: dict[str, str] | None = Field(None, description="with pictures=true: one stored image a class")


class Health(_Shape):
    """That the server is up, and what it is doing."""

    status: Literal["ok"]
    version: str
    classes: int
    tasks: int
    learning: bool


def form(description: str, **fields: Any) -> dict[str, Any]:
    """A multipart request body, for a route that reads its form itself."""
    schema = {"type": "object", "properties": fields}
    body = {"description": description, "required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return {"requestBody": body}


FILE = {"type": "string", "format": "binary"}
REASONS = {
    401: "The token is missing or wrong.",
    403: "The server is read-only.",
    404: "There is no such task.",
    409: "The model's classes or tasks are in the way.",
    413: "Over one of the server's limits.",
    415: "No multipart form.",
    422: "What was sent cannot be used.",
    429: "Too many tasks wait already.",
    503: "Too many requests at the same time.",
}


def answers(status: int, shape: type[BaseModel], *errors: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a route: the good one, and the errors with their reasons."""
    good: dict[int | str, dict[str, Any]] = {status: {"model": shape}}
    return good | {code: {"model": Error, "description": REASONS[code]} for code in errors}
