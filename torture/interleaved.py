"""Two writers and several readers at work in one directory, their file operations interleaved by a seed.

Each is a thread that stops before every file operation; a seeded draw decides who goes on. Every reader must see whole
versions only, never an older one than before; a writer commits or is refused; at the end the last commit stands.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from torture.operations import Operation, watching
from torture.small_models import bare, version_of
from torture.tally import Tally
from tpl import TplError
from tpl.store import ModelStore

READERS, READS, COMMITS = 2, 3, 2


class Baton:
    """Lets one of several threads run at a time; who is next is drawn."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.turns: dict[int, threading.Semaphore] = {}
        self.waiting: list[int] = []
        self.back = threading.Semaphore(0)

    def run(self, works: list[threading.Thread]) -> None:
        """Run all threads to their ends."""
        for work in works:
            work.start()
            self.back.acquire()  # it waits for its first turn
        while self.waiting:
            chosen = self.waiting.pop(self.draw.randrange(len(self.waiting)))
            self.turns[chosen].release()
            self.back.acquire()
        for work in works:
            work.join(60)

    def stop(self, operation: Operation | None = None) -> None:
        """Wait for the next turn; threads of others go through."""
        me = threading.get_ident()
        if operation is not None and me not in self.turns:
            return
        self.turns.setdefault(me, threading.Semaphore(0))
        self.waiting.append(me)
        self.back.release()
        self.turns[me].acquire()

    def end(self) -> None:
        """Give the baton back for good."""
        del self.turns[threading.get_ident()]
        self.back.release()


def run(seed: int, cases: int, place: Path) -> Tally:
    """Try that many interleavings."""
    tally = Tally("interleavings of two writers and two readers", seed)
    for number in range(cases):
        said, commits = _one(random.Random(f"{seed} {number}"), place / "model")
        tally.notes["commits"] = tally.notes.get("commits", 0) + commits
        if said:
            tally.fail(f"interleaving {number}: {said}")
        else:
            tally.counts["in order"] += 1
    return tally


def _one(draw: random.Random, model: Path) -> tuple[str, int]:
    """What went wrong in one interleaving, and how often something was committed."""
    shutil.rmtree(model, ignore_errors=True)
    ModelStore(model).commit(*bare(1, 2))
    baton, wrong, committed = Baton(draw), [], [1]

    def write() -> None:
        done = 0
        while done < COMMITS:  # refused while the other one writes
            store = ModelStore(model)
            try:
                with store.writing():
                    number = store.header()["seed"] + 1  # versions rise
                    store.commit(*bare(number, draw.randint(1, 3)))
                    committed.append(number)
                    done += 1
            except TplError as error:
                if "being written" not in str(error):
                    wrong.append(str(error))
                    return

    def read() -> None:
        last = 0
        for _ in range(READS):
            found = version_of(model) or 0
            if found < last:
                wrong.append(f"version {found} after {last}")
            last = found

    def begin(work: Callable[[], None]) -> threading.Thread:
        def body() -> None:
            baton.stop()
            try:
                work()
            except BaseException as error:
                wrong.append(f"{type(error).__name__}: {error}")
            finally:
                baton.end()

        return threading.Thread(target=body, daemon=True)

    with watching(baton.stop):
        baton.run([begin(write), begin(write), *(begin(read) for _ in range(READERS))])
    try:
        if version_of(model) != max(committed):
            wrong.append(f"version {version_of(model)} stands, {max(committed)} was committed last")
    except (TplError, AssertionError) as error:
        wrong.append(str(error))
    return "; ".join(wrong), len(committed) - 1
