"""Consent on its way from a request's body to the workers of vLLM."""

from __future__ import annotations

import asyncio
import contextvars
import json
from types import SimpleNamespace
from typing import Any

import pytest

from osd.vllm.consent import LARGEST, carry, observed


class Engine:
    """Fake of vLLM's client of its engine, which keeps the fields of each request."""

    def __init__(self) -> None:
        self.extra: list[Any] = []

    async def add_request(self, request_id: str, prompt: Any, params: Any, priority: int = 0) -> str:
        self.extra.append(getattr(params, "extra_args", "none"))
        return request_id


def sent(
    body: Any,
    path: str = "/v1/chat/completions",
    *,
    request_id: str = "chatcmpl-x",
    n: int = 1,
    default: bool = True,
    extra: dict[str, Any] | None = None,
    parts: int = 1,
) -> dict[str, Any]:
    """Send a body through the middleware's part and the wrap, and return the fields that reach a worker."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    step = -(-len(data) // parts) or 1
    chunks = [data[start : start + step] for start in range(0, len(data), step)] or [b""]
    messages = [{"type": "http.request", "body": part, "more_body": part is not chunks[-1]} for part in chunks]
    engine = Engine()
    carry(engine)

    async def handle() -> None:
        async def receive() -> Any:
            return messages.pop(0)

        receiving = observed(path, receive, default)
        seen = b""
        while messages:
            seen += (await receiving())["body"]
        assert seen == data
        params = SimpleNamespace(extra_args=extra, n=n)
        task = asyncio.ensure_future(engine.add_request(request_id, [1], params, priority=1))  # like a stream
        assert await task == request_id

    contextvars.copy_context().run(asyncio.run, handle())
    return engine.extra[0]


def test_request_may_be_captured_by_default():
    assert sent({"messages": []}, parts=3) == {
        "osd_store": True, "osd_domain": "", "osd_id": "chatcmpl-x", "osd_place": 0, "osd_choices": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("body", "default", "store"), [
    ({"store": False}, True, False),
    ({"store": None}, True, True),
    ({"store": None}, False, False),
    ({}, False, False),
    ({"store": True}, False, True),
    ({"store": "yes"}, True, False),
    ({"use_beam_search": True}, True, False),
    ({"osd": {"domain": 5}}, True, False),
    (b'{"store": true, "store": false}', True, False),
    (b"", True, False),
    (b"no json", True, False),
    (b'{"store": true, "x": ' + b"[" * 101 + b"]" * 101 + b"}", True, False),
    ('{"store": true}'.encode("utf-16"), True, False),
    (b'{"store": true, "x": "' + b"a" * LARGEST + b'"}', True, False),
])  # fmt: skip
def test_store_of_the_body_decides(body, default, store):
    fields = sent(body, default=default, parts=2)
    assert fields["osd_store"] is store
    assert store or fields == {"osd_store": False}


def test_domain_comes_from_the_body():
    assert sent({"osd": {"domain": "sql", "speculate": True}})["osd_domain"] == "sql"


def test_fields_of_a_client_cannot_forge_consent():
    forged = {"osd_store": True, "osd_domain": "x", "osd_id": "y", "osd_any": 1, "mine": 2}
    assert sent({"store": False}, extra=forged) == {"mine": 2, "osd_store": False}
    assert sent({"store": True}, extra=forged)["osd_id"] == "chatcmpl-x"


@pytest.mark.parametrize(("path", "request_id", "expected"), [
    ("/v1/completions", "cmpl-x-1-2", ("cmpl-x-1", 6)),
    ("/gateway/v1/completions", "cmpl-x-0", ("cmpl-x", 0)),
    ("/v1/responses", "resp_x_1", ("resp_x", 3)),
    ("/v1/chat/completions", "chatcmpl-x-1", ("chatcmpl-x-1", 0)),
    ("/v1/messages", "chatcmpl-x_1", ("chatcmpl-x_1", 0)),
])  # fmt: skip
def test_id_of_the_response_follows_from_the_path(path, request_id, expected):
    fields = sent({}, path, request_id=request_id, n=3)
    assert (fields["osd_id"], fields["osd_place"]) == expected
    assert fields["osd_choices"] == 3


def test_request_outside_of_http_has_no_consent():
    engine = Engine()
    carry(engine)
    params = SimpleNamespace(extra_args={"osd_store": True}, n=1)
    asyncio.run(engine.add_request("a", [1], params))
    assert engine.extra == [{"osd_store": False}]


def test_consent_does_not_leak_into_the_next_request():
    async def handle() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        await observed("/v1/completions", receive, default=True)()
        observed("/v1/completions", receive, default=True)  # its body is not complete
        await engine.add_request("cmpl-b-0", [1], SimpleNamespace(extra_args=None, n=1))

    engine = Engine()
    carry(engine)
    asyncio.run(handle())
    assert engine.extra == [{"osd_store": False}]


def test_pooling_request_stays_as_it_is():
    engine = Engine()
    carry(engine)
    asyncio.run(engine.add_request("a", [1], SimpleNamespace()))
    assert engine.extra == ["none"]


def test_engine_of_another_version_is_refused():
    class Other:
        async def add_request(self, prompt: Any, request_id: str) -> None: ...

    with pytest.raises(ValueError, match=r"^this version of vLLM adds requests in another way"):
        carry(Other())
