"""Errors: each is answered with a line of JSON that says what to do; tracebacks stay in the server's log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tpl.errors import TplError

log = logging.getLogger("tpl.serve")


class Refusal(TplError):
    """A refused request, with its HTTP status and headers."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """The answer to the client."""
        return JSONResponse({"error": str(self)}, self.status, self.headers)


async def _refused(request: Request, error: TplError) -> JSONResponse:
    return (error if isinstance(error, Refusal) else Refusal(409, str(error))).response()


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    where = f"{request.method} {request.url.path}"
    texts = {404: f"There is no {where}; see /docs.", 405: f"{where} is not offered; see /docs."}
    return JSONResponse({"error": texts.get(error.status_code, str(error.detail))}, error.status_code, error.headers)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
    return JSONResponse({"error": "; ".join(parts)}, 422)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse({"error": "Something went wrong in the server; its log says what."}, 500)


ERROR_HANDLERS: dict[int | type[Exception], Callable[..., Any]] = {
    TplError: _refused,
    HTTPException: _http,
    RequestValidationError: _invalid,
    Exception: _unexpected,
}
