"""What may come in: bodies, as long as they may be, and as many sequences as there are places."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from osd.config import ServingSettings
from serving.http.errors import ApiError, from_validation, invalid

_CLOSE = {"Connection": "close"}  # what is left of a body is not waited for

ARRIVING_BYTES = 32 << 20
"""Of all bodies that are arriving or being encoded: as Python's objects they take many times as much."""

AnyBody = TypeVar("AnyBody", bound=BaseModel)


async def _read(
    request: Request, schema: type[AnyBody], limits: ServingSettings, arrived: Callable[[int], None]
) -> AnyBody:
    """Read and check a JSON body; ``arrived`` is told of the bytes as they come, and may refuse them."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The body must be sent as 'content-type: application/json'.", code="unsupported_media_type")
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            data = await _receive(request, limits.max_body_bytes, arrived)
    except TimeoutError:
        message = f"The body did not arrive within {limits.body_timeout_s:g} seconds."
        raise ApiError(408, message, code="timeout", headers=_CLOSE) from None
    try:
        return schema.model_validate_json(data, context=limits)
    except ValidationError as error:
        raise from_validation(error) from None


async def _receive(request: Request, most: int, arrived: Callable[[int], None]) -> bytes:
    message = f"The body is larger than {most} bytes."
    too_large = ApiError(413, message, code="request_too_large", headers=_CLOSE)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > len(str(most)) or int(declared) > most):
        raise too_large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise too_large
        arrived(len(chunk))
    return bytes(data)


class Admission:
    """Counts the sequences of one replica, running or waiting; only used on its event loop."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    def check(self, sequences: int) -> None:
        """See that there are places, before work is done for those who take them.

        Raises:
            ApiError: 400 when the request alone is over the limit, 429 with Retry-After when there is no room now.
        """
        if sequences > self.limit:
            raise invalid(f"The request asks for {sequences} choices and this server's limit is {self.limit}.", "n")
        if self.taken + sequences > self.limit:
            raise _full(f"The queue is full: {self.taken} of {self.limit} places are taken.")

    def enter(self, sequences: int) -> None:
        """Take places.

        Raises:
            ApiError: as ``check``.
        """
        self.check(sequences)
        self.taken += sequences

    def leave(self, sequences: int) -> None:
        """Give places back."""
        self.taken -= sequences


class Arrivals:
    """Reads bodies; counts the requests whose body is on its way or whose prompt is being encoded, and their bytes.

    Only used on one replica's event loop. Without a limit, bodies that never end would take every place that Ray Serve
    has, those of ``/health`` too.
    """

    def __init__(self, settings: ServingSettings, limit: int, most_bytes: int) -> None:
        self._settings = settings
        self.limit, self.taken = limit, 0
        self.most_bytes, self.bytes = most_bytes, 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, schema: type[AnyBody]) -> AsyncGenerator[AnyBody]:
        """Read and check a JSON body, without ever holding more of it than the settings allow; counts until the end.

        Raises:
            ApiError: 429 with Retry-After when there are as many as there may be, or their bodies are too large
                together; 415 when it is not JSON by its header, 413 when it is too long, 408 when it takes too long,
                400 when it is not a valid ``schema``.
        """
        if self.taken >= self.limit:
            raise _full(f"{self.taken} requests are arriving, as many as this server takes.")
        self.taken += 1
        mine = 0

        def arrived(size: int) -> None:
            nonlocal mine
            if self.bytes + size > self.most_bytes:
                raise _full(f"{self.bytes} bytes are arriving, and this server takes {self.most_bytes} at once.")
            mine += size
            self.bytes += size

        try:
            yield await _read(request, schema, self._settings, arrived)
        finally:
            self.taken -= 1
            self.bytes -= mine


def _full(message: str) -> ApiError:
    headers = {"Retry-After": "1"}
    return ApiError(429, f"{message} Try again later.", kind="rate_limit_error", code="queue_full", headers=headers)
