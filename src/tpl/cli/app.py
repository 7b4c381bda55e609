"""What all commands share: the app, the consoles, and how errors end.

torch, timm and matplotlib take seconds to import. Each command imports what it needs inside its function, so that
`tpl --help` and mistakes in arguments are answered at once.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.markup import escape
from rich.segment import Segment

from tpl import program
from tpl._version import __version__
from tpl.errors import TplError
from tpl.lines import printable

app = typer.Typer(
    name="tpl",
    help="Image classifiers that keep learning: new classes arrive task by task, without the images of old ones.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Visible(RenderHook):
    """Shows unprintable characters of what is printed as escapes: a class name may hold commands to a terminal."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """The same content, cleaned when it is rendered."""
        return [_Cleaned(renderable) for renderable in renderables]


class _Cleaned:
    def __init__(self, content: ConsoleRenderable) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            text, style, control = segment
            shown = (
                text if control else "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
            )
            yield Segment(shown, style, control)


out = Console()
err = Console(stderr=True)
for _console in (out, err):
    _console.push_render_hook(_Visible())

# Panels of `tpl --help`
MODELS, EXPERIMENTS, REFERENCE = "Models", "Experiments", "Reference"


@app.callback(invoke_without_command=True)
def _version(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit
    if context.invoked_subcommand != "run" and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise TplError("torchrun has started several processes; of all commands, only `tpl run` can use them.")


def print_json(content: Any) -> None:
    """Print `content` as JSON on stdout."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection: modules stay for good, and a search among torch's takes a while."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: an interrupted import can fail in any way or leave half a module."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _at_hand(arguments: Sequence[str]) -> typer.Typer:
    """The app with the named command alone, if there is one: all of them take a tenth of a second to build."""
    named = [
        command
        for command in app.registered_commands
        if command.callback is not None and [command.name or command.callback.__name__] == list(arguments[:1])
    ]
    if not named:
        return app
    alone = copy(app)
    alone.registered_commands = named
    return alone


def main() -> None:
    """Run the command line; an error that the user can mend becomes one line and exit code 2."""
    program.claim()
    try:
        _at_hand(sys.argv[1:])()
    except TplError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("Interrupted.")
        sys.exit(130)
