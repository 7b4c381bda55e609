"""The command that puts a model behind HTTP: serve."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tpl.cli.app import AsJson, Device, Model, Precision, Weights, app, err, out, print_json
from tpl.errors import TplError

NEEDED = ("fastapi", "prometheus_client", "python_multipart", "uvicorn")


@app.command()
def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine, all requests need the token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token; else TPL_TOKEN, else a new one is printed.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Learn nothing, whoever asks.")] = False,
    examples: Annotated[bool, typer.Option(help="Show stored training images to those who may ask.")] = True,
    max_upload: Annotated[int, typer.Option(min=1, help="Largest request, in MiB.")] = 256,
    max_pixels: Annotated[float, typer.Option(min=0.01, help="Largest image, in million pixels.")] = 50.0,
    max_files: Annotated[int, typer.Option(min=1, help="Most images a request.")] = 64,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over a new task's images; by default as `tpl learn` chooses.")
    ] = None,
    weights: Weights = None,
    device: Device = "auto",
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer over HTTP, with a page for people, and learn new classes meanwhile. Ready in a few seconds.

    Open the address it prints, or send images: `curl -F files=@cat.jpg http://127.0.0.1:8000/predict`. New classes come
    as a zip of class folders: `curl -H "Authorization: Bearer TOKEN" -F file=@birds.zip http://127.0.0.1:8000/tasks`.
    They are learned in the background and committed to MODEL; until then the old model answers. Ctrl-C stops it.

    Examples:

    `tpl serve model`

    `tpl serve model --port 9000 --read-only`

    `TPL_TOKEN=$(cat token) tpl serve model --host 0.0.0.0`
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise TplError(f"`tpl serve` needs {', '.join(missing)}; install with: pip install 'tpl-cil[serve]'")
    from tpl.serve.app import address_of, bind
    from tpl.serve.app import serve as run_server
    from tpl.serve.model import ModelSource
    from tpl.serve.security import Access, find_token, is_loopback
    from tpl.serve.server import Settings
    from tpl.serve.uploads import MIB, Limits

    open_to_others = not is_loopback(host)
    token, is_new = find_token(token_file)
    hosts = () if open_to_others else ("127.0.0.1", "localhost", "::1", host.lower())
    limits = Limits(upload=max_upload * MIB, pixels=int(max_pixels * 1e6), files=max_files)
    settings = Settings(Access(token, open_to_others, hosts), limits, read_only, examples)
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
                purpose = "for every request" if open_to_others else "for adding classes"
                out.print(f"Token, {purpose}: {shown}", soft_wrap=True, highlight=False)
            if open_to_others:
                err.print("The connection is not encrypted: put a proxy with TLS in front where others can listen.")
            out.print("Ctrl-C stops it.", highlight=False)

        run_server(ModelSource(model, device, precision, weights, epochs), settings, listening, announce)
