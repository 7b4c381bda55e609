"""Options that several commands share, with their help texts and panels, and how their values are read.

Panels of `tpl COMMAND --help`: Options (what a command is mostly called with), Data, Training, Output, Advanced.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from tpl.errors import TplError
from tpl.files import at_home
from tpl.outline import method_outlines, outline

DATA, TRAINING, OUTPUT, ADVANCED = "Data", "Training", "Output", "Advanced"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]


def _stored(model: Path) -> Path:
    """A model directory that can be read; a mistake is told before torch is imported."""
    from tpl.store import ModelStore

    ModelStore(model).header()
    return model


Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model directory, made by `tpl learn`.", callback=_stored)
]
Benchmark = Annotated[str, typer.Argument(metavar="BENCHMARK", help="A benchmark; `tpl list` shows all.")]
FinishedRun = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run of tpl or tpl-plus.")]
Encoder = Annotated[
    str | None,
    typer.Option(
        help="compact or photos (in the package), any ViT or DeiT of timm, deit_small_611 (with --weights), resnet18 "
        "(trained from scratch). By default compact, for larger images photos; for benchmarks: `tpl list`.",
        show_default=False,
    ),
]
AcceptContaminated = Annotated[
    bool,
    typer.Option(
        "--accept-contaminated-encoder",
        help="Run an encoder that was pre-trained on the benchmark's classes; the results carry a mark.",
        rich_help_panel=ADVANCED,
    ),
]

# Data
Folder = Annotated[
    Path | None, typer.Argument(metavar="FOLDER", help="Class folders, a zip of them, or a CSV file of path,label.")
]
Data = Annotated[
    Path | None,
    typer.Option(help="Where the images are: a folder, zips, or torchvision's root.", rich_help_panel=DATA),
]
DataOfRun = Annotated[
    Path | None,
    typer.Option("--data", help="Where the run's images are; needed the first time only."),
]
TestData = Annotated[
    str | None,
    typer.Option("--data", metavar="NAME", help="Test images of a known data set instead.", rich_help_panel=DATA),
]
Download = Annotated[
    bool, typer.Option("--download", help="Download the data set if it is missing.", rich_help_panel=DATA)
]
Orders = Annotated[
    str,
    typer.Option(
        "--order",
        help="Order of the classes: natural, random:SEED or FILE.json:ID. Several, joined by commas, are trained side "
        "by side, one run each.",
        rich_help_panel=DATA,
    ),
]
PerTask = Annotated[
    str | None, typer.Option(help="Classes per task, e.g. 5, or 10,2,3 for unequal tasks.", rich_help_panel=DATA)
]
Tasks = Annotated[int | None, typer.Option(help="Stop after this many tasks.", rich_help_panel=DATA)]
Validation = Annotated[
    float | None,
    typer.Option(help="Measure on this share of the training images, not on the test images.", rich_help_panel=DATA),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop if an image cannot be read.")]

# Training: the common options of methods by name, all others with --set. `overrides` puts them together.
Epochs = Annotated[
    int | None, typer.Option(help="Epochs per task, instead of the benchmark's.", rich_help_panel=TRAINING)
]
Rate = Annotated[
    float | None, typer.Option(help="Learning rate, instead of the benchmark's.", rich_help_panel=TRAINING)
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Replay memory, instead of the benchmark's: a number of images, or small (the paper's small memory).",
        rich_help_panel=TRAINING,
    ),
]
HeldOut = Annotated[
    float | None,
    typer.Option(
        help="Share of each class's training images to hold out, to calibrate answers and the unknown score; 0 by "
        "default, 0.1 in `tpl learn`.",
        rich_help_panel=TRAINING,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any option of `tpl describe METHOD`; may be given several times.",
        rich_help_panel=TRAINING,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.", rich_help_panel=TRAINING)]

# Output
Track = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:WHERE]",
        help="Also log to tensorboard, mlflow or wandb; may be given several times.",
        rich_help_panel=OUTPUT,
    ),
]

# Advanced
Weights = Annotated[
    Path | None,
    typer.Option(help="Encoder weights: a .safetensors file or a torch state dict.", rich_help_panel=ADVANCED),
]
Device = Annotated[
    str,
    typer.Option(help="auto (the first GPU if there is one), cpu, cuda, cuda:1, ...", rich_help_panel=ADVANCED),
]
_PRECISION = typer.Option(
    help="auto (default), fp32 or bf16 (the encoder only).", show_default=False, rich_help_panel=ADVANCED
)
Precision = Annotated[str, _PRECISION]
PrecisionOrNone = Annotated[str | None, _PRECISION]
_COMPILE = typer.Option(
    help="Compile the network on a GPU: auto (default: for large images), on or off.",
    show_default=False,
    rich_help_panel=ADVANCED,
)
Compile = Annotated[str, _COMPILE]
CompileOrNone = Annotated[str | None, _COMPILE]
Batch = Annotated[int, typer.Option(min=1, help="Images per batch.", rich_help_panel=ADVANCED)]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="With --engine ray: the cluster's address; auto finds it; without it, this machine alone.",
        rich_help_panel=ADVANCED,
    ),
]


def overrides(
    epochs: int | None, lr: float | None, memory: str | None, set_: list[str] | None, **more: str | None
) -> dict[str, Any]:
    """The method's options as given on the command line; those that were not given are left out."""
    size = int(memory) if memory is not None and memory.isdecimal() else memory
    named = {"epochs": epochs, "lr": lr, "memory": size}
    return {name: value for name, value in (named | more).items() if value is not None} | assignments(set_ or [])


