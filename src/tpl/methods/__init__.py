"""Methods: one file per way of learning a stream of tasks."""

from tpl.methods.bank.method import learn_together
from tpl.methods.base import Method, find_method, load_methods, register

__all__ = ["Method", "find_method", "learn_together", "load_methods", "register"]
