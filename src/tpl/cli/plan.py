"""What `tpl learn` is asked for and decides before it learns, and what `--dry-run` estimates and prints.

Mistakes are reported before anything is read or imported: what needs torch is imported inside functions.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from tpl.cli.app import out
from tpl.cli.encoder import FOR_PHOTOS, encoder_text
from tpl.cli.text import listed, size
from tpl.errors import TplError

if TYPE_CHECKING:
    from tpl.engine import Event
    from tpl.learner import Learner
    from tpl.methods import Method
    from tpl.store import ModelStore
    from tpl.stream import ImageSet, Labelled, Task

PLUS = "tpl-plus"
CLOSED_FORM = "closed-form"
QUICK, BALANCED, BEST = "quick", "balanced", "best"
PRESETS = (QUICK, BALANCED, BEST)
# Seconds that training a task may take under `balanced`, unless --time says otherwise: so many an image, between two
# bounds. A few photos are learned in less than a minute, from the command to the prompt.
SECONDS_PER_PHOTO, SHORTEST_LIMIT, LONGEST_LIMIT = 0.5, 30.0, 120.0
# Passes of the encoder without training that a training step on an image takes: 2.4 to 3.8 on one core and on two, in
# all blocks of ViT-tiny and in the last three.
TRAINING_COST = 3.5
FROM_SCRATCH = "resnet18"  # the encoder that is not pre-trained: the expert of tpl-plus needs pre-trained features
OPTIONS: dict[str, Any] = {"latent": 64, "batch_size": 16}
MEMORY = "2000"
HELD_OUT = 0.1  # share of every class that is not trained on
MANY_IMAGES = 1000  # of a first task
MOST_FEATURES = 2048  # random features of tpl-plus: 17 MB in the model directory, and seconds to solve after a task

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SAMPLE = 32  # images whose encoded size is averaged
_TIMED = 64  # images in the timing of a dry run
_ROUNDS = 4  # epochs of it, where the first costs more than the others
_FEW = 8  # images that the encoder is timed on
_TIMES, _PATIENCE = 3, 0.5  # how often that is, and for how many seconds at most
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Budget:
    """A replay memory as asked for: a number of images, or of bytes."""

    images: int | None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """`2000` images, `50MB`, or `none`."""
        plain = text.strip().lower().replace(" ", "")
        if plain == "none":
            return cls(0)
        if plain.isdecimal():
            return cls(int(plain))
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)i?b", plain)
        if found is None:
            raise TplError(f"--memory takes a number of images, a size such as 50MB, or none; got '{text}'.")
        return cls(None, int(float(found[1]) * _FACTORS[found[2]]))

    def in_images(self, encoded: Callable[[], float]) -> int:
        """The budget as a number of images; `encoded` gives an image's average size in bytes, if it is needed."""
        if self.images is not None:
            return self.images
        assert self.bytes is not None
        return int(self.bytes / encoded())


def parse_time(text: str) -> float:
    """`90s`, `5m`, `1h` or a number, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]*)", text.strip().lower().replace(" ", ""))
    if found is None or found[2] not in _SECONDS or float(found[1]) <= 0:
        raise TplError(f"--time takes a time such as 90s or 5m; got '{text}'.")
    return float(found[1]) * _SECONDS[found[2]]


@dataclass(frozen=True)
class Choice:
    """Whether task models are trained, and why."""

    preset: str | None  # None: options decide
    method: str
    reason: str
    seconds: float | None = None  # that training was estimated to take
    limit: float | None = None
    epochs: int | None = None  # None: as many as the schedule says, or none
    adapted_blocks: int | str | None = None  # of task models

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON."""
        seconds = None if self.seconds is None else round(self.seconds, 1)
        found = {"preset": self.preset, "method": self.method, "reason": self.reason}
        return found | {"adapted_blocks": self.adapted_blocks, "estimated_seconds": seconds, "time_limit": self.limit}


