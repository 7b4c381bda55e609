"""The command that makes a model or adds classes and images to it: learn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tpl.cli.app import MODELS, app, err, importing, out, print_json, uninterrupted
from tpl.cli.encoder import announce_download, choose_encoder, describe_encoder, encoder_text, in_package
from tpl.cli.options import DATA, TRAINING, AsJson, Device, Encoder, Folder, Strict, Weights, separate
from tpl.cli.plan import (
    BALANCED,
    CLOSED_FORM,
    MEMORY,
    OPTIONS,
    PLUS,
    QUICK,
    Budget,
    Choice,
    Request,
    as_task,
    choice_text,
    choose_training,
    duration,
    encoded_size,
    estimate,
    method_for,
    options_of,
    parse_time,
    print_plan,
    some_of_each,
    trained_on,
    width_for,
)
from tpl.cli.text import (
    SHOWN,
    bytes_on_disk,
    capacity_text,
    listed,
    memory_text,
    percent,
    size,
    unknown_text,
    warn,
    warn_about_names,
)
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.console import WorkProgress
    from tpl.learner import Learner
    from tpl.lines import ProgressLines
    from tpl.store import ModelStore
    from tpl.stream import Labelled

    Progress = WorkProgress | ProgressLines

FEW = 30  # images, below which an accuracy is a hint
COMPARED = 50  # images of each new class that are compared with known classes


@app.command(rich_help_panel=MODELS)
def learn(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model directory; made if it does not exist.")],
    place: Folder = None,
    update: Annotated[bool, typer.Option("--update", help="Add images of classes that the model knows.")] = False,
    name: Annotated[str | None, typer.Option(help="The task's name; by default that of FOLDER.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Say what would be learned, how long and how large; store no model. An encoder may be downloaded.",
        ),
    ] = False,
    encoder: Encoder = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A known data set (digits, cifar100, ...); FOLDER is where it is.",
            rich_help_panel=DATA,
        ),
    ] = None,
    download: Annotated[
        bool | None,
        typer.Option(
            "--download/--no-download",
            help="--download: fetch the data set of --data if it is missing. --no-download: for a new model of photos, "
            "take the encoder in the package, where by default a better one is fetched if there is a network (22 MB "
            "once, about 3 times slower).",
            rich_help_panel=DATA,
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Only these classes, separated by commas.", rich_help_panel=DATA)
    ] = None,
    strict: Strict = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="tpl-plus: one model per task, and a classifier over all classes; closed-form: the latter alone, "
            "without training; or any other of `tpl list`. By default the preset chooses.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="quick: no training, seconds; balanced (default): task models are trained as far as the time allows; "
            "best: in full.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="TIME",
            help="For balanced: how long training a task may take, such as 90s or 5m; by default half a second an "
            "image, but at least 30s and at most 2m.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Images that task models keep for replay: a number (2000 by default), a size such as 50MB, or none. "
            "Asks for task models: a model without them, as photos give it by default, keeps no images.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    memory_kind: Annotated[
        str | None,
        typer.Option(
            help="What is kept of old data: images (default), features (their statistics), or none.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            help="For tpl-plus: how many tasks' models see an image: all (default), auto, or a number. May be changed "
            "with a later task.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    adapted_blocks: Annotated[
        str | None,
        typer.Option(
            help="How many of the encoder's last blocks have adapters: all (default) or a number. With fewer, learning "
            "and predicting are faster.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Epochs; by default 20 to 40, up to 60 with encoders other than compact.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Share of each class's images to hold out of training, to measure on; 0.1 by default. Without "
            "training nothing is held out: each image is left out in turn.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed; 0 by default.", rich_help_panel=TRAINING)
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Labelled photos that are not learned: compare the model before and after on them, and say if it is "
            "worse on known classes.",
            rich_help_panel=DATA,
        ),
    ] = None,
    weights: Weights = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn classes from folders of images: make a model, or add classes to one, without the images of old classes.

    40 images take less than a minute on two cores; `--dry-run` estimates the time for yours. Without `--encoder`, small
    images are seen with `compact` and photos with `photos`, which are both in the package. Task models are trained as
    far as `--time` allows (with `photos`, not for few images unless asked for); without them, learning takes seconds.
    Ctrl-C stops it and leaves the model as it was.

    Examples:

    `tpl learn model photos/`

    `tpl learn model photos/ --preset quick`

    `tpl learn model photos/ --time 10m`

    `tpl learn model photos/ --no-download`

    `tpl learn model tomorrow.zip --name birds`

    `tpl learn model list.csv --update`

    `tpl learn model --data digits --classes 0,1,2 --memory 1MB --dry-run`

    `tpl learn model photos/ --memory-kind features`

    `tpl learn model photos/ --passes auto`

    `tpl learn model birds/ --test test-photos/`
    """
    from tpl.store import ModelStore
    from tpl.stream import labelled_images

    budget = None if memory is None else Budget.parse(memory)
    request = Request(
        method,
        encoder,
        weights,
        budget,
        memory_kind,
        adapted_blocks,
        passes,
        epochs,
        seed,
        name,
        device,
        held_out,
        update,
        strict,
        preset,
        None if limit is None else parse_time(limit),
        download,
    )
    store = ModelStore(model)
    known = request.check_model(store)
    given = labelled_images(place, data, bool(download))
    if classes is not None:
        given = given.only(separate(classes))
    request.check_classes(given, known, model)
    judging = _judging(store, test, dry_run)
    before = _header_text(store)
    try:
        with uninterrupted(), importing():
            from tpl.console import work_progress
            from tpl.learner import Learner  # the slowest import
        with work_progress(err, as_json) as progress:
            older = None if judging is None else Learner.load(model, weights, device)
            report = _dry_run(store, given, request, progress) if dry_run else _learn(store, given, request, progress)
            if older is not None and judging is not None:
                report["against"] = _judge(older, model, judging, request, progress)
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
        _print_learned(report)
        if "against" in report:
            _print_judged(report["against"], model)


