"""Consent of clients to capture, from the body of their request to vLLM's workers.

vLLM ignores OpenAI's field ``store`` on chats, and unknown fields such as ``osd``. So a middleware reads them from the
body while vLLM reads it, and a wrap of vLLM's client of its engine writes them where they reach the workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

import msgspec

from osd.nesting import NestingError, check_nesting

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

PREFIX = "osd_"
"""Prefix of the fields of ``SamplingParams.extra_args`` by which the server tells a worker about a request.

A client cannot set fields with this prefix.
"""

STORE, DOMAIN_NAME, RESPONSE, PLACE, CHOICES = "osd_store", "osd_domain", "osd_id", "osd_place", "osd_choices"
"""These fields: consent to capture, the domain that the client names, the id of the response, the number of choices of
earlier prompts of the response, and the number of choices of this prompt.
"""

LARGEST = 16 << 20
"""Limit on the bytes of a body that is read; a request with a larger body is not captured."""

_SEPARATORS = {"/v1/completions": "-", "/v1/responses": "_"}
"""Separator before the number of a prompt, in vLLM's ids of the parts of a response, by path."""


class _Speculation(msgspec.Struct):
    """Our field ``osd``."""

    domain: str | None = None


class _Body(msgspec.Struct):
    """Fields of a request that decide about its capture."""

    store: bool | None = None
    osd: _Speculation | None = None
    use_beam_search: bool = False


_decoder = msgspec.json.Decoder(_Body)


class Consent:
    """Consent of a request, which is known when its body is complete."""

    def __init__(self, path: str, default: bool) -> None:
        """Expect a body for ``path``; ``default`` holds for a body without ``store``."""
        self.separator = next((mark for end, mark in _SEPARATORS.items() if path.endswith(end)), None)
        self._default, self._size = default, 0
        self._parts: list[bytes] = []
        self.store, self.domain = False, ""

    def add(self, message: Message) -> None:
        """Read a message of the request's body."""
        if message["type"] != "http.request":
            return
        part = message.get("body", b"")
        self._size += len(part)
        if self._size <= LARGEST:
            self._parts.append(part)
        if not message.get("more_body", False):
            self._read(b"".join(self._parts))  # the rest of a body above the limit is missing, so it is no JSON
            self._parts = []

    def _read(self, text: bytes) -> None:
        try:
            check_nesting(text)
            body = _decoder.decode(text)
        except (NestingError, msgspec.MsgspecError, RecursionError):
            return
        self.store = (self._default if body.store is None else body.store) and not body.use_beam_search
        self.domain = (body.osd.domain if body.osd else None) or ""


_consent: ContextVar[Consent | None] = ContextVar("osd_consent", default=None)


def observed(path: str, receive: Receive, default: bool) -> Receive:
    """Return a ``receive`` that reads the consent of a request for its task and the tasks that it starts."""
    consent = Consent(path, default)
    _consent.set(consent)

    async def receiving() -> Message:
        message = await receive()
        consent.add(message)
        return message

    return receiving


def carry(engine: Any) -> None:
    """Let a client of vLLM's engine send the consent of each request to the workers.

    A request that was not observed has no consent. Fields that a client sets itself are removed.

    Raises:
        ValueError: the client of this version of vLLM is unknown.
    """
    add_request = engine.add_request
    if [*inspect.signature(add_request).parameters][:3] != ["request_id", "prompt", "params"]:
        raise ValueError("this version of vLLM adds requests in another way than capture knows: use vLLM 0.32")

    async def adding(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(params, "extra_args"):
            extra = {key: value for key, value in (params.extra_args or {}).items() if not key.startswith(PREFIX)}
            params.extra_args = {**extra, **_fields(request_id, params.n)}
        return await add_request(request_id, prompt, params, *args, **kwargs)

    engine.add_request = adding


def _fields(request_id: str, choices: int) -> dict[str, Any]:
    """Return the fields for a request of vLLM's engine with ``choices`` choices."""
    consent = _consent.get()
    if consent is None or not consent.store:
        return {STORE: False}
    response, place = request_id, 0
    if consent.separator is not None:
        name, _, number = request_id.rpartition(consent.separator)
        if name and number.isdecimal():
            response, place = name, int(number) * choices
    return {STORE: True, DOMAIN_NAME: consent.domain, RESPONSE: response, PLACE: place, CHOICES: choices}
