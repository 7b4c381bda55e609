"""TPL: image classifiers that keep learning, and never forget."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpl._version import __version__
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.answers import Answer, TaskRecord
    from tpl.estimator import TPLClassifier
    from tpl.learner import Learner, load
    from tpl.stream import ArrayImages, Stream, Task, image_folder

__all__ = [
    "Answer",
    "ArrayImages",
    "Learner",
    "Stream",
    "TPLClassifier",
    "Task",
    "TaskRecord",
    "TplError",
    "__version__",
    "image_folder",
    "load",
]

_HOMES = (
    {"TPLClassifier": "tpl.estimator"}
    | dict.fromkeys(("Answer", "TaskRecord"), "tpl.answers")
    | dict.fromkeys(("Learner", "load"), "tpl.learner")
    | dict.fromkeys(("ArrayImages", "Stream", "Task", "image_folder"), "tpl.stream")
)


def __getattr__(name: str) -> Any:
    """Public names, loaded when first used: torch and timm take seconds to import."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tpl' has no attribute '{name}'")
