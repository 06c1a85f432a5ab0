"""A body that travels with the head of its request, from one end to the other."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request

from serving.http.carried_body import Carried, Carrying

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "extensions": {"other": {}}}


def part(body: bytes, more: bool = False) -> dict:
    return {"type": "http.request", "body": body, "more_body": more}


class Client:
    """Sends ``messages``, each when it is let, and counts how often it was asked."""

    def __init__(self, *messages: dict) -> None:
        self.messages, self.asked, self.let = list(messages), 0, asyncio.Event()

    async def receive(self) -> dict:
        self.asked += 1
        if self.asked > 1 or not self.let.is_set():
            await self.let.wait()
        return self.messages.pop(0)


async def passed_on(client: Client) -> tuple[bytes, dict, dict]:
    """The body that an application behind both ends reads, what it receives next, and the scope between them."""
    carrying = Carrying(client.receive)
    carried = await carrying.look(SCOPE)
    found = []

    async def app(scope, receive, send):
        client.let.set()
        found.append(await Request(scope, receive).body())
        found.append(await receive())
        assert scope["extensions"]["other"] == {}

    await Carried(app)(carried, carrying.receive, None)
    carrying.close()
    return *found, carried


async def test_what_is_there_is_carried_and_not_asked_for_again():
    client = Client(part(b"all of it"), {"type": "http.disconnect"})
    client.let.set()
    body, after, carried = await passed_on(client)
    assert (body, after["type"], client.asked) == (b"all of it", "http.disconnect", 2)
    assert b"all of it" in carried["extensions"].values()


@pytest.mark.parametrize("there", [False, True])
async def test_what_comes_later_or_in_parts_is_received_as_ever(there):
    client = Client(part(b"one ", more=there), *([part(b"two")] if there else []), {"type": "http.disconnect"})
    if there:
        client.let.set()
    body, after, carried = await passed_on(client)
    assert (body, after["type"]) == (b"one two" if there else b"one ", "http.disconnect")
    assert carried is SCOPE


async def test_a_client_that_leaves_at_once_is_heard():
    client = Client({"type": "http.disconnect"})
    client.let.set()
    carrying = Carrying(client.receive)
    assert await carrying.look(SCOPE) is SCOPE
    assert (await carrying.receive())["type"] == "http.disconnect"


async def test_a_receive_that_fails_fails_where_it_is_awaited():
    async def broken():
        raise RuntimeError("the connection is gone")

    carrying = Carrying(broken)
    await carrying.look(SCOPE)
    with pytest.raises(RuntimeError, match="gone"):
        await carrying.receive()


async def test_who_receives_nothing_leaves_no_task_behind():
    before, carrying = asyncio.all_tasks(), Carrying(Client(part(b"")).receive)
    await carrying.look(SCOPE)
    carrying.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
