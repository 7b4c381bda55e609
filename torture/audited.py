"""What a model does while it is loaded, served, exported and learned on, as Python's audit hook sees it.

python -m torture.audited GOOD HOSTILE    two model directories of the same kind; prints JSON

Everything is done with GOOD first, so that all imports and caches are in place. Then the same is done with HOSTILE, and
every file opened elsewhere, every process, connection and import is listed under `events`. `refused` says what was
refused with a message, `failed` what failed in any other way.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

STARTS = ("subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "os.startfile", "pty.", "ctypes.dlopen")
CONNECTS = ("socket.connect", "socket.bind", "socket.sendto", "urllib.", "http.client")


def uses(model: Path, place: Path | None) -> dict[str, Callable[[], object]]:
    """Everything that a person may do with a model from elsewhere."""
    import numpy as np
    from fastapi.testclient import TestClient
    from PIL import Image

    from tpl import Learner
    from tpl.export.file import export_onnx
    from tpl.serve.app import create_app
    from tpl.serve.model import ModelSource
    from tpl.serve.security import Access
    from tpl.serve.server import Settings
    from tpl.versions import history

    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels[0]).save(buffer, format="PNG")

    def load() -> Learner:
        return Learner.load(model, device="cpu")

    def serve() -> None:
        app = create_app(ModelSource(model, "cpu"), Settings(Access("a-token-for-the-tests")))
        with TestClient(app) as client:
            for answer in (
                client.get("/model?pictures=true"),
                client.post("/predict?examples=3&tasks=true", files={"files": buffer.getvalue()}),
            ):
                if answer.status_code >= 500:
                    raise RuntimeError(f"{answer.status_code}: {answer.text}")

    def merge() -> None:
        other = load()
        for name in other.classes_:
            other.rename(name, f"{name} of another")
        load().merge(other, estimate=True)

    found: dict[str, Callable[[], object]] = {
        "load": load,
        "update": lambda: load().update(list(pixels[:2]), [load().classes_[0]] * 2),
        "merge": merge,
        "history": lambda: history(model),
        "predict": lambda: load().answers(list(pixels)),
        "rename": lambda: load().rename(load().classes_[0], "another name"),
        "serve": serve,
        "learn": lambda: load().learn(list(pixels), ["new", "newer"] * 6),
    }
    if place is not None:
        found["export"] = lambda: export_onnx(load(), place / f"{model.name}.onnx", "fp32")
    return found


def watch(model: Path, events: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that lists what leads out of a model directory."""
    allowed = [str(model.resolve()), sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]), tempfile.gettempdir()]
    system = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/localtime", "/usr/share/zoneinfo")

    def hook(name: str, given: tuple[Any, ...]) -> None:
        if name == "open" and isinstance(given[0], (str, bytes)):
            path = str(Path(given[0].decode() if isinstance(given[0], bytes) else given[0]).absolute())
            if not path.startswith((*allowed, *system)) or "/victim" in path:
                events.append(f"open {path}")
        elif name.startswith((*STARTS, *CONNECTS)):
            events.append(name)
        elif name == "import" and not str(given[0]).startswith("encodings"):
            events.append(f"import {given[0]}")

    return hook


def main(good: Path, hostile: Path, place: Path | None) -> dict[str, Any]:
    """The events of all uses of a hostile model; it is exported only if there is a place for the file."""
    from tpl import TplError

    for use in uses(good, place).values():
        use()
    events: list[str] = []
    refused, failed = {}, {}
    planned = uses(hostile, place)
    sys.addaudithook(watch(hostile, events))
    for name, use in planned.items():
        try:
            use()
        except TplError as error:
            refused[name] = str(error)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return {"uses": list(planned), "events": sorted(set(events)), "refused": refused, "failed": failed}


if __name__ == "__main__":
    import_module("small_encoder")  # the tests' encoder: their folder is on the path

    with tempfile.TemporaryDirectory() as folder:
        found = main(Path(sys.argv[1]), Path(sys.argv[2]), Path(folder) if "--export" in sys.argv else None)
    sys.stdout.write(json.dumps(found) + "\n")
