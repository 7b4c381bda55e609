"""Engines: where the runs of a suite are carried out. One file each; `tpl suite --engine NAME` chooses."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tpl.bench.engines.base import Engine, Job, JobEvent
from tpl.errors import TplError

__all__ = ["ENGINES", "Engine", "Job", "JobEvent", "create_engine"]

# Name, and the class as MODULE:CLASS. It is imported when asked for: an engine may need a package that is not there.
ENGINES = {"local": "tpl.bench.engines.local:LocalEngine", "ray": "tpl.bench.engines.ray_engine:RayEngine"}


def create_engine(name: str, device: str, workers: int | None, **options: Any) -> Engine:
    """An engine by name, or an error that lists them all. Of its own options, those that are None were not given."""
    if name not in ENGINES:
        raise TplError(f"There is no engine '{name}'; there are {', '.join(ENGINES)}.")
    module, _, kind = ENGINES[name].partition(":")
    engine: Any = getattr(import_module(module), kind)
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in engine.options:
            raise TplError(f"--{option.replace('_', '-')} is not for --engine {name}; leave it out.")
    created: Engine = engine(device, workers, **given)
    return created