def _judging(store: ModelStore, test: Path | None, dry_run: bool) -> Labelled | None:
    """The images to compare the models before and after on, if there is a model before."""
    from tpl.stream import labelled_images

    if test is None or dry_run:
        return None
    given = labelled_images(test, testing=True)
    if store.exists():
        return given
    warn("--test compares with the model before, and this one is new; `tpl evaluate` measures it.")
    return None


def _print_judged(found: dict[str, Any], model: Path) -> None:
    from tpl.cli.evaluate import print_against

    print_against(found)
    if "worse" in found["verdict"]:
        out.print(f"`tpl undo {model}` goes back to the model before.", markup=False, highlight=False)


def _judge(older: Learner, model: Path, given: Labelled, request: Request, progress: Progress) -> dict[str, Any]:
    from tpl.cli.evaluate import compare
    from tpl.learner import Learner

    progress.begin("comparing", 2 * len(given.images))
    return compare(older, Learner.load(model, request.weights, request.device), given, "before", progress.advance)


def _learn(store: ModelStore, given: Labelled, request: Request, progress: Progress) -> dict[str, Any]:
    started = time.monotonic()
    with store.creating():
        learner, encoder = _learner(store, given, request)
        ready, notes = _read(learner, given, request, progress)
        new, more = _by_novelty(learner, ready, request)
        learner, chosen = _choose(learner, new, request)
        if "epochs" in options_of(learner.method.name):
            with uninterrupted(), importing():
                import torch._dynamo  # noqa: F401 (as the first optimiser would, where Ctrl-C may come)
        task = as_task(ready, _task_name(given))
        names = [] if request.update else _almost_equal_names(learner, new)
        alike = [] if request.update else _like_known_classes(learner, new)
        known = len(learner.classes_)
        if request.update:
            learner.update(task, callback=progress, held_out=request.held_out)
        else:
            learner.learn(task, name=request.name, held_out=request.held_out, callback=progress, source=given.origin)
            alike += _learned_like_known_classes(learner, known)
        learner.save(store.path)
    record, facts = learner.tasks_[-1], learner.facts()
    measured = not request.update
    return {
        "model": str(store.path),
        "task": record.name if measured else None,
        "updated": request.update,
        "classes": new.counts,
        "more": more,
        "images": record.images if measured else len(ready.images),
        "held_out": record.held_out if measured else None,
        "accuracy": record.accuracy if measured else None,
        "measured": record.measured.to_dict() if measured and record.measured is not None else None,
        "confused": [{"true": t, "predicted": p, "count": n} for t, p, n in learner.held_out_confusions() if measured],
        "old_classes": learner.effect_.to_dict() if learner.effect_ is not None else None,
        "repeated": learner.method.repeated_,
        "known_classes": len(learner.classes_),
        "encoder": encoder,
        **chosen,
        **{key: facts[key] for key in ("memory", "capacity", "smallest_reject")},
        "bytes": bytes_on_disk(store.path),
        "seconds": round(time.monotonic() - started, 2),
        "same_classes": alike,
        "names_alike": names,
        **notes,
    }


