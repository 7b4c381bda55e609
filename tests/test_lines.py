"""Progress as plain lines: when there is one, what it says, and how much time it foresees."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tpl.engine import Event, RunLabel, labelled
from tpl.lines import ProgressLines, Throttle, duration, pace


class Log:
    """Lines in memory, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now, self.file = 1000.0, io.StringIO()
        self.lines = ProgressLines(Console(file=self.file), clock=lambda: self.now)

    def __call__(self, kind: str, /, after: float = 0.0, run: RunLabel | None = None, **data: Any) -> list[str]:
        """Send an event some seconds later; the lines written since the last look."""
        self.now += after
        self.lines(Event(kind, data, run or RunLabel()))
        return self.written()

    def written(self) -> list[str]:
        text = self.file.getvalue()
        self.file.seek(0)
        self.file.truncate()
        assert text.endswith("\n") or not text  # whole lines only
        return text.splitlines()

    def begin(self, images: list[int], run: RunLabel | None = None, learned: int = 0) -> None:
        assert self("run", run=run, images=images, learned=learned, method="tpl") == []

    def task(
        self, name: str = "task 1", images: int = 10, after: float = 0.0, run: RunLabel | None = None
    ) -> list[str]:
        return self("task", after, run, task=name, classes=["cat", "dog"], images=images)

    def epoch(self, epoch: int, epochs: int, after: float, run: RunLabel | None = None) -> list[str]:
        return self("epoch", after, run, epoch=epoch, epochs=epochs, loss=0.25)

    def stage(self, stage: int, last: float, after: float = 0.0, run: RunLabel | None = None) -> list[str]:
        return self("stage", after, run, stage=stage, so_far={"last": last})


@pytest.fixture
def log() -> Log:
    return Log()


# When


@pytest.mark.parametrize(
    ("pause", "told"),
    [
        (0.1, []),  # 40 epochs in 4 s
        (1.0, [5, 10, 15, 20, 25, 30, 35, 40]),  # a tenth is 4 s, which is too soon
        (2.0, [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]),
        (12.0, [3, 4, 7, 8, 11, 12, 15, 16, 19, 20, 23, 24, 27, 28, 31, 32, 35, 36, 39, 40]),  # 30 s, and the tenths
        (50.0, list(range(1, 41))),
    ],
)
def test_epochs_are_told_by_tenths_and_by_time(log: Log, pause: float, told: list[int]) -> None:
    log.begin([10])
    log.task()
    assert [epoch for epoch in range(1, 41) if log.epoch(epoch, 40, after=pause)] == told


def test_a_tenth_that_came_too_soon_is_told_later() -> None:
    throttle = Throttle(0.0)
    assert not throttle.due(0.1, 4.9) and not throttle.due(0.09, 4.95)
    assert throttle.due(0.15, 5.0) and not throttle.due(0.19, 11.0) and throttle.due(0.2, 11.0)
    assert not throttle.due(0.02, 20.0) and throttle.due(0.1, 20.0)  # another training has begun
    assert not throttle.due(None, 49.9) and throttle.due(None, 50.0)


