"""The columns of every table of results: how each number is called, shown and judged, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def percent(value: float) -> str:
    """A fraction in percent."""
    return f"{100 * value:.2f}".replace("-", "\N{MINUS SIGN}")


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Column:
    """One number of a run: how it is called, shown and judged, and what it means."""

    key: str
    group: str
    title: str
    short: str  # for the terminal, two lines
    meaning: str
    show: Callable[[float], str]
    better: int = 0  # 1: more is better, -1: less is better, 0: not part of the contest


ACCURACY, SCORES, FORGETTING, COST = "Accuracy, %", "Task scores, %", "Forgetting, points", "Cost"

COLUMNS = (
    Column(
        "last", ACCURACY, "Last", "Last\n%",
        "Share of all test images named correctly after the final task, among all classes.",
        percent, 1,
    ),
    Column(
        "aia", ACCURACY, "AIA", "AIA\n%",
        "Average incremental accuracy: the accuracy on all classes so far is measured after every task; "
        "this is the mean of those measurements.",
        percent, 1,
    ),
    Column(
        "til", ACCURACY, "TIL", "TIL\n%",
        "Task-incremental accuracy after the final task: as Last, but the method is told which task each "
        "image belongs to and chooses among the classes of that task only.",
        percent, 1,
    ),
    Column(
        "tp", ACCURACY, "Task pred.", "Task\n%",
        "Task prediction after the final task: share of test images whose task is found. The "
        "probability of a task is the sum of those of its classes.",
        percent, 1,
    ),
    Column(
        "auroc", SCORES, "AUROC", "AU-\nROC",
        "Area under the ROC curve of each task's score, its own test images against those of all other tasks, averaged "
        "over the tasks: how well the scores tell whose an image is. Only methods with a score a task have it.",
        percent, 1,
    ),
    Column(
        "fpr95", SCORES, "FPR95", "FPR\n95",
        "Share of other tasks' images that a task's score accepts if it accepts 95 % of its own, mean over the tasks.",
        percent, -1,
    ),
    Column(
        "forgetting_last", FORGETTING, "Rect. Last", "Forg.\nLast",
        "Rectified forgetting: accuracy of joint training minus accuracy of the method, averaged over the "
        "tasks, after the final task. Below zero, the method beats joint training.",
        percent, -1,
    ),
    Column(
        "forgetting_aia", FORGETTING, "Rect. AIA", "Forg.\nAIA",
        "Rectified forgetting as before, taken after every task and averaged over these measurements.",
        percent, -1,
    ),
    Column(
        "forgetting_classic", FORGETTING, "Classic", "Forg.\nclass.",
        "Accuracy on a task right after it was learned minus that at the end, averaged over all tasks but "
        "the last. It also counts that more classes are harder to tell apart, which is no forgetting.",
        percent, -1,
    ),
    Column(
        "parameters", COST, "Network, M", "Net\nM",
        "Size of the network in millions of numbers, with everything kept for each task, without the memory.",
        lambda value: f"{value / 1e6:,.2f}",
    ),
    Column(
        "memory_images", COST, "Memory, images", "Mem.\nimgs",
        "Training images of earlier tasks kept for replay at the end of the run.",
        lambda value: f"{value:,.0f}",
    ),
    Column(
        "memory_bytes", COST, "Memory, kB", "Mem.\nkB",
        "Size of those images as stored, in thousands of bytes.",
        lambda value: f"{value / 1e3:,.1f}" if value else "0",
    ),
    Column(
        "network_and_memory_bytes", COST, "Both, MB", "Both\nMB",
        "Network (four bytes a number) and memory together, in millions of bytes.",
        lambda value: f"{value / 1e6:,.1f}",
    ),
    Column(
        "peak_device_bytes", COST, "GPU peak, GB", "GPU\nGB",
        "The most memory in use on the GPU, in billions of bytes, by all runs trained side by side.",
        lambda value: f"{value / 1e9:,.1f}",
    ),
    Column("seconds", COST, "Time, s", "Time\ns", "Learning and testing, all tasks together.", _seconds),
    Column("seconds_per_task", COST, "Per task, s", "Task\ns", "Learning alone, on average.", _seconds),
)  # fmt: skip