@dataclass(frozen=True)
class Request:
    """What the command line of `tpl learn` asks for; None where the program chooses."""

    method: str | None
    encoder: str | None
    weights: Path | None
    memory: Budget | None
    memory_kind: str | None
    adapted_blocks: str | None
    passes: str | None
    epochs: int | None
    seed: int | None
    name: str | None
    device: str
    asked_share: float | None  # of --held-out
    update: bool
    strict: bool
    preset: str | None = None
    limit: float | None = None  # seconds
    download: bool | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise TplError(f"--held-out takes a share of at least 0 and below 1; got {self.held_out:g}.")
        if self.update and (self.name is not None or self.epochs is not None):
            raise TplError("--name and --epochs are for new classes; an update trains nothing. Leave them out.")
        if self.memory is not None and self.memory_kind not in (None, "images"):
            raise TplError(
                f"--memory is a number of images, and --memory-kind {self.memory_kind} keeps none: leave one out."
            )
        if self.method is not None and self.method not in (PLUS, "tpl"):
            _check_method(self.method)
        if self.preset is not None:
            self._check_preset(self.preset)
        if self.limit is not None and (self.as_told or self.preset in (QUICK, BEST)):
            raise TplError("--time is for --preset balanced, which decides by it whether task models are trained.")

    @property
    def held_out(self) -> float:
        """The share of every class to hold out, by methods that hold images out."""
        return HELD_OUT if self.asked_share is None else self.asked_share

    def share_for(self, method: Method) -> float:
        """The share of every class that this method holds out: none, if it leaves each image out in turn instead."""
        return 0.0 if method.leaves_one_out else self.held_out

    def _check_preset(self, preset: str) -> None:
        if preset not in PRESETS:
            raise TplError(f"--preset takes {', '.join(PRESETS)}; got '{preset}'.")
        given = [name for name, value in self._own_options().items() if value is not None]
        if self.method is not None or (given and preset != BEST):
            raise TplError(f"--preset {preset} decides about the training: leave out {', '.join(given) or '--method'}.")

    def _own_options(self) -> dict[str, Any]:
        """Options that only make sense with task models."""
        return {
            "--epochs": self.epochs,
            "--memory": self.memory,
            "--memory-kind": self.memory_kind,
            "--adapted-blocks": self.adapted_blocks,
            "--passes": self.passes,
        }

    @property
    def as_told(self) -> bool:
        """Whether options say how to learn, so that nothing is left to choose by a preset."""
        return self.preset is None and any(v is not None for v in (self.method, *self._own_options().values()))

    def told(self, method: str) -> Choice | None:
        """The method of a new model that options ask for without naming it, to be said; None if it is named."""
        given = [name for name, value in self._own_options().items() if value is not None]
        if not given or self.method is not None or self.preset is not None:
            return None
        verb = "are options" if len(given) > 1 else "is an option"
        return Choice(None, method, f"{' and '.join(given)} {verb} of task models, which are trained")

    def preset_for(self, stored: str | None) -> str | None:
        """The preset that holds: the one asked for, that of a stored model, balanced for a new one; None: as told."""
        if self.preset is not None:
            return self.preset
        return None if self.as_told else BALANCED if stored is None else stored or None

    def check_model(self, store: ModelStore) -> list[str]:
        """Refuse options that do not suit the model in `store`; the classes it knows."""
        if not store.exists():
            _refuse_other_folder(store)
            if self.update:
                raise TplError(f"{store.path} holds no model yet; --update adds images to one. Learn without it first.")
            self._check_passes(self.method or method_for(self.encoder or ""))
            return []
        header = store.header()
        closed = header["method"] == CLOSED_FORM
        if self.preset is not None and (self.preset, closed) in ((QUICK, False), (BEST, True)):
            raise TplError(
                f"{store.path} is a model of {header['method']}, which --preset {self.preset} does not make: "
                "leave --preset out."
            )
        fixed = {
            "--method": (self.method, header["method"]),
            "--encoder": (self.encoder, header["encoder"]["name"]),
            "--seed": (self.seed, header["seed"]),
            "--memory-kind": (self.memory_kind, header["options"].get("memory_kind", "images")),
            "--adapted-blocks": (self.adapted_blocks, str(header["options"].get("adapted_blocks", "all"))),
            "--memory": (self.memory.images if self.memory else None, header["options"].get("memory")),
        }
        lacking = [name for name, value in self._own_options().items() if closed and value is not None]
        if lacking:
            raise TplError(
                f"{store.path} is a model of {CLOSED_FORM}, which trains no task models and has no {lacking[0]}: "
                "leave it out."
            )
        for option, (asked, has) in fixed.items():
            if option == "--memory" and has is None and self.memory is not None:
                raise TplError(f"{store.path} is a model of {header['method']}, which has no --memory: leave it out.")
            if asked is not None and asked != has:
                raise TplError(f"{store.path} was made with {option} {has}, which cannot change; leave it out.")
        if self.memory is not None and self.memory.bytes is not None:
            raise TplError(
                f"{store.path} keeps {fixed['--memory'][1]} images, which cannot change; leave --memory out."
            )
        self._check_passes(header["method"])
        return [name for task in header["tasks"] for name in task["classes"]]

    def _check_passes(self, method: str) -> None:
        if self.passes is not None and method != PLUS:
            raise TplError(
                f"--passes is an option of {PLUS}, and this is a model of {method}, which runs every task's model."
            )

    def check_classes(self, given: Labelled, known: list[str], model: Path) -> None:
        """Refuse data without new classes, and unknown classes in an update."""
        old = [name for name in given.class_names if name in known]
        new = [name for name in given.class_names if name not in known]
        if self.update and new:
            how = f"; to add images of the others only, pass --classes {','.join(old)}" if old else ""
            raise TplError(f"{model} does not know {listed(new)} yet: learn new classes without --update{how}.")
        if old and not new and not self.update:
            raise TplError(f"{model} knows {listed(old)} already. To add more images of known classes, pass --update.")


