"""TPL: image classifiers that keep learning, and never forget."""

from tpl._version import __version__
from tpl.errors import TplError
from tpl.learner import Learner
from tpl.stream import ArrayImages, Stream, Task, image_folder

__all__ = ["ArrayImages", "Learner", "Stream", "Task", "TplError", "__version__", "image_folder"]
