"""Every error is a JSON object with one line that says what to do; a traceback stays in the server's log."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tpl.errors import TplError

log = logging.getLogger("tpl.serve")


class Refusal(TplError):
    """A request that is refused, with the HTTP status that says why."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> JSONResponse:
        """The refusal as the client sees it."""
        return JSONResponse({"error": str(self)}, self.status, self.headers)


def handle_errors(app: FastAPI) -> None:
    """Answer every exception with JSON and the right status."""

    @app.exception_handler(Refusal)
    async def _refused(request: Request, error: Refusal) -> JSONResponse:
        return error.response()

    @app.exception_handler(TplError)
    async def _mendable(request: Request, error: TplError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        texts = {404: f"There is no {where}; see /docs.", 405: f"{where} is not offered; see /docs."}
        return JSONResponse(
            {"error": texts.get(error.status_code, str(error.detail))}, error.status_code, error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        parts = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors()]
        return JSONResponse({"error": "; ".join(parts)}, 422)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return JSONResponse({"error": "Something went wrong in the server; its log says what."}, 500)