def _dry_run(store: ModelStore, given: Labelled, request: Request, progress: Progress) -> dict[str, Any]:
    started = time.monotonic()
    learner, encoder = _learner(store, given, request)
    ready, notes = _read(learner, given, request, progress)
    reading = time.monotonic() - started
    ready, more = _by_novelty(learner, ready, request)
    learner, chosen = _choose(learner, ready, request)
    memory = learner.facts()["memory"]
    train = trained_on(ready, request.share_for(learner.method), learner.method.seed)
    names = [] if request.update else _almost_equal_names(learner, ready)
    found = None
    if not request.update:
        progress.begin("timing a few steps", None)
        found = estimate(learner, ready, train, chosen["epochs"] or 0)
    from tpl.versions import bytes_of_older

    older = bytes_of_older(store.path) if store.exists() else 0
    return {
        "dry_run": True,
        "model": str(store.path),
        "updated": request.update,
        "classes": ready.counts,
        "more": more,
        "images": train,
        "held_out": len(ready.images) - train,
        "left_out_in_turn": learner.method.leaves_one_out,
        "encoder": encoder,
        **chosen,
        "memory": {"kind": memory["kind"], "budget": memory["budget"]},
        "seconds": None if found is None else round(found.seconds + reading, 1),
        "bytes": None if found is None else found.bytes + older,
        "names_alike": names,
        **notes,
    }


def _learner(store: ModelStore, given: Labelled, request: Request) -> tuple[Learner, dict[str, Any]]:
    """The model in `store`, or a new one, and what is said about its encoder."""
    choice = (
        None if store.exists() else choose_encoder(request.encoder, request.weights, given.images, request.download)
    )
    try:
        learner = _stored(store, request) if choice is None else _new(choice.name, request)
    except TplError as error:
        if choice is None or not choice.unasked:
            raise
        choice = in_package(choice, error)
        learner = _new(choice.name, request)
    encoder = learner.method.encoder
    return learner, describe_encoder(choice, encoder.name, encoder.data_config["input_size"][-1])


def _stored(store: ModelStore, request: Request) -> Learner:
    from tpl.learner import Learner

    return Learner.load(store.path, request.weights, request.device, warm=False)  # images follow at once


def _new(encoder: str, request: Request) -> Learner:
    from tpl.learner import Learner
    from tpl.schedule import schedule_for

    announce_download(encoder, request.weights)
    preset = request.preset_for(None)
    method = request.method or (CLOSED_FORM if preset == QUICK else method_for(encoder))
    options = OPTIONS | {"lr": schedule_for(encoder).lr}
    asked = {"memory_kind": request.memory_kind, "adapted_blocks": request.adapted_blocks}
    given = {name: value for name, value in asked.items() if value is not None}
    lacking = [name for name in given if name not in options_of(method)]
    if lacking:
        raise TplError(f"{method} has no {lacking[0]}: leave --{lacking[0].replace('_', '-')} out, or choose a method.")
    own = {name: value for name, value in (options | given).items() if name in options_of(method)}
    learner = Learner(method, encoder, request.weights, request.device, seed=request.seed or 0, **own)
    learner.preset = preset or ""
    return learner


def _read(
    learner: Learner, given: Labelled, request: Request, progress: Progress
) -> tuple[Labelled, dict[str, list[str]]]:
    """The images that can be read, and a list of what was left out; with --strict, an error instead."""
    from tpl.advice.files import by_kind
    from tpl.stream import readable

    progress.begin("reading", len(given.images))
    images, problems = readable(given.images, learner.method.preprocess.shrink, progress.advance)
    kinds = by_kind(given.unread)
    skipped = [*map(str, kinds), *given.skipped]
    if request.strict and (given.skipped or problems or any(kind.shows for kind in kinds)):
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
        warn("a model with one class gives every image that name; learn more classes.")
    return ready, {"skipped": skipped, "unreadable": problems}


