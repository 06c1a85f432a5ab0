"""Record of an HTTP request for logs and traces: times, counts and names, but no text of the user."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osd.engine.lifetime import Lifetime
from osd.engine.request import FinishReason, Request, Update
from osd.metrics import SpeculationCounts
from serving.access.keys import Caller
from serving.http.paths import template_of

logger = logging.getLogger(__name__)

_STATE = "observed"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass
class ObservedSequence:
    """Sequence of a request; ``lifetime`` is None until the sequence has ended."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    lifetime: Lifetime | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    drafted: tuple[str, int] | None = None


class ObservedRequest:
    """Record of a request, complete when the response is sent and all sequences have ended.

    Attributes:
        arrived: time of arrival, in seconds of ``time.monotonic``.
        clock: time of arrival, in nanoseconds since the epoch.
        method: HTTP method.
        path: template of the path.
        request_id: value of the x-request-id header; "" without that header.
        traceparent: valid traceparent of the W3C trace context; "" without it.
        trace_id: id of the trace; "" without a trace.
        status: HTTP status of the response; None before or without a response.
        seconds: time from arrival until the whole response was sent.
        response_id: id of the response; "" until the body has been read.
        caller: sender of the request; None until the body has been read.
        sequences: sequences of the request, by their id.
    """

    def __init__(self, scope: Scope, on_complete: Callable[[ObservedRequest], None]) -> None:
        """Start the record of the request in ``scope``; ``on_complete`` is called once when it is complete."""
        headers = Headers(scope=scope)
        self.arrived, self.clock = time.monotonic(), time.time_ns()
        self.method, self.path = scope["method"], template_of(scope["path"])
        self.request_id = headers.get("x-request-id", "")
        valid = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
        self.traceparent, self.trace_id = (valid.group(), valid.group(1)) if valid else ("", "")
        self.status: int | None = None
        self.seconds = 0.0
        self.response_id = ""
        self.caller: Caller | None = None
        self.sequences: dict[str, ObservedSequence] = {}
        self._on_complete, self._pending = on_complete, 1  # the response is pending

    def identify(self, response_id: str, caller: Caller) -> None:
        """Record the id of the response and the sender, after the body has been read."""
        self.response_id, self.caller = response_id, caller

    def submitted(self, request: Request) -> None:
        """Record that a sequence was submitted to the engine."""
        self.sequences[request.id] = ObservedSequence(len(request.prompt_ids))
        self._pending += 1

    def record(self, update: Update) -> None:
        """Add the tokens of an update; the last update of a sequence also gives its times and counts."""
        sequence = self.sequences[update.request_id]
        sequence.completion_tokens += len(update.token_ids)
        if update.finish_reason is not None:
            sequence.finish, sequence.lifetime = update.finish_reason, update.lifetime
            sequence.cached_tokens, sequence.drafted = update.cached_tokens, update.drafted
            sequence.counts = update.counts or sequence.counts
            self._end_part()

    def answered(self) -> None:
        """Record the end of the response."""
        self.seconds = time.monotonic() - self.arrived
        self._end_part()

    def _end_part(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._on_complete(self)


def observed_of(request: HttpRequest) -> ObservedRequest:
    """Return the record that ``Observing`` stored in the request."""
    return getattr(request.state, _STATE)


Observer = Callable[[ObservedRequest], None]
"""Function that is called with each complete record, on the event loop; it must not block."""


class Observing:
    """ASGI middleware that creates the record of each request and calls all ``observers`` when it is complete."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self.app, self._observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a new record in the state of the scope."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        observed = ObservedRequest(scope, self._notify)
        state = {**scope.get("state", {}), _STATE: observed}
        try:
            await self.app({**scope, "state": state}, receive, partial(_send_recorded, observed, send))
        finally:
            observed.answered()

    def _notify(self, observed: ObservedRequest) -> None:
        for observer in self._observers:
            try:
                observer(observed)
            except Exception:  # telemetry must not fail the request
                logger.exception("the log line or the trace of a request failed")


async def _send_recorded(observed: ObservedRequest, send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        observed.status = message["status"]
    await send(message)


def log_request(observed: ObservedRequest) -> None:
    """Log a request with its result; successful GET and HEAD requests are not logged."""
    is_read = observed.method in ("GET", "HEAD") and (observed.status or 0) < 400
    if is_read or not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "method": observed.method,
        "path": observed.path,
        "status": observed.status,
        "seconds": round(observed.seconds, 6),
        "request_id": observed.request_id,
    }
    if observed.trace_id:
        fields["trace_id"] = observed.trace_id
    if observed.caller is not None:
        key = observed.caller.key
        fields |= {"response_id": observed.response_id, "key_name": key.name if key else None}
        fields["tenant"] = observed.caller.tenant
    if observed.sequences:
        fields |= _figures([*observed.sequences.values()])
    message = "%s %s answered with %s"
    arguments = (observed.method, observed.path, observed.status)
    logger.info(message, *arguments, extra={"event": "request", "fields": fields})


def _figures(sequences: list[ObservedSequence]) -> dict[str, Any]:
    """Return the tokens and drafts of all sequences, and the longest queue, first-token and decoding times."""
    counts = SpeculationCounts.sum(sequence.counts for sequence in sequences)
    drafted = next((sequence.drafted for sequence in sequences if sequence.drafted is not None), None)
    lifetimes = [sequence.lifetime for sequence in sequences if sequence.lifetime is not None]
    return {
        "sequences": len(sequences),
        "finish_reasons": [sequence.finish for sequence in sequences],
        "prompt_tokens": sum(sequence.prompt_tokens for sequence in sequences),
        "cached_tokens": sum(sequence.cached_tokens for sequence in sequences),
        "completion_tokens": sum(sequence.completion_tokens for sequence in sequences),
        "queue_seconds": _longest((life.queued, life.began) for life in lifetimes),
        "first_token_seconds": _longest((life.arrived, life.first) for life in lifetimes),
        "decode_seconds": _longest((life.first, life.last) for life in lifetimes),
        "rounds": counts.rounds,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "domain": None if drafted is None else drafted[0],
        "version": None if drafted is None else drafted[1],
    }


def _longest(times: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Return the longest interval in seconds, given pairs of begin and end; None if no interval has ended."""
    seconds = [end - begin for begin, end in times if begin is not None and end is not None]
    return round(max(seconds), 6) if seconds else None