def _refuse_other_folder(store: ModelStore) -> None:
    """Refuse to make a model in a folder that holds other files; most likely the arguments were swapped."""
    if not store.path.exists():
        return
    if not store.path.is_dir():
        raise TplError(f"{store.path} is a file; MODEL is a directory to make: tpl learn MODEL FOLDER.")
    visible = {entry.name for entry in store.path.iterdir() if not entry.name.startswith(".")}
    stored = "tasks" in visible and _is_of_a_model(store.path / "tasks")
    if stored and (visible != {"tasks"} or not _left_by_a_first_writer(store)):
        raise TplError(
            f"{store.path} holds the files of a model, but no model.json: restore it from a backup, or remove the "
            "directory to begin anew."
        )
    if visible and not stored:
        raise TplError(
            f"{store.path} holds no model, but other files: name a new directory (the order is tpl learn MODEL FOLDER)."
        )


def _is_of_a_model(tasks: Path) -> bool:
    """Whether this is a folder with nothing but .safetensors files."""
    return tasks.is_dir() and all(f.suffix == ".safetensors" for f in tasks.rglob("*") if not f.is_dir())


def _left_by_a_first_writer(store: ModelStore) -> bool:
    """Whether a program that was killed in its first commit left these files, so that they never were a model.

    That commit alone writes into folder 000. A complete one may have lost its model.json later; but a program that
    was killed also leaves the file that names it as the holder of the lock.
    """
    found = {entry.name for entry in (store.path / "tasks").iterdir()}
    return found <= {".000.partial"} or (found <= {"000", ".000.partial"} and store.holder_file.exists())


def method_for(encoder: str) -> str:
    """The default method of a new model."""
    return "tpl" if encoder.partition(":")[0] == FROM_SCRATCH else PLUS


