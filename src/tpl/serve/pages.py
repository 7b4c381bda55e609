"""The pages a browser opens: complete in themselves, under a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi.responses import HTMLResponse


def page(name: str) -> HTMLResponse:
    """One of the package's pages. Its own script and style are allowed by their hashes, nothing from elsewhere."""
    text = files("tpl.serve").joinpath(name).read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(text, 'script')}",
            f"style-src {_hashes(text, 'style')}",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _hashes(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in found)
