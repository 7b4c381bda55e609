"""Ways of learning a stream of tasks, one file each."""

from tpl.methods.base import Method, find_method, load_methods, register
from tpl.methods.together import learn_together

__all__ = ["Method", "find_method", "learn_together", "load_methods", "register"]
