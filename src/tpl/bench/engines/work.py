"""Carrying out one job: what an engine's worker does, whichever engine it is."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpl.bench.engines.base import FAILED, FINISHED, Job
from tpl.errors import TplError

Tell = Callable[[str, dict[str, Any]], None]
CarryOut = Callable[[Job, Tell], None]

PAUSE = 0.5  # seconds between two words on how far reading images has come


def carry_out(job: Job, tell: Tell) -> None:
    """Make the run, or go on with it. `tell` hears its events and, at the end, whether it finished or failed.

    A failure that a person has to mend is final; any other may pass, so that another attempt is worth it.
    """
    from tpl.bench.run import execute
    from tpl.engine import Event

    quiet_until = 0.0

    def callback(event: Event) -> None:
        nonlocal quiet_until
        if event.kind == "prepare":
            if time.monotonic() < quiet_until:
                return
            quiet_until = time.monotonic() + PAUSE
        tell(event.kind, event.data)

    try:
        execute(job.run_spec(), Path(job.directory), resume=True, callback=callback, track=job.track)
    except TplError as error:
        tell(FAILED, {"error": str(error), "final": True})
    except Exception as error:
        traceback.print_exc()  # a worker's stderr is kept beside the run
        tell(FAILED, {"error": f"{type(error).__name__}: {error}", "final": False})
    else:
        tell(FINISHED, {})
