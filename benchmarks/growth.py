"""What a model of T tasks costs: to learn the next task, to answer, to save and to load, at T = 2 to 100.

A task has two classes of generated images: a coarse random pattern each, with noise. tpl-plus learns them one after the
other, as `tpl learn` would, with `passes=auto`; every few tasks the model is measured. Seconds of a task are the median
of the last three; milliseconds of an answer the best of some repeats; on a CPU, all are of the processor. The model is
saved after every task, and keeps five older versions. Accuracy is on unseen images, two a class.

A processor that is shared may be half as fast a minute later, so ratios are measured in turns: copies of the model as
it was learn the 5th and the last task again and again (on a CPU; on a GPU each would compile first), and the models of
10 and of all tasks answer.

python benchmarks/growth.py --json benchmarks/growth-compact-cpu.json --picture growth.svg    # minutes on one core
python benchmarks/growth.py --device cuda --encoder vit_tiny_patch16_224 --weights FILE --images 100 --memory 2000
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIZE, CELLS, NOISE = 32, 4, 40.0  # pixels of an image, cells of a class's pattern, deviation of the noise
CLASSES = 2  # of a task
TESTED = 2  # unseen images of each class
TURNS = 9
EARLY, TEN = 5, 10  # tasks that the last task, and answers after it, are compared with
POINTS = [2, 5, 10, 20, 50, 100]
CURVES = {
    "learn_s": "seconds to learn the task",
    "answer_ms_batch": "ms an answer, 64 together",
    "answer_ms_single": "ms an answer, one alone",
    "passes": "task models run an image",
    "save_s": "seconds to save",
    "load_s": "seconds to load",
    "disk_mb": "MB on disk, five older versions too",
    "tensors_mb": "MB of tensors in memory",
    "evaluate_ms": "ms an image, evaluation",
}


def main() -> None:
    """Learn, measure, print one JSON line a point; write the JSON file and the picture that were asked for."""
    options = parsed()
    if options.only_draw:
        draw(json.loads(options.json.read_text(encoding="utf-8"))["points"], options.picture)
        return
    from tpl import Learner
    from tpl.bench.results import describe_environment

    settings: dict[str, Any] = {"epochs": options.epochs, "latent": options.latent, "memory": options.memory}
    settings |= {"lr": options.lr, "random_features": options.random_features, "passes": options.passes}
    settings |= dict(pair.split("=", 1) for pair in options.set)
    points, seconds = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or Path(temporary)
        if (folder / "model").exists():
            learner = Learner.load(folder / "model", options.weights, options.device)
            points, seconds = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        else:
            learner = Learner("tpl-plus", options.encoder, options.weights, options.device, **settings)
        for number in range(len(learner.tasks_) + 1, max(options.tasks) + 1):
            task = generated(number, options.images, "train")
            profile = cProfile.Profile() if number == options.profile else None
            seconds.append(timed(partial(learner.learn, task), learner, profile))
            saving = timed(lambda: learner.save(folder / "model"), learner)
            if number in (EARLY - 2, TEN, max(options.tasks) - 2):
                learner.save(folder / f"at-{number}")
            if number in options.tasks:
                points.append({"tasks": number, "learn_s": round(statistics.median(seconds[-3:]), 4)})
                points[-1] |= {"save_s": round(saving, 4)} | measured(learner, folder / "model", number, options)
                print(json.dumps(points[-1]), flush=True)
            (folder / "measured.json").write_text(json.dumps([points, seconds]), encoding="utf-8")
        ratios = in_turns(learner, folder, points, options)
    result = {
        "encoder": options.encoder,
        "method": "tpl-plus",
        "options": learner.method.config.to_dict(),
        "images_of_a_class": options.images,
        "classes_of_a_task": CLASSES,
        "points": points,
        "seconds_of_every_task": [round(s, 4) for s in seconds],
        **ratios,
        "environment": describe_environment(learner.method.compute.device),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(points, options.picture)


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="compact")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", type=int, nargs="+", default=POINTS, help="where the model is measured")
    parser.add_argument("--images", type=int, default=8, help="of a class; a tenth is held out")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--latent", type=int, default=32)
    parser.add_argument("--memory", type=int, default=100)
    parser.add_argument("--random-features", type=int, default=0, help="of the expert; 0: as usual")
    parser.add_argument("--passes", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further options of tpl-plus")
    parser.add_argument("--profile", type=int, help="also print where the time of learning this task goes")
    parser.add_argument("--model", type=Path, metavar="DIR", help="keep the model here, and go on from what is there")
    parser.add_argument("--repeats", type=int, default=5, help="of an answer; the best counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="draw the curves, as SVG or PNG")
    parser.add_argument("--only-draw", action="store_true", help="draw the picture of an earlier --json")
    return parser.parse_args()


def generated(number: int, images: int, part: str) -> Any:
    """A task of two new classes, the same in every run."""
    from tpl.stream import Task
    from tpl.stream.images import ArrayImages

    pixels = []
    for c in range(CLASSES):
        pattern = np.random.default_rng([number, c]).integers(0, 256, (CELLS, CELLS, 3))
        whole = np.kron(pattern, np.ones((SIZE // CELLS, SIZE // CELLS, 1)))
        noise = np.random.default_rng([number, c, len(part)]).normal(0, NOISE, (images, SIZE, SIZE, 3))
        pixels.append((whole + noise).clip(0, 255).astype(np.uint8))
    names = tuple(f"class {number}-{c}" for c in range(CLASSES))
    return Task(f"task {number}", names, ArrayImages(np.concatenate(pixels), np.arange(CLASSES).repeat(images)))


def measured(learner: Any, model: Path, tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One point of every curve but that of learning."""
    from tpl import Learner

    whole, batch, truth = tested(learner, tasks)
    answered: list[Any] = []
    evaluation = timed(lambda: answered.extend(learner.answers_of(whole)), learner)
    disk = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
    state = learner.method.state()
    tensors = sum(t.nbytes for part in (state.shared, *state.tasks) for t in part.values())
    passes = [a.passes for a in answered if a.passes is not None]
    return {
        "answer_ms_single": round(1e3 * best(lambda: learner.answers_of(batch[:1]), learner, options.repeats), 3),
        "answer_ms_batch": round(1e3 / 64 * best(lambda: learner.answers_of(batch), learner, options.repeats), 3),
        "passes": round(statistics.mean(passes), 2),
        "load_s": round(timed(lambda: Learner.load(model, options.weights, options.device), learner), 4),
        "disk_mb": round(disk / 1e6, 3),
        "tensors_mb": round((tensors + learner.method.memory_bytes) / 1e6, 3),
        "evaluate_s": round(evaluation, 4),
        "evaluate_ms": round(1e3 * evaluation / len(whole), 3),
        "accuracy": round(statistics.mean(a.name == t for a, t in zip(answered, truth, strict=True)), 4),
    }


