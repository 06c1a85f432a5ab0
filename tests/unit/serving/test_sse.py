from __future__ import annotations

import pytest

from serving.http.errors import stopping
from serving.http.sse import MEDIA_TYPE, Reply

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", MEDIA_TYPE.encode())]}


def body(data, more_body=False):
    return {"type": "http.response.body", "body": data, "more_body": more_body}


@pytest.fixture
def sent():
    """Messages that the server received."""
    return []


@pytest.fixture
def reply(sent):
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    return Reply({"type": "http"}, receive, send)


async def test_ended_reply_sends_no_message_and_no_error(reply, sent):
    for message in (START, body(b"data: 1\n\n", True), body(b"data: [DONE]\n\n")):
        await reply.send(message)
    whole = list(sent)
    await reply.send(body(b"late"))
    await reply.fail(stopping())
    assert sent == whole == [START, body(b"data: 1\n\n", True), body(b"data: [DONE]\n\n")]


@pytest.mark.parametrize("begins", [False, True])
async def test_failed_reply_sends_no_message_and_no_second_error(reply, sent, begins):
    for message in (START, body(b"data: 1\n\n", True)) if begins else ():
        await reply.send(message)
    await reply.fail(stopping())
    whole = list(sent)
    assert whole[0]["status"] == (200 if begins else 503)
    await reply.send(START)
    await reply.send(body(b"late"))
    await reply.fail(stopping())
    assert sent == whole
