"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from osd.suggestions import nearest

logger = logging.getLogger(__name__)


_MESSAGES = {
    404: "This path does not exist.",
    408: "The request took too long.",
    500: "The server failed; its log says why.",
    503: "The server cannot take this request now. Try again later.",
}


class Disconnected(Exception):
    """Disconnect of the client, after which the request needs no further work."""


class ApiError(Exception):
    """Error that becomes the status and the body of the response; a 503 always has Retry-After.

    The message never contains text of the user, except names of fields.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        given = {name.lower(): value for name, value in (headers or {}).items()}
        self.status, self.headers = status, {"retry-after": "1", **given} if status == 503 else given
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """Return the response with the status, the headers and the body of the error."""
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """Return a 400 error for the value of the field ``param``."""
    return ApiError(400, message, param=param, code=code)


def of_status(status: int, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return the general error of an HTTP status."""
    message = _MESSAGES.get(status, "The request was refused.")
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(status, message, kind=kind, headers=headers)


def stopping() -> ApiError:
    """Return the 503 error of a replica that is shutting down."""
    return ApiError(503, "The server is stopping.", kind="server_error", headers={"Retry-After": "5"})


def from_validation(error: ValidationError) -> ApiError:
    """Return a 400 error that names the first invalid field, without its value."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", code="invalid_json")
    if kind == "unknown_field":
        return _unknown(first["loc"], **context)
    param = context.get("param") or _path(first["loc"])
    if kind in ("too_many", "no_such"):
        return invalid(first["msg"], param)
    if kind == "unsupported":
        return invalid(first["msg"], param, "unsupported_parameter")
    if kind == "missing":
        return invalid(f"'{param}' is required.", param, "missing_required_parameter")
    if not param:
        return ApiError(400, "The body must be a JSON object.", code="invalid_type")
    text = first["msg"].removeprefix("Value error, ")
    return invalid(f"'{param}': {text[:1].lower()}{text[1:]}.", param)


def _unknown(location: tuple[int | str, ...], field: str, known: Sequence[str]) -> ApiError:
    """Return the error for an unknown field of the object at ``location``, with the most similar known field."""
    param, near = _path((*location, field)), nearest(field, known)
    end = "." if near is None else f"; did you mean '{_path((*location, near))}'?"
    return invalid(f"'{param}' is not supported{end}", param, "unsupported_parameter")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        # A field name is text of the user: keep it printable and short.
        path += f"[{part}]" if isinstance(part, int) else "." * bool(path) + ascii(part)[1:-1][:64]
    return path


def empty_app() -> FastAPI:
    """Return an application without routes, which answers every error in OpenAI's format."""
    app = FastAPI(title="osd", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ApiError)
    async def handle_api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def handle_http_error(_: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 405:
            return ApiError(405, "This method is not allowed on this path.", headers=error.headers).response()
        return of_status(error.status_code, error.headers).response()

    @app.exception_handler(ClientDisconnect)
    async def handle_disconnect(_: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # for the log; the client is gone

    @app.exception_handler(Exception)
    async def handle_failure(_: Request, error: Exception) -> JSONResponse:
        logger.error("request failed", exc_info=error)
        return of_status(500).response()

    return app
