"""What all commands share: the app, the consoles, common options, and how errors end.

torch, timm and matplotlib take seconds to import. Each command loads what it needs, so that `tpl --help` and
every mistake in an argument answer at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tpl._version import __version__
from tpl.errors import TplError

app = typer.Typer(
    name="tpl",
    help="Image classifiers that keep learning: new classes arrive task by task, nothing is forgotten.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)

Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="With ray: the cluster; auto finds it; without, this machine alone."),
]
Compile = Annotated[str, typer.Option(help="auto (large images), on or off: compile the network on a GPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Data = Annotated[Path | None, typer.Option(help="Where the images are: folder, zips, or torchvision root.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...; auto takes the first GPU if there is one.")]
DataOfRun = Annotated[
    Path | None, typer.Option("--data", help="Where the images are, as in the run; needed the first time only.")
]
Download = Annotated[bool, typer.Option(help="Download the data set if it is not there.")]
EncoderName = Annotated[
    str,
    typer.Option("--encoder", help="compact (in the package), any ViT/DeiT of timm, or resnet18: from scratch."),
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory, as `tpl learn` makes it.")]
Precision = Annotated[str, typer.Option(help="auto, fp32 or bf16 (the trunk only).")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
PerTask = Annotated[str | None, typer.Option(help="Classes a task, e.g. 5, or 10,2,3 for unequal ones.")]
Tasks = Annotated[int | None, typer.Option(help="Stop after this many tasks.")]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[:WHERE]", help="Also tell tensorboard, mlflow or wandb; may be given several times."),
]
Validation = Annotated[
    float | None, typer.Option(help="Measure on this share of the training images instead of the test images.")
]
HeldOut = Annotated[
    float | None,
    typer.Option(
        help="Share of each class's training images that is not trained on, but tells how far to trust the parts of an "
        "answer, and what unknown images are; 0 by default, 0.1 in `tpl learn`."
    ),
]
Weights = Annotated[Path | None, typer.Option(help="Encoder weights: a .safetensors file or a torch state dict.")]

# Options of methods: the common ones by name, all others with --set. `overrides` puts them together.
Epochs = Annotated[int | None, typer.Option(help="Override the benchmark's epochs.")]
Rate = Annotated[float | None, typer.Option(help="Override the benchmark's learning rate.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Override the benchmark's replay memory: a number of images, or small (the paper's small one)."),
]
Latent = Annotated[int | None, typer.Option(help="Override the adapters' hidden size.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any option of `tpl describe METHOD`.")
]


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit
    if context.invoked_subcommand != "run" and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise TplError("torchrun has started several processes; of all commands, only `tpl run` can use them.")


def overrides(
    epochs: int | None, lr: float | None, memory: str | None, latent: int | None, set_: list[str] | None
) -> dict[str, Any]:
    """The method's options as given on the command line."""
    size = int(memory) if memory is not None and memory.isdecimal() else memory
    common = {"epochs": epochs, "lr": lr, "memory": size, "latent": latent}
    return {name: value for name, value in common.items() if value is not None} | assignments(set_ or [])


def assignments(texts: list[str]) -> dict[str, str]:
    """`name=value` texts as a mapping."""
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise TplError(f"--set takes NAME=VALUE; got '{name}'.")
    return {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}


def class_orders(text: str, to_run: bool = True) -> list[str]:
    """`natural,random:1` as a list of class orders, each named once, and `to_run` must be there, too."""
    found = names(text, "Class orders", "natural,random:1")
    if to_run:
        from tpl.stream import check_order

        for order in found:
            check_order(order)
    return found


def method_names(text: str) -> list[str]:
    """`tpl,more` as a list of methods, each named once and known."""
    from tpl.names import method_names as known_names
    from tpl.names import refuse_unknown

    found = names(text, "Methods", "tpl,more")
    for name in found:
        refuse_unknown("method", name, known_names())
    return found


def separate(text: str) -> list[str]:
    """What commas join."""
    return [part.strip() for part in text.split(",") if part.strip()]


def names(text: str, what: str, example: str) -> list[str]:
    """Names joined by commas, each given once; `what` they are, for the one who mistypes them."""
    found = separate(text)
    if not found or len(set(found)) < len(found):
        raise TplError(f"{what} are joined by commas, each named once, such as {example}.")
    return found


def trackers(texts: list[str] | None) -> list[str]:
    """`tensorboard:DIR` and the like, each once; a place on disk holds whatever the current folder of a worker is."""
    found = []
    for text in dict.fromkeys(texts or []):
        name, _, where = text.partition(":")
        local = where and name != "wandb" and "://" not in where
        found.append(f"{name}:{Path(where).expanduser().absolute()}" if local else text)
    return found


def class_sizes(text: str | None) -> int | tuple[int, ...] | None:
    """`5` or `10,2,3` as numbers of classes a task."""
    if text is None:
        return None
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TplError(f"--per-task takes a number or numbers joined by commas; got '{text}'.") from None
    return sizes if len(sizes) > 1 else sizes[0]


def print_json(content: Any) -> None:
    """Print `content` on stdout, for programs."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def whole() -> Iterator[None]:
    """Ctrl-C takes effect at the end. An import that is cut short may end in any error, or in half a module."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def main() -> None:
    """Run the command line: errors a person can mend become one line and exit code 2."""
    try:
        app()
    except TplError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("Interrupted.")
        sys.exit(130)
