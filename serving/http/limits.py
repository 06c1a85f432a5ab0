"""Limits on incoming requests: size of bodies, bytes in transit, and sequences per replica."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from osd.config import ServingSettings
from osd.nesting import NestingError, check_nesting
from serving.http.content_length import is_longer
from serving.http.errors import ApiError, from_validation, invalid

_CLOSE = {"Connection": "close"}  # the rest of the body is not read

ARRIVING_BYTES = 32 << 20
"""Limit on the bytes of all bodies that are being received or encoded; as Python objects they are many times larger."""

AnyBody = TypeVar("AnyBody", bound=BaseModel)


async def _read(
    request: Request, schema: type[AnyBody], limits: ServingSettings, arrived: Callable[[int], None]
) -> AnyBody:
    """Read and validate a JSON body; ``arrived`` receives the size of each chunk and may raise ``ApiError``."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "The body must be sent as 'content-type: application/json'.", code="unsupported_media_type")
    data = await read_body(request, limits, arrived)
    try:
        check_nesting(data)
        return schema.model_validate_json(data.removeprefix(codecs.BOM_UTF8), context=limits)
    except ValidationError as error:
        raise from_validation(error) from None
    except NestingError as error:
        raise ApiError(400, f"The body {error}.", code="invalid_json") from None


async def read_body(request: Request, limits: ServingSettings, arrived: Callable[[int], None]) -> bytes:
    """Return the body of a request; ``arrived`` receives the size of each chunk and may raise ``ApiError``.

    Raises:
        ApiError: status 413 if the body is too large, and 408 if it takes too long.
    """
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _receive(request, limits.max_body_bytes, arrived)
    except TimeoutError:
        message = f"The body did not arrive within {limits.body_timeout_s:g} seconds."
        raise ApiError(408, message, code="timeout", headers=_CLOSE) from None


async def _receive(request: Request, most: int, arrived: Callable[[int], None]) -> bytes:
    message = f"The body is larger than {most} bytes."
    too_large = ApiError(413, message, code="request_too_large", headers=_CLOSE)
    if is_longer(request.headers.get("content-length", ""), most):
        raise too_large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise too_large
        arrived(len(chunk))
    return bytes(data)


class Admission:
    """Count of the running and waiting sequences of a replica; use it on the replica's event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit, self.taken = limit, 0

    def check(self, sequences: int) -> None:
        """Check that ``sequences`` more sequences fit, without adding them, before work is done for them.

        Raises:
            ApiError: status 400 if the request alone exceeds the limit; 429 with Retry-After if the running and waiting
                sequences leave too little room.
        """
        if sequences > self.limit:
            raise invalid(f"The request asks for {sequences} choices and this server's limit is {self.limit}.", "n")
        if self.taken + sequences > self.limit:
            raise queue_full(f"The queue is full: {self.taken} of {self.limit} places are taken.")

    def enter(self, sequences: int) -> None:
        """Add ``sequences`` sequences.

        Raises:
            ApiError: see ``check``.
        """
        self.check(sequences)
        self.taken += sequences

    def leave(self, sequences: int) -> None:
        """Remove ``sequences`` sequences."""
        self.taken -= sequences


class ArrivingBytes:
    """Limit on the bytes of all request bodies that a replica holds before it queues them."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held = limit, 0

    @contextlib.contextmanager
    def hold(self) -> Generator[Callable[[int], None]]:
        """Yield a function that adds the size of a chunk of one body; the body counts until the context ends.

        The function raises ``ApiError`` with status 429 if too many bytes are arriving.
        """
        received = 0

        def arrived(size: int) -> None:
            nonlocal received
            if self._held + size > self._limit:
                raise queue_full(f"{self._held} bytes are arriving, and this server's limit is {self._limit}.")
            received += size
            self._held += size

        try:
            yield arrived
        finally:
            self._held -= received


class Arrivals:
    """Reader of request bodies that limits the requests being received or encoded, and their bytes.

    Use it on the replica's event loop only. Without the limit, endless bodies would occupy all requests that Ray Serve
    runs at once, including ``/health``.
    """

    def __init__(self, settings: ServingSettings, limit: int, most_bytes: int) -> None:
        self._settings, self._bytes = settings, ArrivingBytes(most_bytes)
        self.limit, self.taken = limit, 0

    @contextlib.asynccontextmanager
    async def body(
        self, request: Request, schema: type[AnyBody], max_bytes: int | None = None
    ) -> AsyncGenerator[AnyBody]:
        """Read and validate a JSON body; the request counts until the context ends.

        Never holds more bytes than the settings allow, or than ``max_bytes``.

        Raises:
            ApiError: status 429 with Retry-After if too many requests or too many bytes are arriving; 415 if the
                content type is not JSON; 413 if the body is too large; 408 if it takes too long; 400 if it does not
                match ``schema``.
        """
        if self.taken >= self.limit:
            raise queue_full(f"{self.taken} requests are arriving, which is this server's limit.")
        self.taken += 1
        limits = self._settings
        if max_bytes is not None:
            limits = limits.model_copy(update={"max_body_bytes": min(max_bytes, limits.max_body_bytes)})
        try:
            with self._bytes.hold() as arrived:
                yield await _read(request, schema, limits, arrived)
        finally:
            self.taken -= 1


def queue_full(message: str) -> ApiError:
    """Return the 429 error of a replica whose places are taken."""
    headers = {"Retry-After": "1"}
    return ApiError(429, f"{message} Try again later.", kind="rate_limit_error", code="queue_full", headers=headers)