def _by_novelty(learner: Learner, ready: Labelled, request: Request) -> tuple[Labelled, dict[str, int]]:
    """The images of new classes, and how many there are of each known class beside them; of an update, all images."""
    known = [name for name in ready.class_names if name in learner.classes_]
    if request.update or not known:
        return ready, {}
    new = [name for name in ready.class_names if name not in known]
    if not new:
        raise TplError(f"No image of a new class can be read; to add images of {listed(known)}, pass --update.")
    return ready.only(new), {name: ready.counts[name] for name in known}


def _almost_equal_names(learner: Learner, new: Labelled) -> list[list[str]]:
    """Warn about new classes that are called almost the same as a known one, or as each other."""
    from tpl.advice.files import names_alike

    groups = [list(group) for group in names_alike(new.class_names, learner.classes_)]
    warn_about_names(groups)
    return groups


def _like_known_classes(learner: Learner, new: Labelled) -> list[dict[str, Any]]:
    """Warn about new classes that look like a known one, as far as the model stores images of that.

    Where it stores feature vectors, `_learned_like_known_classes` compares these.
    """
    method = learner.method
    if not learner.classes_ or not method.encoder.pretrained or method.stored_vectors() is not None:
        return []
    from contextlib import closing

    from tpl.advice.check import Reference, same_classes
    from tpl.advice.features import FeatureReader
    from tpl.stream import batches_of

    reader = FeatureReader(method.encoder, method.compute)
    reference = Reference.of(method, reader)
    if not len(reference.labels):
        return []
    some = new.images.select(some_of_each(new, COMPARED))
    with closing(batches_of(some, method.preprocess, 256)) as ready:
        found = reader.look(ready)
    return _warned(same_classes(found, list(new.class_names), reference))


def _learned_like_known_classes(learner: Learner, known: int) -> list[dict[str, Any]]:
    """Warn about classes just learned that look like one of the first `known`, by feature vectors stored of both."""
    from tpl.advice.check import FEWEST, learned_and_known, same_classes

    stored = learned_and_known(learner.method, known) if known else None
    if stored is None or any(int(part.labels.bincount(minlength=1).max()) < FEWEST for part in stored):
        return []  # no class has enough images to say
    return _warned(same_classes(stored[0], learner.classes_[known:], stored[1]))


