"""Modules of the package as outlines: their classes, options and texts, without the libraries they compute with.

torch takes seconds to import, and `tpl list`, `tpl describe` and the check of an option need none of it: names,
summaries, defaults and choices are plain values. `outline("tpl.methods.tpl")` runs that module's own code with a
stand-in for every library that is not Python's own, so what is read here is what the module says, and nothing is
written down twice. Only plain values are of use in an outline: class attributes, the fields of `Config`s, checks of
options. Whatever touches a stand-in is meaningless.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parent
_PREFIX = "outline of "  # of the names under which outlines lie in `sys.modules`, where dataclasses look types up
# Imported as they are: their classes must be the same ones everywhere, and they import little themselves.
_REAL = {f"{_PACKAGE}.{name}" for name in ("_version", "config", "errors", "names", "pretraining")}


class StandIn:
    """Takes the place of a library and of everything in it: a base class, a decorator, a type or a default value."""

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)  # Python itself looks for these
        return self

    def __call__(self, *_: Any, **__: Any) -> StandIn:
        """As a decorator, a class or a function."""
        return self

    def _same(self, *_: Any) -> StandIn:
        return self

    __iter__ = None  # not to be taken for an endless sequence
    __getitem__ = __or__ = __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = _same
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = _same

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return ()  # as a base class: none


_STAND_IN: Any = StandIn()


def outline(name: str) -> ModuleType:
    """A module of the package, by its full name, as an outline; as it is, if it cannot do without its libraries."""
    try:
        return _outlined(name)
    except (TypeError, ValueError, AttributeError, LookupError, ImportError):
        return importlib.import_module(name)


def _outlined(name: str) -> ModuleType:
    known = sys.modules.get(_PREFIX + name)
    if known is not None:
        return known
    file = _file_of(name)
    module = ModuleType(_PREFIX + name)
    module.__file__ = str(file)
    module.__dict__["__builtins__"] = vars(builtins) | {"__import__": _import}
    sys.modules[module.__name__] = module
    try:
        code = SourceFileLoader(name, str(file)).get_code(name)
        assert code is not None
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


@cache
def method_outlines() -> Mapping[str, Any]:
    """The outlines of all methods by name, sorted: classes with their texts and their `config_class`."""
    registers = [outline(f"{_PACKAGE}.methods.base").METHODS]
    for file in (_ROOT / "methods").glob("[!_]*.py"):
        module = outline(f"{_PACKAGE}.methods.{file.stem}")
        if not module.__name__.startswith(_PREFIX):  # it has registered its methods among those as they are
            registers = [importlib.import_module(f"{_PACKAGE}.methods.base").METHODS, *registers]
    return dict(sorted({name: method for known in registers for name, method in known.items()}.items()))


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """The import statement inside an outline."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or name in _REAL:
        return importlib.__import__(name, globals, locals, fromlist or (), level)
    if top != _PACKAGE:
        return _STAND_IN
    module = _outlined(name)
    for part in fromlist or ():
        if not hasattr(module, part) and _file_of(f"{name}.{part}").is_file():
            setattr(module, part, _outlined(f"{name}.{part}"))
    return module


def _file_of(name: str) -> Path:
    path = _ROOT.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
