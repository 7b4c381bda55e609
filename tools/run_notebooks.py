"""Run the notebooks in order of their cells, without Jupyter, and store what they show.

python tools/run_notebooks.py              # all of notebooks/, in place; two minutes on one core
python tools/run_notebooks.py photos       # one of them

Every notebook starts in its own folder with nothing defined, as "Restart and run all" does. A cell shows what it
prints, its pictures, and the value of its last line. A line `!command` runs a command, as in Jupyter.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
SOURCES = FOLDER.parent / "src"
COLUMNS = "100"  # of a terminal, for commands
DPI, COLOURS = 96, 64  # of pictures
COMMAND = re.compile(r"^!(.+)$", re.MULTILINE)

Cell = dict[str, Any]
Output = dict[str, Any]


def run(notebook: dict[str, Any], folder: Path) -> list[list[Output]]:
    """Execute every code cell; the outputs of each."""
    found = []
    with _session(folder) as module:
        for number, cell in enumerate(code_cells(notebook), start=1):
            try:
                found.append(run_cell(source_of(cell), module, number))
            except Exception as error:
                error.add_note(f"in code cell {number}, which begins: {source_of(cell)[:80]!r}")
                raise
    return found


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    """The cells that can be executed."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_of(cell: Cell) -> str:
    """The text of a cell, which a file stores as one string or as lines."""
    return "".join(cell["source"])


def run_cell(source: str, module: types.ModuleType, number: int) -> list[Output]:
    """Execute one cell; what it printed, drew and returned."""
    tree = ast.parse(COMMAND.sub(_as_call, source))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {number}>", "exec"), module.__dict__)
        value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), module.__dict__) if last else None
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs + [_picture(png) for png in _figures()]


def store(notebook: dict[str, Any], outputs: list[list[Output]]) -> str:
    """The notebook as text, with these outputs; the same text for the same outputs."""
    for number, (cell, found) in enumerate(zip(code_cells(notebook), outputs, strict=True), start=1):
        cell["execution_count"], cell["outputs"] = number, found
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def _session(folder: Path) -> Iterator[types.ModuleType]:
    """A module to run in, the notebook's folder as the working directory, and figures that no window shows."""
    import matplotlib as mpl

    module, before, backend = types.ModuleType("notebook_session"), Path.cwd(), mpl.get_backend()
    module.__dict__["_run_command"] = _run_command
    sys.modules[module.__name__] = module  # dataclasses look for the module they were made in
    os.chdir(folder)
    mpl.use("agg")
    try:
        yield module
    finally:
        os.chdir(before)
        del sys.modules[module.__name__]
        mpl.use(backend)


def _as_call(line: re.Match[str]) -> str:
    return f"_run_command({line[1]!r})"


def _run_command(command: str) -> None:
    """Run a command with this Python's `tpl`; both of its outputs are printed."""
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": SOURCES}
    own = {name: os.pathsep.join([str(path), os.environ.get(name, "")]) for name, path in paths.items()}
    environment = os.environ | own | {"COLUMNS": COLUMNS, "NO_COLOR": "1"}
    command = re.sub(r"^tpl\b", f"'{sys.executable}' -m tpl", command)
    done = subprocess.run(
        command, shell=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    print("\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines()))


def _figures() -> Iterator[bytes]:
    """Every open figure as a small PNG file; afterwards none is open."""
    from matplotlib import pyplot as plt
    from PIL import Image

    for number in plt.get_fignums():
        drawn, file = io.BytesIO(), io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", dpi=DPI, bbox_inches="tight")
        Image.open(drawn).convert("RGB").quantize(COLOURS).save(file, "png", optimize=True)
        yield file.getvalue()
    plt.close("all")


def _picture(png: bytes) -> Output:
    data = {"image/png": base64.b64encode(png).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def main() -> None:
    """Run the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks without .ipynb; all by default")
    names = parser.parse_args().names
    for file in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(store(notebook, run(notebook, file.parent)), encoding="utf-8")
        print(f"{file.name}: {len(code_cells(notebook))} cells run, {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