def check_settings(settings: Iterable[dict[str, Any]]) -> None:
    """Refuse options, values and encoders of runs that do not exist, before torch is imported."""
    method_outlines()
    spec = outline("tpl.bench.spec").RunSpec
    for each in settings:
        run = spec(**each)
        run.all_options()
        run.check_encoder()


def assignments(texts: list[str]) -> dict[str, str]:
    """`NAME=VALUE` texts as a dict."""
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise TplError(f"--set takes NAME=VALUE; got '{name}'.")
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def class_orders(text: str, to_run: bool = True) -> list[str]:
    """`natural,random:1` as a list of different class orders; `to_run`: each must be one that can be made here."""
    found = names(text, "Class orders", "natural,random:1")
    for order in found if to_run else ():
        outline("tpl.stream.task").check_order(order)
    return found


def method_names(text: str) -> list[str]:
    """`tpl,more` as a list of different, known methods."""
    from tpl.names import method_names as known_names
    from tpl.names import refuse_unknown

    found = names(text, "Methods", "tpl,more")
    for name in found:
        refuse_unknown("method", name, known_names())
    return found


def separate(text: str) -> list[str]:
    """The non-empty parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names(text: str, what: str, example: str) -> list[str]:
    """Different names, separated by commas; `what` and `example` are for the error message."""
    found = separate(text)
    if not found or len(set(found)) < len(found):
        raise TplError(f"{what} are joined by commas, each named once, such as {example}.")
    return found


def trackers(texts: list[str] | None) -> list[str]:
    """`tensorboard:DIR` and the like, without repeats; local paths become absolute, since workers may run elsewhere."""
    found = []
    for text in dict.fromkeys(texts or []):
        name, _, where = text.partition(":")
        local = where and name != "wandb" and "://" not in where
        found.append(f"{name}:{at_home(where).absolute()}" if local else text)
    return found


def class_sizes(text: str | None) -> int | tuple[int, ...] | None:
    """`5` or `10,2,3` as numbers of classes per task."""
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TplError(f"--per-task takes a number or numbers joined by commas; got '{text}'.") from None
    return sizes if len(sizes) > 1 else sizes[0]


def check_folder_of(file: Path) -> None:
    """Refuse to write a file into a folder that does not exist: its name may be a typing error."""
    if not file.parent.is_dir():
        raise TplError(f"{file} cannot be written: there is no folder {file.parent}; make it first.")


def may_exist(name: str) -> bool:
    """Whether a given path leads somewhere, or to an error that only opening it can tell; stdin may."""
    try:
        return name == "-" or at_home(name).exists()
    except (OSError, ValueError):  # no permission to look, a name too long, a NUL inside
        return True
