"""Engines: where the runs of a suite are carried out. One file each; `tpl suite --engine NAME` chooses."""

from __future__ import annotations

from importlib import import_module

from tpl.bench.engines.base import Engine, Job, JobEvent
from tpl.errors import TplError

__all__ = ["ENGINES", "Engine", "Job", "JobEvent", "create_engine"]

# Name, and the class as MODULE:CLASS. It is imported when asked for: an engine may need a package that is not there.
ENGINES = {"local": "tpl.bench.engines.local:LocalEngine"}


def create_engine(name: str, device: str, workers: int | None) -> Engine:
    """An engine by name, or an error that lists them all."""
    if name not in ENGINES:
        raise TplError(f"There is no engine '{name}'; there are {', '.join(ENGINES)}.")
    module, _, kind = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), kind)(device, workers)
    return engine
