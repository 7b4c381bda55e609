"""Compiled functions, and the compiler imported while there is other work."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from threading import Lock, Thread
from typing import Any

import torch

SHAPES = 64  # shapes of its inputs, times whether gradients flow, that a process may compile a function for
MODULES = "torch._dynamo", "torch._inductor.compile_fx"  # what torch.compile imports, at once and when first called

_importing = Lock()  # two threads that import parts of one package could wait for each other


def import_compiler() -> None:
    """Import what `torch.compile` needs: seconds."""
    with _importing:
        for name in MODULES:
            import_module(name)


def import_compiler_ahead() -> None:
    """Begin to import it in a thread of its own, while data is read and decoded.

    A program that ends early waits for the thread: one that is cut off inside an import may take the program with it.
    """
    Thread(target=import_compiler, name="compiler").start()


class Compiled:
    """`torch.compile(function)`, made when it is first called; `dynamic` is torch's."""

    def __init__(self, function: Callable[..., Any], dynamic: bool | None = False) -> None:
        self.function, self.dynamic = function, dynamic
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """The function's value."""
        if self.compiled is None:
            import_compiler()
            # Each number of networks, with and without replay, has shapes of its own. Beyond the limit torch would go
            # on uncompiled, at half the speed.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
            self.compiled = torch.compile(self.function, dynamic=self.dynamic)
        return self.compiled(*inputs)
