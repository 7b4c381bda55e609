"""The command that makes a model or adds to it: learn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpl.cli.app import AsJson, Device, Download, Weights, app, err, print_json, separate, whole
from tpl.cli.model_checks import Wish, check_classes, known_classes, refuse_other_folder
from tpl.cli.model_plan import (
    MEMORY,
    METHODS,
    OPTIONS,
    PLUS,
    Budget,
    as_task,
    encoded_size,
    estimate,
    method_for,
    set_options,
    trained_on,
    width_for,
)
from tpl.cli.model_reports import print_learned, print_plan
from tpl.cli.model_words import SHOWN, bytes_on_disk, listed, memory_of, warn
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.console import WorkProgress
    from tpl.learner import Learner
    from tpl.lines import ProgressLines
    from tpl.store import ModelStore
    from tpl.stream import Labelled


@app.command()
def learn(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model directory; made if it is not there.")],
    place: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Class folders, a zip of them, or a CSV of path,label.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known data set (digits, cifar100, ...); FOLDER is its place.")
    ] = None,
    download: Download = False,
    classes: Annotated[str | None, typer.Option(help="Only these classes, joined by commas.")] = None,
    update: Annotated[bool, typer.Option("--update", help="The images are more of classes it knows.")] = False,
    name: Annotated[str | None, typer.Option(help="What to call the task; by default as FOLDER is called.")] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="tpl-plus (default): the tasks' models and a classifier over all classes; tpl: the former alone."
        ),
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="compact (default, ships with the package) or any ViT/DeiT of timm.")
    ] = None,
    weights: Weights = None,
    memory: Annotated[
        str | None, typer.Option(help="Images kept for replay: 2000 (default), or a size such as 50MB, or none.")
    ] = None,
    memory_kind: Annotated[
        str | None,
        typer.Option(help="What is kept of old images: images (default), features (statistics of them), or none."),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(help="Of tpl-plus: tasks asked about an image: all (default), auto, a number. May change later."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the images; by default 20 to 40, or 60 for large encoders.")
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of each class's images to measure on instead of learning them.")
    ] = 0.1,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of everything random; 0 by default.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse images that cannot be read.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be learned, how long, how large; store nothing.")
    ] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn classes from folders of images: make a model, or add classes to one. Old classes are not forgotten.

    40 images take less than a minute on two cores with the compact encoder; `--dry-run` measures how long yours
    take. Ctrl-C stops it and leaves the model as it was.

    Examples:

    `tpl learn model photos/`

    `tpl learn model tomorrow.zip --name birds`

    `tpl learn model list.csv --update`

    `tpl learn model --data digits --classes 0,1,2 --memory 1MB --dry-run`

    `tpl learn model photos/ --memory-kind features`

    `tpl learn model photos/ --passes auto`
    """
    from tpl.store import ModelStore
    from tpl.stream import labelled_images

    if not 0 <= held_out < 1:
        raise TplError(f"--held-out takes a share of at least 0 and below 1; got {held_out:g}.")
    if update and (name is not None or epochs is not None):
        raise TplError("--name and --epochs are for new classes; an update trains nothing. Leave them out.")
    budget = None if memory is None else Budget.parse(memory)
    if memory is not None and memory_kind not in (None, "images"):
        raise TplError(f"--memory is a number of images, and --memory-kind {memory_kind} keeps none: leave one out.")
    if method is not None and method not in METHODS:
        raise TplError(f"--method takes {' or '.join(METHODS)}; got '{method}'. All others are there in Python.")
    wish = Wish(
        method, encoder, weights, budget, memory_kind, passes, epochs, seed, name, device, held_out, update, strict
    )
    store = ModelStore(model)
    refuse_other_folder(store)
    known = known_classes(store, wish)
    given = labelled_images(place, data, download)
    if classes is not None:
        given = given.only(separate(classes))
    check_classes(given, known, update, model)
    before = _header_text(store)
    try:
        with whole():
            import tpl.learner  # noqa: F401 (the longest of all)
            from tpl.console import work_progress
        with work_progress(err, as_json) as progress:
            report = _dry_run(store, given, wish, progress) if dry_run else _learn(store, given, wish, progress)
    except KeyboardInterrupt:
        stored = _header_text(store) != before
        state = "the task had just been stored" if stored else "nothing was stored, and nothing is lost"
        err.print(f"Interrupted: {state}.", highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        print_json(report)
    elif dry_run:
        print_plan(report)
    else:
        print_learned(report)


def _learn(store: ModelStore, given: Labelled, wish: Wish, progress: WorkProgress | ProgressLines) -> dict[str, Any]:
    started = time.monotonic()
    with _held(store):
        learner = _learner(store, wish)
        ready, notes = _read(learner, given, wish, progress)
        chosen = _choose(learner, ready, wish)
        task = as_task(ready, _task_name(given))
        if wish.update:
            learner.update(task, callback=progress, held_out=wish.held_out)
        else:
            learner.learn(task, name=wish.name, held_out=wish.held_out, callback=progress, source=given.origin)
        learner.save(store.path)
    record = learner.tasks_[-1]
    measured = not wish.update
    return {
        "model": str(store.path),
        "task": record.name if measured else None,
        "updated": wish.update,
        "classes": ready.counts,
        "images": record.images if measured else len(ready.images),
        "held_out": record.held_out if measured else None,
        "accuracy": record.accuracy if measured else None,
        "confused": [{"true": t, "predicted": p, "count": n} for t, p, n in learner.held_out_confusions() if measured],
        "known_classes": len(learner.classes_),
        **chosen,
        "memory": memory_of(learner),
        "capacity": learner.capacity(),
        "smallest_reject": learner.rejection_floor(),
        "bytes": bytes_on_disk(store.path),
        "seconds": round(time.monotonic() - started, 2),
        **notes,
    }


def _dry_run(store: ModelStore, given: Labelled, wish: Wish, progress: WorkProgress | ProgressLines) -> dict[str, Any]:
    started = time.monotonic()
    learner = _learner(store, wish)
    ready, notes = _read(learner, given, wish, progress)
    reading = time.monotonic() - started
    chosen = _choose(learner, ready, wish)
    memory = memory_of(learner)
    train = trained_on(ready, wish.held_out, learner.method.seed)
    found = None
    if not wish.update:
        progress.begin("timing a few steps", None)
        found = estimate(learner, ready, train, chosen["epochs"])
    return {
        "dry_run": True,
        "model": str(store.path),
        "updated": wish.update,
        "classes": ready.counts,
        "images": train,
        "held_out": len(ready.images) - train,
        **chosen,
        "memory": {"kind": memory["kind"], "budget": memory["budget"]},
        "seconds": None if found is None else round(found.seconds + reading, 1),
        "bytes": None if found is None else found.bytes,
        **notes,
    }


@contextmanager
def _held(store: ModelStore) -> Iterator[None]:
    """Hold the directory from reading the old model to writing the new one; leave none that is empty."""
    fresh = not store.path.exists()
    try:
        with store.writing():
            yield
    finally:
        if fresh and not store.exists():
            for leftover in (".lock", ".lock.json"):
                with suppress(OSError):
                    (store.path / leftover).unlink()
            with suppress(OSError):
                store.path.rmdir()


def _learner(store: ModelStore, wish: Wish) -> Learner:
    from tpl.learner import Learner
    from tpl.nets.compact import NAME as COMPACT

    if store.exists():
        return Learner.load(store.path, wish.weights, wish.device)
    from tpl.schedule import schedule_for

    encoder = wish.encoder or COMPACT
    options = OPTIONS | {"lr": schedule_for(encoder).lr}
    options |= {} if wish.memory_kind is None else {"memory_kind": wish.memory_kind}
    return Learner(
        wish.method or method_for(encoder), encoder, wish.weights, wish.device, seed=wish.seed or 0, **options
    )


def _read(
    learner: Learner, given: Labelled, wish: Wish, progress: WorkProgress | ProgressLines
) -> tuple[Labelled, dict[str, list[str]]]:
    """The images that can be read, and what was left out; with --strict, nothing may be."""
    from tpl.stream import readable

    progress.begin("reading", len(given.images))
    images, problems = readable(given.images, learner.method.preprocess.shrink, progress.advance)
    skipped = list(given.skipped)
    if wish.strict and (skipped or problems):
        raise TplError(f"{listed([*skipped, *problems], 3)} (--strict was given.)")
    if not len(images):
        raise TplError(f"None of the {len(given.images)} images in {given.origin} can be read: {problems[0]}")
    ready = given.with_images(images)
    skipped += [f"{name}: no readable images" for name in given.class_names if name not in ready.class_names]
    for text in (skipped + problems)[:SHOWN]:
        warn(f"left out: {text}")
    if len(skipped) + len(problems) > SHOWN:
        warn(f"left out: {len(skipped) + len(problems) - SHOWN} more; --json names all.")
    if len(ready.class_names) == 1 and not learner.classes_:
        warn("one class alone cannot be told from anything: every image will be called that until more are learned.")
    return ready, {"skipped": skipped, "unreadable": problems}


def _choose(learner: Learner, ready: Labelled, wish: Wish) -> dict[str, Any]:
    """Set what depends on the images: epochs, and the memory of a new model."""
    chosen: dict[str, Any] = {}
    if not learner.classes_:
        budget = wish.memory or Budget.parse(MEMORY)
        images = budget.in_images(lambda: encoded_size(ready.images, learner))
        set_options(learner, memory=images)
        if budget.bytes is not None:
            chosen["memory_budget_bytes"] = budget.bytes
    if wish.passes is not None:
        set_options(learner, passes=wish.passes)
    if wish.update:
        return chosen
    from tpl.schedule import epochs_for

    train = trained_on(ready, wish.held_out, learner.method.seed)
    if not learner.classes_ and learner.method.name == PLUS:
        set_options(learner, width=width_for(train))
    epochs = wish.epochs or epochs_for(learner.method, train)
    set_options(learner, epochs=epochs)
    return chosen | {"epochs": epochs}


def _task_name(given: Labelled) -> str:
    return Path(given.origin).resolve().stem or "task"


def _header_text(store: ModelStore) -> bytes:
    try:
        return store.header_file.read_bytes()
    except OSError:
        return b""