def test_a_line_is_whole_and_there_at_once() -> None:
    class File(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    file = File()
    lines = ProgressLines(Console(file=file, force_terminal=True))  # colours or not, a line is plain
    lines(Event("task", {"task": "a\x1b[2Jb\n", "classes": ["cat"], "images": 1}))
    assert file.flushed == "[00:00] tpl: task a\\x1b[2Jb\\n: 1 class, 1 image\n"


def test_a_reader_that_has_gone_does_not_end_the_work() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    lines = ProgressLines(Console(file=Closed()))
    lines(Event("task", {"task": "pets", "classes": ["cat"], "images": 1}))


# What


def test_the_lines_of_a_run(log: Log) -> None:
    log.begin([10, 30])
    assert log.task(after=2) == ["[00:02] tpl: task 1 of 2 (task 1): 2 classes, 10 images"]
    assert log("prepare", done=10, images=10) == []
    assert log.epoch(1, 4, after=6) == ["[00:08] tpl: task 1 of 2: epoch 1 of 4, loss 0.25"]
    assert log.epoch(2, 4, after=5) == [
        "[00:13] tpl: task 1 of 2: epoch 2 of 4, loss 0.25, about 10 s left in this task"
    ]
    assert log.epoch(3, 4, after=4) == []
    assert log.epoch(4, 4, after=4) == ["[00:21] tpl: task 1 of 2: epoch 4 of 4, loss 0.25"]
    assert log("trained", images=40) == [] and log("capacity", units=0.4) == []
    assert log.stage(0, 0.978, after=2) == [  # a quarter of all images took 23 s
        "[00:23] tpl: task 1 of 2 done in 21 s: 97.8 % accuracy on the classes so far; about 1 min 9 s left"
    ]
    assert log.task("task 2", 30) == ["[00:23] tpl: task 2 of 2 (task 2): 2 classes, 30 images"]
    assert log("warning", text="hardly any room [/] left") == ["[00:23] tpl: warning: hardly any room [/] left"]
    assert log.stage(1, 0.9, after=3600) == [
        "[1:00:23] tpl: task 2 of 2 done in 1 h: 90.0 % accuracy on the classes so far"
    ]


def test_reading_many_images_is_told(log: Log) -> None:
    log.begin([1000])
    log.task(images=1000)
    assert log("prepare", 3, done=300, images=1000) == []
    assert log("prepare", 3, done=300, images=1000) == ["[00:06] tpl: task 1 of 1: 600 of 1,000 images read"]
    assert log("prepare", 3, done=400, images=1000) == []
    assert log("prepare", 3, done=200, images=400) == ["[00:12] tpl: task 1 of 1: 200 of 400 images read"]


def test_so_is_encoding_them_where_nothing_is_trained(log: Log) -> None:
    log.begin([1000])
    log.task(images=1000)
    assert log("prepare", 3, done=1000, images=1000) == []
    assert log("encode", 3, done=256, images=1000) == ["[00:06] tpl: task 1 of 1: 256 of 1,000 images encoded"]
    assert log("encode", 5, done=256, images=1000) == ["[00:11] tpl: task 1 of 1: 512 of 1,000 images encoded"]


def test_a_resumed_run_counts_its_tasks_and_times_its_own(log: Log) -> None:
    log.begin([10, 10, 10, 10], learned=2)
    assert log.stage(1, 0.8) == ["[00:00] tpl: task 2 of 4 done: 80.0 % accuracy on the classes so far"]
    assert log.task("task 3") == ["[00:00] tpl: task 3 of 4 (task 3): 2 classes, 10 images"]
    assert log.stage(2, 0.8, after=20) == [
        "[00:20] tpl: task 3 of 4 done in 20 s: 80.0 % accuracy on the classes so far; about 20 s left"
    ]


def test_the_lines_of_a_model_that_learns(log: Log) -> None:
    assert log.task("pets") == ["[00:00] tpl: task pets: 2 classes, 10 images"]
    assert log.epoch(1, 2, after=6) == ["[00:06] tpl: task pets: epoch 1 of 2, loss 0.25"]
    assert log("learned", 6, task="pets", accuracy=0.75, held_out=4) == [
        "[00:12] tpl: task pets done in 12 s: 75.0 % accuracy on 4 held-out images"
    ]
    log.task("update")
    assert log("learned", 1, task="update", accuracy=None, held_out=1) == ["[00:13] tpl: task update done in 1 s"]


# Several runs


def test_the_whole_command_counts_the_runs_to_come(log: Log) -> None:
    told: list[Event] = []
    runs = [RunLabel(name, number, 3) for number, name in enumerate(("finetune", "tpl", "joint"))]
    labelled(told.append, runs[1])(Event("task"))
    assert told == [Event("task", {}, runs[1])]
    log.begin([10, 10], runs[0])
    assert log.task(run=runs[0]) == ["[00:00] tpl: run 1 of 3 (finetune): task 1 of 2 (task 1): 2 classes, 10 images"]
    (line,) = log.stage(0, 1.0, after=10, run=runs[0])
    assert line.endswith("; about 50 s left")  # 10 s of this run, 20 s for each of two
    (line,) = log.stage(1, 1.0, after=20, run=runs[0])
    assert line.endswith("; about 1 min left")  # two more of 30 s
    log.now += 10
    log.begin([10, 10], runs[2])  # the second one was finished before
    (line,) = log.stage(0, 1.0, after=10, run=runs[2])
    assert line.endswith("; about 10 s left")
    (line,) = log.stage(1, 1.0, after=10, run=runs[2])
    assert line.endswith("on the classes so far")


def test_runs_side_by_side_are_told_apart_and_their_epochs_once(log: Log) -> None:
    inner = [RunLabel(order, number, 2, together=2) for number, order in enumerate(("natural", "random:1"))]
    first, second = (label.within(RunLabel("logitnorm", 1, 3)) for label in inner)
    assert second == RunLabel("logitnorm, random:1", 3, 6, together=2)
    for run in (first, second):
        log.begin([10, 10], run)
        assert f"tpl: run {run.number + 1} of 6 ({run.name}): task 1 of 2" in log.task(run=run)[0]
    told = [log.epoch(epoch, 4, after=6 * (run is first), run=run) for epoch in (1, 2) for run in (first, second)]
    assert [len(lines) for lines in told] == [1, 0, 1, 0]
    for run in (first, second):  # the first has just ended, the second has a task to end
        (line,) = log.stage(0, 0.5, after=4, run=run)
    assert line.startswith("[00:20] tpl: run 4 of 6 (logitnorm, random:1): task 1 of 2 done in 20 s")
    assert line.endswith("; about 1 min left")  # 20 s here, 40 s for one group more; the earlier one was there already


def test_workers_of_a_suite_have_their_own_lines(log: Log) -> None:
    one, other = RunLabel("tpl on digits-5t", 0, 2), RunLabel("hat on digits-5t", 1, 2)
    log.lines.left = lambda: 90.0
    assert log("started", run=one, attempt=1) == ["[00:00] tpl: run 1 of 2 (tpl on digits-5t): started"]
    assert log("started", run=other, attempt=2) == [
        "[00:00] tpl: run 2 of 2 (hat on digits-5t): started again, attempt 2"
    ]
    for run in (one, other):
        log.begin([10, 10], run)
        log.task(run=run)
    assert all(log.epoch(1, 4, after=after, run=run) for after, run in ((6, one), (0, other)))
    assert log("retried", run=one, error="killed") == [
        "[00:06] tpl: run 1 of 2 (tpl on digits-5t): failed and will be tried once more: killed"
    ]
    assert log("failed", run=one, error="no data") == ["[00:06] tpl: run 1 of 2 (tpl on digits-5t): failed: no data"]
    assert log("finished", run=other, last=0.8) == [
        "[00:06] tpl: run 2 of 2 (hat on digits-5t): finished: Last 80.00 %; about 1 min 30 s left"
    ]


# Work without tasks


def test_a_phase_is_told_by_tenths_and_when_it_ends(log: Log) -> None:
    log("phase", phase="evaluating", steps=1000)
    told = [log("step", 2, steps=100) for _ in range(10)]
    assert [len(lines) for lines in told] == [0, 0, 1, 0, 0, 1, 0, 0, 1, 1]
    assert told[2] == ["[00:06] tpl: evaluating: 300 of 1,000, 50 a second, about 14 s left"]
    assert told[9] == ["[00:20] tpl: evaluating: all 1,000 done in 20 s"]


def test_a_short_phase_is_not_told(log: Log) -> None:
    log.lines.begin("reading", 40)
    for _ in range(4):
        log.now += 1
        log.lines.advance(10)
    assert log.written() == []


def test_a_phase_of_unknown_length_is_told_every_half_minute(log: Log) -> None:
    log.lines.begin("predicting", None)
    for _ in range(7):
        log.now += 10
        log.lines.advance(1000)
    assert log.written() == [
        "[00:30] tpl: predicting: 3,000 so far, 100 a second",
        "[01:00] tpl: predicting: 6,000 so far, 100 a second",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min"), (70, "1 min 10 s"), (599, "9 min 59 s"), (1260, "21 min"), (3570, "1 h"),
     (3599.6, "1 h"), (7500, "2 h 5 min")],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_pace_has_two_digits_and_is_left_out_where_it_says_nothing() -> None:
    assert [pace(speed) for speed in (0.4, 1, 9.6, 52.7, 183, 2_456)] == [
        "", "1 a second", "10 a second", "53 a second", "180 a second", "2,500 a second",
    ]  # fmt: skip
    assert pace(249_922) == ""


def test_an_accuracy_by_leave_one_out_names_no_held_out_images(log: Log) -> None:
    log("task", task="photos", classes=["a"], images=4)
    (line,) = log("learned", 1, task="photos", accuracy=0.75, held_out=0)
    assert line.endswith("75.0 % accuracy, each image left out in turn")
