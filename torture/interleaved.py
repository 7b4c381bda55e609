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
from torture.small_models import bare, numbered
from torture.tally import Tally
from tpl import TplError
from tpl.store import ModelStore

READERS, READS, COMMITS, KEPT = 2, 3, 2, 2


class Baton:
    """Lets one of several threads run at a time; who is next is drawn."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.turns: dict[int, threading.Lock] = {}
        self.waiting: list[int] = []
        self.asleep: list[int] = []
        self.arrived, self.finished = threading.Lock(), threading.Lock()
        self.arrived.acquire()
        self.finished.acquire()

    def run(self, works: list[threading.Thread]) -> None:
        """Run all threads to their ends."""
        for work in works:
            work.start()
            self.arrived.acquire()  # it waits for its first turn
        self._go_on()
        self.finished.acquire()
        for work in works:
            work.join(60)

    def begin(self) -> None:
        """Wait for the first turn."""
        me = threading.get_ident()
        self.turns[me] = threading.Lock()
        self.turns[me].acquire()
        self.waiting.append(me)
        self.arrived.release()
        self.turns[me].acquire()

    def stop(self, operation: Operation) -> None:
        """Wait for the next turn; threads of others go through."""
        me = threading.get_ident()
        if me in self.turns:
            self.waiting.append(me)
            if self._go_on() != me:
                self.turns[me].acquire()

    def sleep(self) -> None:
        """Wait until another thread calls `wake`, and then for the next turn."""
        me = threading.get_ident()
        self.asleep.append(me)
        self._go_on()
        self.turns[me].acquire()

    def wake(self) -> None:
        """Let those that sleep have turns again."""
        self.waiting += self.asleep
        self.asleep.clear()

    def end(self) -> None:
        """Give the baton away for good."""
        del self.turns[threading.get_ident()]
        if self.waiting:
            self._go_on()
        else:
            self.finished.release()

    def _go_on(self) -> int:
        """Draw whose turn it is."""
        chosen = self.waiting.pop(self.draw.randrange(len(self.waiting)))
        if chosen != threading.get_ident():
            self.turns[chosen].release()
        return chosen


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
    baton, wrong = Baton(draw), []
    committed = {1: 1}  # the content of every version, by its number

    def write() -> None:
        done = 0
        while done < COMMITS:
            store = ModelStore(model)
            try:
                with store.writing():
                    _change(store, draw, committed)
                    done += 1
            except TplError as error:
                if "being written" not in str(error):
                    wrong.append(str(error))
                    return
                baton.sleep()  # refused while the other one writes
            finally:
                baton.wake()

    def read() -> None:
        last = 0
        for _ in range(READS):
            found, content = numbered(model)
            if found < last:
                wrong.append(f"version {found} after {last}")
            if committed.get(found, content) != content:  # a reader may see a commit before its writer notes it
                wrong.append(f"version {found} is {content}, not {committed[found]}")
            last = found

    def begin(work: Callable[[], None]) -> threading.Thread:
        def body() -> None:
            baton.begin()
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
        if numbered(model) != (last := max(committed.items())):
            wrong.append(f"{numbered(model)} stands, {last} was committed last")
    except (TplError, AssertionError) as error:
        wrong.append(str(error))
    return "; ".join(wrong), len(committed) - 1


def _change(store: ModelStore, draw: random.Random, committed: dict[int, int]) -> None:
    """Commit, or go back to an older version, or delete older versions; the lock is held."""
    header = store.header()
    older, number = sorted(map(int, header["older"])), header["commits"] + 1
    kind = draw.random()
    if older and kind < 0.1:
        store.prune(0, {})  # no new version
    elif older and kind < 0.4:
        version = draw.choice(older)
        content = store.header(version)["seed"]
        store.go_back(version, KEPT, {"same_as": version})
        committed[number] = content
    else:
        content = 10 * number + draw.randint(0, 9)
        store.commit(*bare(content, draw.randint(1, 3)), keep=KEPT)
        committed[number] = content