def _warned(alike: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for pair in alike:
        warn(
            f"'{pair['class']}' looks the same as '{pair['known']}': {percent(pair['share'])} of their images are "
            "taken for the other. If they are one class, `tpl undo` this and give it the known name."
        )
    return alike


def _choose(learner: Learner, ready: Labelled, request: Request) -> tuple[Learner, dict[str, Any]]:
    """Choose what depends on the images: whether to train, epochs, and the memory of a new model."""
    from tpl.schedule import epochs_for

    chosen: dict[str, Any] = {}
    preset = request.preset_for(learner.preset if learner.classes_ else None)
    choice, train = None, trained_on(ready, request.held_out, learner.method.seed)
    if preset == BALANCED and learner.method.name == PLUS and not request.update:
        epochs = epochs_for(learner.method, train)
        choice = choose_training(learner, ready, train, epochs, request.limit)
        if choice.method == CLOSED_FORM:
            learner = learner.instead(CLOSED_FORM)
        elif not learner.classes_:
            options = learner.method.config.to_dict() | {"adapted_blocks": choice.adapted_blocks}
            learner = learner.instead(PLUS, **options)
    elif preset is not None and not request.update:
        reason = "nothing is trained" if learner.method.name == CLOSED_FORM else "every task's model is trained in full"
        blocks = getattr(learner.method.config, "adapted_blocks", None)
        choice = Choice(preset, learner.method.name, reason, adapted_blocks=blocks)
    elif not learner.classes_:
        choice = request.told(learner.method.name)
    if choice is not None:
        chosen["choice"] = choice.to_dict()
    if request.asked_share and learner.method.leaves_one_out:
        warn(f"{learner.method.name} holds nothing out, as it leaves each image out in turn: --held-out has no effect.")
    options = options_of(learner.method.name)
    if not learner.classes_ and "memory" in options:
        budget = request.memory or Budget.parse(MEMORY)
        images = budget.in_images(lambda: encoded_size(ready.images, learner))
        learner.method.set_options(memory=images)
        if budget.bytes is not None:
            chosen["memory_budget_bytes"] = budget.bytes
    if request.passes is not None:
        learner.method.set_options(passes=request.passes)
    if request.update:
        return learner, chosen
    if not learner.classes_ and learner.method.name == PLUS:
        learner.method.set_options(random_features=width_for(train))
    if "epochs" not in options:
        return learner, chosen | {"epochs": None}
    fewer = None if choice is None else choice.epochs
    epochs = request.epochs or fewer or epochs_for(learner.method, train)
    learner.method.set_options(epochs=epochs)
    return learner, chosen | {"epochs": epochs}


def _task_name(given: Labelled) -> str:
    return Path(given.origin).resolve().stem or "task"


def _header_text(store: ModelStore) -> bytes:
    try:
        return store.header_file.read_bytes()
    except OSError:
        return b""


def _print_learned(report: dict[str, Any]) -> None:
    """Print what was learned, the accuracy, and the state of the model."""
    classes, took = escape(listed(list(report["classes"]))), duration(report["seconds"])
    if report["updated"]:
        out.print(f"Added {report['images']:,} more images of {classes} in {took}.", highlight=False)
    else:
        work = f"{report['epochs']} epochs" if report["epochs"] else "without training"
        out.print(
            f"Learned [bold]{classes}[/] from {report['images']:,} images in {took}, {work}.",
            highlight=False,
            soft_wrap=True,
        )
        if report["encoder"]["reason"] is not None:
            out.print(encoder_text(report["encoder"]), markup=False, highlight=False, soft_wrap=True)
        if "choice" in report:
            out.print(choice_text(report["choice"]), markup=False, highlight=False, soft_wrap=True)
        _print_accuracy(report)
    if report["repeated"]:
        warn(f"{report['repeated']:,} images are in the model already: a picture that comes again counts once.")
    if report["old_classes"] is not None:
        _print_effect(report["old_classes"], report["updated"])
    if report["more"]:
        known = escape(listed(list(report["more"])))
        out.print(f"Added {sum(report['more'].values()):,} more images of {known}, known before.", highlight=False)
    grid = Table.grid(padding=(0, 2))
    memory = report["memory"]
    kept = memory_text(memory)
    if "memory_budget_bytes" in report:
        kept += f" ({size(report['memory_budget_bytes'])} are about {memory['budget']} such images)"
    for name, text in (
        ("memory", kept),
        ("capacity", capacity_text(report["capacity"])),
        ("unknown", unknown_text(report["smallest_reject"])),
        ("on disk", f"{size(report['bytes'])} in {report['model']}"),
    ):
        grid.add_row(f"[bold]{name}[/]", escape(text))
    out.print(grid)


def _print_accuracy(report: dict[str, Any]) -> None:
    if report["accuracy"] is None:
        out.print("No image was held out: `tpl evaluate` can measure it on others.", highlight=False)
        return
    if report["known_classes"] == 1:
        out.print("With one class there is nothing to tell apart, so no accuracy to measure.", highlight=False)
        return
    measured, among = report["measured"], f"among all {report['known_classes']:,} classes"
    images = "held-out images" if report["held_out"] else "images, each of them left out in turn,"
    low, high = (f"{100 * side:.0f}" for side in measured["interval"])
    few = " Too few for more than a hint." if measured["images"] < FEW else ""
    out.print(
        f"Accuracy: [bold]{percent(report['accuracy'])}[/], {measured['right']:,} of {measured['images']:,} {images} "
        f"are right ({low} to {high} %), {among}.{few}",
        highlight=False,
        soft_wrap=True,
    )
    for pair in report["confused"][:5]:
        text = f"  {pair['true']} was taken for {pair['predicted']}: {pair['count']} of them"
        out.print(escape(text), highlight=False)


def _print_effect(effect: dict[str, Any], updated: bool) -> None:
    """Print what happened to the classes known before, with counts and an interval."""
    before, after = effect["before"], effect["after"]
    low, high = (f"{100 * side:.0f}" for side in after["interval"])
    how = "each image left out in turn"
    if effect["by"] != "model":
        how = f"each stored image left out in turn, by the {effect['by']} alone"
    out.print(
        f"{'All' if updated else 'Older'} classes, {how}: {before['right']} of {before['images']} right before, "
        f"{after['right']} of {after['images']} now ({low} to {high} %).",
        highlight=False,
        soft_wrap=True,
    )
    for pair in effect["confused"][:5]:
        text = f"  {pair['true']} is now taken for {pair['predicted']}: {pair['count']} of them"
        out.print(escape(text), highlight=False)
