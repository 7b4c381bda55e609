"""Notebooks as pages: text as it is, code in blocks, and what each cell showed beneath it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def page_of(notebook: Path, download: str) -> str:
    """A notebook as Markdown; beneath its title is a link to the file."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    title, *rest = (part for cell in cells for part in _parts(cell))
    heading, _, text = title.partition("\n")
    note = f"*This page is a notebook: [{notebook.name}]({download}).*"
    return "\n\n".join([heading, note, text.strip(), *rest]) + "\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield f'<img alt="Picture drawn by the code above" src="data:image/png;base64,{data["image/png"]}">'
        else:
            yield f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"
