"""Several machines through Ray: connecting to them, how much room they have, and directories that travel between them.

Ray itself is imported when it is asked for: everything else works without it.
"""

from tpl.cluster.connection import connect, load_ray
from tpl.cluster.parcel import Baggage, Parcel, pack, unpack
from tpl.cluster.room import Room, Share, share_out
from tpl.cluster.threads import THREADS, chosen_threads, use_threads

__all__ = [
    "THREADS",
    "Baggage",
    "Parcel",
    "Room",
    "Share",
    "chosen_threads",
    "connect",
    "load_ray",
    "pack",
    "share_out",
    "unpack",
    "use_threads",
]
