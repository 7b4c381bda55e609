"""Whether this process is a program of this package, so that settings of the whole process are the package's to make.

It is in `tpl` and in the workers that it starts. In a notebook or another program that imports the package, it is not.
"""

from __future__ import annotations

own = False  # whether `claim` was called


def claim() -> None:
    """Say that this process is a program of this package; to be called before it computes anything."""
    global own
    own = True