def options_of(method: str) -> set[str]:
    """The names of a method's options."""
    from tpl.methods import find_method

    return set(find_method(method).config_class.__dataclass_fields__)


def _check_method(name: str) -> None:
    """Refuse a method that is not there, or that needs the data of all tasks again and again."""
    from tpl.names import refuse_unknown
    from tpl.outline import method_outlines

    known = method_outlines()
    refuse_unknown("method", name, known)
    if known[name].cumulative:
        raise TplError(f"'{name}' needs the images of all tasks every time: it is a bound for benchmarks (tpl run).")


def usual_limit(train: int) -> float:
    """How many seconds the training of a task with so many images may take, if --time does not say."""
    return min(max(SHORTEST_LIMIT, SECONDS_PER_PHOTO * train), LONGEST_LIMIT)


@dataclass(frozen=True)
class Training:
    """A way to train a task's model: adapters in the last blocks, for some epochs."""

    blocks: int
    depth: int  # blocks of the encoder
    epochs: int

    def seconds(self, one_pass: float) -> float:
        """How long it takes, if the encoder takes `one_pass` seconds for the images of an epoch.

        The blocks below the adapted ones run once for all epochs.
        """
        share = self.blocks / self.depth
        return one_pass * (TRAINING_COST * self.epochs * share + 1 - share)

    @property
    def option(self) -> int | str:
        """The value of `adapted_blocks`."""
        return "all" if self.blocks == self.depth else self.blocks

    def __str__(self) -> str:
        which = "all blocks" if self.blocks == self.depth else f"the last {self.blocks} of {self.depth} blocks"
        return f"training {which} for {self.epochs} epochs"

    def beside(self, other: Training) -> str:
        """This way in words, behind the other."""
        return f"{self.epochs} epochs" if self.blocks == other.blocks else str(self)