def timed(work: Callable[[], Any], learner: Any, profile: cProfile.Profile | None = None) -> float:
    """Seconds by the clock, with all work of the GPU done; on a CPU, seconds of the processor."""
    import torch

    on_gpu = learner.method.compute.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    if profile is None:
        work()
    else:
        profile.runcall(work)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(60)
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - started


def best(work: Callable[[], Any], learner: Any, repeats: int) -> float:
    """The shortest of several calls, after one that does not count."""
    return min([timed(work, learner) for _ in range(repeats + 1)][1:])


def tested(learner: Any, tasks: int) -> tuple[Any, Any, list[str]]:
    """Unseen images of so many tasks, 64 of them evenly, and the classes of all."""
    import torch

    tests = [generated(number, TESTED, "test") for number in range(1, tasks + 1)]
    whole = torch.cat([learner.prepare(task.train) for task in tests])
    batch = whole[torch.linspace(0, len(whole) - 1, 64).long()]
    return whole, batch, [name for task in tests for name in task.classes for _ in range(TESTED)]


def in_turns(learner: Any, folder: Path, points: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """How many times as long the last task takes as the 5th, and an answer after it as one after ten tasks."""
    from tpl import Learner

    def again(tasks: int) -> float:
        """Seconds to learn a task, by a copy of the model that has learned the one before."""
        copy = Learner.load(folder / f"at-{tasks - 2}", options.weights, options.device)
        copy.learn(generated(tasks - 1, options.images, "train"))
        return timed(partial(copy.learn, generated(tasks, options.images, "train")), copy)

    last: int = points[-1]["tasks"]
    found: dict[str, Any] = {}
    learned = {point["tasks"]: [point["learn_s"]] for point in points}
    if learner.method.compute.device.type == "cpu" and (folder / f"at-{EARLY - 2}").exists():
        learned = alternating({tasks: partial(again, tasks) for tasks in (EARLY, last)})
        found["learning_in_turns_s"] = learned
    if EARLY in learned:
        found["learning_last_over_fifth"] = over(learned[last], learned[EARLY])
    if (folder / f"at-{TEN}").exists():
        models = {TEN: Learner.load(folder / f"at-{TEN}", options.weights, options.device), last: learner}
        batches = {tasks: tested(model, tasks)[1] for tasks, model in models.items()}
        for name, count in (("answering", 64), ("answering_alone", 1)):
            calls: dict[int, Callable[[], float]] = {
                tasks: partial(timed, partial(model.answers_of, batches[tasks][:count]), model)
                for tasks, model in models.items()
            }
            for call in calls.values():
                call()  # does not count
            seconds = alternating(calls)
            found[f"{name}_last_over_tenth"] = over(seconds[last], seconds[TEN])
    return found


def alternating(calls: dict[int, Callable[[], float]]) -> dict[int, list[float]]:
    """The seconds of each call, all in turns."""
    found: dict[int, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            found[name].append(round(call(), 5))
    return found


def over(these: list[float], others: list[float]) -> float:
    """The ratio of two medians."""
    return round(statistics.median(these) / statistics.median(others), 3)


def draw(points: list[dict[str, Any]], file: Path) -> None:
    """All curves over the number of tasks, each from zero."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(3, 3).flat, CURVES.items(), strict=True):
        axes.plot([p["tasks"] for p in points], [p[name] for p in points], "o-", color="#0067a5", markersize=3.5)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(0, 1.1 * max(p[name] for p in points))
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("tasks learned", fontsize=9)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
