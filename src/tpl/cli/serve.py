"""The command that serves a model over HTTP: serve."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tpl.cli.app import MODELS, app, err, out, print_json
from tpl.cli.options import TRAINING, AsJson, Device, Model, Precision, Weights
from tpl.errors import TplError

LIMITS = "Limits"
NEEDED = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


@app.command(rich_help_panel=MODELS)
def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; if others can reach it, every request needs the token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token; without it TPL_TOKEN is used, or else a new token is printed."),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse requests to learn.")] = False,
    examples: Annotated[bool, typer.Option(help="Show stored training images.")] = True,
    label_studio: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Also be an ML backend, at /label-studio, for the Label Studio at this address; its access token is "
            "read from LABEL_STUDIO_API_KEY.",
        ),
    ] = None,
    max_upload: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.", rich_help_panel=LIMITS)] = 256,
    max_pixels: Annotated[
        float, typer.Option(min=0.01, help="Largest image, in million pixels.", rich_help_panel=LIMITS)
    ] = 50.0,
    max_files: Annotated[int, typer.Option(min=1, help="Most images per request.", rich_help_panel=LIMITS)] = 64,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs for a new task; by default as `tpl learn` chooses.", rich_help_panel=TRAINING),
    ] = None,
    weights: Weights = None,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Serve a model over HTTP, with a web page; new classes can be added while it runs. Ready in a few seconds.

    Open the address it prints, or send images: `curl -F files=@cat.jpg http://127.0.0.1:8000/predict`. New classes come
    as a zip of class folders: `curl -H "Authorization: Bearer TOKEN" -F file=@birds.zip http://127.0.0.1:8000/tasks`.
    They are learned in the background and stored in MODEL; until then the old model answers. Ctrl-C stops it.

    Examples:

    `tpl serve model`

    `tpl serve model --port 9000 --read-only`

    `TPL_TOKEN=$(cat token) tpl serve model --host 0.0.0.0`

    `tpl serve model --label-studio http://localhost:8080`
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise TplError(f"`tpl serve` needs {', '.join(missing)}; install with: pip install 'tpl-cil[serve]'")
    from tpl.serve.app import address_of, bind
    from tpl.serve.app import serve as run_server
    from tpl.serve.label_studio import LabelStudio
    from tpl.serve.model import ModelSource
    from tpl.serve.security import Access, find_token, is_loopback
    from tpl.serve.server import Settings
    from tpl.serve.uploads import MIB, Limits

    open_to_others = not is_loopback(host)
    token, is_new = find_token(token_file)
    hosts = () if open_to_others else ("127.0.0.1", "localhost", "::1", host.lower())
    studio = LabelStudio.at(label_studio) if label_studio is not None else None
    limits = Limits(upload=max_upload * MIB, pixels=int(max_pixels * 1e6), files=max_files)
    settings = Settings(Access(token, open_to_others, hosts), limits, read_only, examples, studio)
    needed = open_to_others or not read_only

    with bind(host, port) as listening:
        address = address_of(listening)

        def announce() -> None:
            shown = token if is_new and needed else None
            if as_json:
                print_json({"url": address, "token": shown, "model": str(model)})
                return
            fragment = f"/#token={shown}" if shown else ""
            out.print(f"[bold]{address}{fragment}[/]", soft_wrap=True, highlight=False)
            if shown:
                purpose = "for every request" if open_to_others else "for changes"
                out.print(f"Token, {purpose}: {shown}", soft_wrap=True, highlight=False)
            if open_to_others:
                err.print("The connection is not encrypted: put a proxy with TLS in front where others can listen.")
            out.print("Ctrl-C stops it.", highlight=False)

        run_server(ModelSource(model, device, precision, weights, epochs), settings, listening, announce)
