"""The shapes of answers, only for the OpenAPI description: the answers are built without them."""

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
    """A stored image that is near in the features of the predicted task's model."""

    class_: str = Field(alias="class")
    distance: float
    picture: str = Field(description="a data: URL of a small PNG")


class Answer(_Shape):
    """The answer for one file. A file that cannot be read has only `path` and `error`."""

    path: str = Field(description="the file's name")
    class_: str | None = Field(None, alias="class", description="the most probable class")
    probability: float | None = None
    task: str | None = Field(None, description="the task of the class")
    unknown: float | None = Field(
        None, description="0 to 1; only 5 % of images of known classes reach 0.95; null if the method has no such score"
    )
    passes: int | None = Field(None, description="task models evaluated, for methods that have any")
    top: list[ClassProbability] | None = None
    tasks: list[TaskProbability] | None = Field(None, description="with tasks=true")
    examples: list[StoredExample] | None = Field(None, description="with examples=N")
    rejected: bool | None = Field(None, description="with reject=SHARE; the class is null then")
    error: str | None = None


class Answers(_Shape):
    """One answer for each file, in their order; at least one of them can be read."""

    answers: list[Answer]


class Job(_Shape):
    """A task to learn, and how far it has come."""

    id: str
    name: str
    classes: list[str]
    known: list[str] = Field(description="those that the model knew before: more images of them")
    state: Literal["queued", "learning", "done", "failed"]
    progress: float = Field(description="0 to 1")
    seconds_left: float | None = Field(description="an estimate, while it is being learned")
    message: str
    warnings: list[str]
    created: float = Field(description="seconds since 1970")
    finished: float | None
    task: dict[str, Any] | None = Field(description="once done: images, held-out accuracy, ...")
    outcome: dict[str, Any] | None = Field(
        description="once done: images recognised, with counts and a 95 % interval; older classes before and after; "
        "which classes are confused"
    )


class JobList(_Shape):
    """The tasks sent to this server."""

    tasks: list[Job]


class Classes(_Shape):
    """The classes that the model knows now."""

    classes: list[str]


class Checked(_Shape):
    """What was found in labelled photos; names of files are those in the zip."""

    encoder: str
    classes: dict[str, int] = Field(description="readable photos of each class")
    left_out: list[dict[str, Any]]
    skipped: list[str]
    unreadable: list[str]
    equal_pictures: list[dict[str, Any]]
    likely_wrong_labels: list[dict[str, Any]]
    classes_that_look_alike: list[dict[str, Any]]
    names_alike: list[list[str]]
    recognised: dict[str, dict[str, int]]
    leave_one_out: dict[str, Any]
    twice_the_images: dict[str, Any] | None
    problems: int


class Suggestion(_Shape):
    """A photo worth a label."""

    path: str
    top: list[ClassProbability]
    unknown: float
    unsure: float


class Suggested(_Shape):
    """Photos worth a label, the most useful first."""

    images: int
    suggested: list[Suggestion]
    unreadable: list[str]


class Encoder(_Shape):
    """The frozen encoder of the model."""

    name: str
    sha256: str
    image_size: list[int]


class Sizes(_Shape):
    """Sizes of the model."""

    parameters: int
    directory_bytes: int
    stored_images: int
    stored_image_bytes: int


class Model(_Shape):
    """The current model."""

    method: str
    commits: int
    classes: list[str]
    tasks: list[dict[str, Any]]
    encoder: Encoder
    sizes: Sizes
    capacity: dict[str, float] | None
    rejection_floor: float | None = Field(
        description="the smallest share of known images that can be rejected as unknown; 1: there are too few images, "
        "null: the method has no unknown score"
    )
    device: str
    read_only: bool
    pictures: dict[str, str] | None = Field(None, description="with pictures=true: one stored image of each class")


class Health(_Shape):
    """State of the server."""

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
    409: "It conflicts with the model's classes, tasks or method.",
    413: "Over one of the server's limits.",
    415: "Not a multipart form.",
    422: "The content cannot be used.",
    429: "Too many tasks wait already.",
    503: "Too many requests at the same time.",
}


def answers(status: int, shape: type[BaseModel], *errors: int) -> dict[int | str, dict[str, Any]]:
    """The responses of a route: the successful one, and the errors with their reasons."""
    success: dict[int | str, dict[str, Any]] = {status: {"model": shape}}
    return success | {code: {"model": Error, "description": REASONS[code]} for code in errors}
