"""One HTTP request as logs and traces tell of it: moments, counts and names, and nothing that its user wrote."""

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
    """One sequence of a request; the lifetime is None until it has ended."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    lifetime: Lifetime | None = None
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    drafted: tuple[str, int] | None = None


class ObservedRequest:
    """A request from its arrival until it is answered and all its sequences have ended, when ``told`` hears of it.

    Attributes:
        arrived: seconds of ``time.monotonic``, and ``clock`` the nanoseconds of the epoch then.
        method, path: how it came; the path is a template.
        request_id: the id that goes back to the client as x-request-id, "" without one.
        traceparent: of the W3C's trace context, "" without one that is valid.
        trace_id: of the trace that it belongs to, "" for none.
        status: of the answer, None before it, and where there was none.
        seconds: from its arrival until all of the answer was sent.
        response_id, caller: who was answered with what, once it has been read.
        sequences: what the engine did for it, by the id of the sequence.
    """

    def __init__(self, scope: Scope, told: Callable[[ObservedRequest], None]) -> None:
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
        self._told, self._open = told, 1

    def asked(self, response_id: str, caller: Caller) -> None:
        """It has been read: this is who sent it, and what its answer is called."""
        self.response_id, self.caller = response_id, caller

    def submitted(self, request: Request) -> None:
        """The engine has taken a sequence of it."""
        self.sequences[request.id] = ObservedSequence(len(request.prompt_ids))
        self._open += 1

    def heard(self, update: Update) -> None:
        """The engine has said something of a sequence."""
        one = self.sequences[update.request_id]
        one.completion_tokens += len(update.token_ids)
        if update.finish_reason is not None:
            one.finish, one.lifetime, one.cached_tokens = update.finish_reason, update.lifetime, update.cached_tokens
            one.counts, one.drafted = update.counts or one.counts, update.drafted
            self._close()

    def answered(self) -> None:
        """All of the answer was sent that will be."""
        self.seconds = time.monotonic() - self.arrived
        self._close()

    def _close(self) -> None:
        self._open -= 1
        if not self._open:
            self._told(self)


def observed_of(request: HttpRequest) -> ObservedRequest:
    """What is observed of a request."""
    return getattr(request.state, _STATE)


Observer = Callable[[ObservedRequest], None]
"""Hears of each request once it is answered and all its sequences have ended, on the event loop; must not block."""


class Observing:
    """ASGI middleware: routes can say what they know of a request, and in the end all ``observers`` hear of it."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self.app, self._observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        observed = ObservedRequest(scope, self._tell)
        state = {**scope.get("state", {}), _STATE: observed}
        try:
            await self.app({**scope, "state": state}, receive, partial(_sent, observed, send))
        finally:
            observed.answered()

    def _tell(self, observed: ObservedRequest) -> None:
        for observer in self._observers:
            try:
                observer(observed)
            except Exception:  # what cannot be told costs nobody an answer
                logger.exception("a request cannot be told of")


async def _sent(observed: ObservedRequest, send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        observed.status = message["status"]
    await send(message)


def log_request(observed: ObservedRequest) -> None:
    """Log what became of a request; of one that only reads, and may, nobody needs to know."""
    reads = observed.method in ("GET", "HEAD") and (observed.status or 0) < 400
    if reads or not logger.isEnabledFor(logging.INFO):
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
    """Tokens and drafts of all sequences together, and the times of the one that took longest."""
    counts = SpeculationCounts.sum(one.counts for one in sequences)
    drafted = next((one.drafted for one in sequences if one.drafted is not None), None)
    lifetimes = [one.lifetime for one in sequences if one.lifetime is not None]
    return {
        "sequences": len(sequences),
        "finish_reasons": [one.finish for one in sequences],
        "prompt_tokens": sum(one.prompt_tokens for one in sequences),
        "cached_tokens": sum(one.cached_tokens for one in sequences),
        "completion_tokens": sum(one.completion_tokens for one in sequences),
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
    """The longest of some times from one moment to another, None where none of them has ended."""
    took = [end - begin for begin, end in times if begin is not None and end is not None]
    return round(max(took), 6) if took else None