def choose_training(learner: Learner, given: Labelled, train: int, epochs: int, asked: float | None) -> Choice:
    """How task models are trained within the limit, if at all.

    In full, if that fits. If not, a new model gets the shortest schedule, and adapters in as many of the encoder's last
    blocks as fit: all, a half or a quarter. (With ten photos a class, more epochs brought nothing: docs/photos.md.) If
    a quarter is still too much, it does without task models. A model that has task models keeps its blocks and gets
    fewer epochs. With few photos and an encoder for photos, which they did not help, they must be asked for.
    """
    from tpl.methods.bank.method import BankMethod
    from tpl.nets import as_vit
    from tpl.schedule import FEWEST_EPOCHS

    method, new = learner.method, not learner.classes_
    assert isinstance(method, BankMethod)
    if new and asked is None and method.encoder.name in FOR_PHOTOS and train < MANY_IMAGES:
        reason = "task models gain nothing with this encoder and few images; --preset best trains them"
        return Choice(BALANCED, CLOSED_FORM, reason)
    limit = asked or usual_limit(train)
    depth, fewest = as_vit(method.encoder).depth, min(epochs, FEWEST_EPOCHS)
    one_pass = (train + (train if len(method.memory) else 0)) * seconds_per_image(learner, given)

    def chosen(way: Training, reason: str, trains: bool = True) -> Choice:
        name, blocks = (method.name, way.option) if trains else (CLOSED_FORM, None)
        fewer = way.epochs if trains and way.epochs < epochs else None
        return Choice(BALANCED, name, reason, way.seconds(one_pass), limit, fewer, blocks)

    def lasts(way: Training) -> str:
        return f"about {duration(way.seconds(one_pass))}"

    full = Training(depth - method.bank.below, depth, epochs)
    if full.seconds(one_pass) <= limit:
        return chosen(full, f"training takes {lasts(full)}, within {duration(limit)}")
    parts = [depth, depth // 2, -(-depth // 4)] if new else [full.blocks]
    ways = [Training(blocks, depth, fewest) for blocks in dict.fromkeys(parts) if blocks]
    for way in ways:
        if way.seconds(one_pass) <= limit:
            rest = f"{full.beside(way)} would take {lasts(full)}"
            return chosen(way, f"{way} takes {lasts(way)}, within {duration(limit)}; {rest}")
    least = ways[-1]
    if new:
        reason = f"even {least} would take {lasts(least)}, more than {duration(limit)}; --time allows it"
        return chosen(least, reason, trains=False)
    way = dataclasses.replace(least, epochs=max(1, int(fewest * limit / least.seconds(one_pass))))
    rest = f"{full.beside(way)} would take {lasts(full)}, more than {duration(limit)}"
    return chosen(way, f"{way} takes {lasts(way)}; {rest}")


def seconds_per_image(learner: Learner, given: Labelled) -> float:
    """How long the encoder takes for an image here, in batches like those of task models: the best of a few times."""
    import numpy as np

    from tpl.methods.bank.method import BankMethod

    method = learner.method
    assert isinstance(method, BankMethod)
    few = given.images.select(np.arange(min(_FEW, len(given.images))))
    pixels, times = method.preprocess.batch(few), list[float]()
    method.bank.encoder_features(pixels)  # the first call prepares things
    while len(times) < _TIMES and sum(times) < _PATIENCE:
        started = time.perf_counter()
        method.bank.encoder_features(pixels)
        times.append(time.perf_counter() - started)
    return min(times) / len(few)


def duration(seconds: float) -> str:
    """A time in words."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{max(round(seconds), 1)} s"
    return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"


def width_for(train: int) -> int:
    """How many random features the expert of tpl-plus gets, for a first task with `train` training images."""
    from tpl.methods.parts.ridge import features_for

    return min(features_for(train), MOST_FEATURES)


def as_task(given: Labelled, name: str) -> Task:
    """Labelled images as a task."""
    from tpl.stream import Task

    return Task(name, given.class_names, given.images)


def trained_on(given: Labelled, held_out: float, seed: int) -> int:
    """How many images are left to train on once some of each class are held out."""
    from tpl.stream.task import hold_out

    return len(hold_out(as_task(given, ""), held_out, [seed])[0])


def encoded_size(images: ImageSet, learner: Learner) -> float:
    """The average size of an image in the replay memory, in bytes, estimated on a sample."""
    import numpy as np

    from tpl.memory import encode

    chosen = np.unique(np.linspace(0, len(images) - 1, _SAMPLE).astype(int)).tolist()
    return sum(len(encode(learner.method.preprocess.shrink(images.load(i)))) for i in chosen) / len(chosen)


@dataclass(frozen=True)
class Estimate:
    """How long learning will take, and the size of the model then."""

    seconds: float
    bytes: int


def estimate(learner: Learner, given: Labelled, train: int, epochs: int) -> Estimate:
    """Train on a few of the images for two epochs, with a learner to be thrown away, and scale the second one up.

    The time is measured on this machine with this data; other programs that run at the same time make it longer. The
    first steps of a process take much longer than all others.
    """
    memory = learner.method.memory
    replayed = train if memory is not None and len(memory) else 0  # an epoch, beside the new ones
    if memory is not None and getattr(learner.method.config, "replay_batches", "") == "union":
        replayed = len(memory)
    few = given.images.select(some_of_each(given, max(1, _TIMED // len(given.class_names))))
    trained: dict[str, float] = {}
    ends: list[float] = []  # of epochs

    def callback(event: Event) -> None:
        if event.kind == "trained":
            trained.update(event.data)
        elif event.kind == "epoch":
            ends.append(time.perf_counter())

    old = [len(images) for images in memory.exemplars] if memory is not None else []
    batch = min(getattr(learner.method.config, "batch_size", 1), max(1, len(few) // 2))
    # The blocks below the adapted ones are computed once for all epochs.
    whole = getattr(learner.method.config, "adapted_blocks", "all") == "all"
    rounds = min(epochs, 2 if whole else _ROUNDS)
    if epochs:
        learner.method.set_options(epochs=rounds, batch_size=batch)
    started = time.perf_counter()
    learner.learn(as_task(given.with_images(few), "timing"), name="timing", held_out=0, callback=callback)
    # What is not training: statistics, and the memory under every task's model.
    around = time.perf_counter() - started - trained.get("seconds", 0.0)
    speed = trained["images"] / trained["seconds"] if trained else 1.0
    if whole and len(ends) > 1:
        speed = trained["images"] / len(ends) * (len(ends) - 1) / max(ends[-1] - ends[0], 1e-6)
    passes = epochs * (train + replayed)
    seconds = passes / speed + around * max(len(given.images) / len(few), 1)
    if memory is None or not memory.budget:  # statistics that replace images do not grow with their number
        return Estimate(seconds, _size(learner, memory=False) + _size(learner, memory=True))
    quotas = memory.quotas(len(learner.classes_))
    kept = sum(min(pair) for pair in zip([*old, *given.counts.values()], quotas, strict=True))
    each = encoded_size(given.images, learner) + _size(learner, memory=True) / max(len(memory), 1)
    return Estimate(seconds, int(_size(learner, memory=False) + kept * each))


def _size(learner: Learner, memory: bool) -> int:
    """Bytes of what was learned: the memory's images under the tasks' models, or everything else."""
    state = learner.state()
    tensors = [pair for part in (state.shared, *state.tasks) for pair in part.items()]
    return sum(t.numel() * t.element_size() for name, t in tensors if name.startswith("memory.") == memory)


def some_of_each(given: Labelled, each: int) -> Any:
    """Indices of the first `each` images of every class."""
    import numpy as np

    labels = given.images.labels
    return np.concatenate([np.flatnonzero(labels == c)[:each] for c in range(len(given.class_names))])


def choice_text(choice: dict[str, Any]) -> str:
    """The choice of a preset, or what options ask for, in one line."""
    return f"{choice['preset'] or 'method'}: {choice['method']}, as {choice['reason']}."


def print_plan(report: dict[str, Any]) -> None:
    """Print what would be learned."""
    table = Table("class", box=None, header_style="bold")
    table.add_column("images", justify="right")
    for name, count in (report["classes"] | report["more"]).items():
        table.add_row(escape(name), str(count))
    out.print(table)
    apart = f"held out to measure on: {report['held_out']}"
    if report["left_out_in_turn"]:
        apart = "none is held out: each is left out in turn to measure on"
    out.print(f"To learn: {report['images']} images; {apart}.", highlight=False)
    if report["more"]:
        out.print(f"Known already, to be updated: {escape(listed(list(report['more'])))}.", highlight=False)
    if report["updated"]:
        out.print("An update trains nothing: it takes little longer than predicting the images.")
    else:
        lasts, work = duration(report["seconds"]), "without training, measured on a few images just now"
        if report["epochs"]:
            work = f"for {report['epochs']} epochs, measured on a few steps just now"
        out.print(f"Time: about {lasts} {work}. On disk: about {size(report['bytes'])}.", highlight=False)
    if report["encoder"]["reason"] is not None:
        out.print(encoder_text(report["encoder"]), markup=False, highlight=False, soft_wrap=True)
    if report.get("choice"):
        out.print(choice_text(report["choice"]), markup=False, highlight=False, soft_wrap=True)
    memory = report["memory"]
    if memory["kind"] != "images" or not memory["budget"]:
        out.print("Memory: no images. Nothing was stored.", highlight=False)
        return
    of = f", {size(report['memory_budget_bytes'])}" if "memory_budget_bytes" in report else ""
    out.print(f"Memory: at most {memory['budget']} images{of}. Nothing was stored.", highlight=False)
