"""Ways of learning a stream of tasks, one file each."""

from tpl.methods.base import Method, find_method, load_methods, register

__all__ = ["Method", "find_method", "load_methods", "register"]
