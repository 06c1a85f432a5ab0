from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from osd.traffic import SOURCES, load
from osd.traffic.open_loop import Load, Tally, replay
from osd.traffic.prompt import Prompt, TrafficError, split
from tests.waiting import HANG_SECONDS

GOOD = {"id": "a", "domain": "math", "messages": [{"role": "user", "content": "1+1?"}]}


@pytest.fixture(scope="module")
def stdlib() -> list[Prompt]:
    return load("stdlib")


def test_stdlib_source_has_at_least_1500_distinct_prompts(stdlib):
    assert len({prompt.turns for prompt in stdlib}) >= 1500
    assert len({prompt.id for prompt in stdlib}) == len(stdlib)
    assert all("def " in prompt.turns[0] and len(prompt.turns[0]) < 800 for prompt in stdlib)


def test_pydoc_source_has_at_least_300_distinct_prompts():
    prompts = load("pydoc")
    assert len({prompt.turns for prompt in prompts}) == len(prompts) >= 300


@pytest.mark.parametrize("source", SOURCES)
def test_source_order_is_deterministic(source):
    assert load(source) == load(source)


def test_stdlib_order_separates_neighbours(stdlib):
    modules = [prompt.id.split(".")[0] for prompt in stdlib]
    repeats = sum(module == following for module, following in itertools.pairwise(modules))
    assert repeats < len(modules) / 5


def test_split_depends_only_on_each_prompt(stdlib):
    send, hold = split(stdlib, 0.1)
    assert {prompt.turns for prompt in send}.isdisjoint(prompt.turns for prompt in hold)
    assert len(send) + len(hold) == len(stdlib)
    assert 0.07 < len(hold) / len(stdlib) < 0.13
    again, _ = split(stdlib[::-3], 0.1)
    assert {prompt.turns for prompt in again} <= {prompt.turns for prompt in send}


def test_json_lines_file_is_read_in_order(tmp_path):
    second = {"id": "b", "domain": "chat", "messages": [{"role": "system", "content": "Be brief."}]}
    second["messages"] += [{"role": "user", "content": "one\u2028two"}, {"role": "user", "content": "and?"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in (GOOD, second)) + "\n\n")
    assert load(str(file)) == [
        Prompt("a", "math", ("1+1?",)),
        Prompt("b", "chat", ("one\u2028two", "and?"), "Be brief."),
    ]


@pytest.mark.parametrize(("line", "field"), [
    ("{", "not JSON"),
    ("[]", "object"),
    (json.dumps({**GOOD, "id": 3}), "field id"),
    (json.dumps({**GOOD, "domain": ""}), "field domain"),
    (json.dumps({**GOOD, "messages": []}), "field messages"),
    (json.dumps({**GOOD, "messages": ["hello"]}), "messages[0]"),
    (json.dumps({**GOOD, "messages": [{"role": "assistant", "content": "x"}]}), "messages[0].role"),
    (json.dumps({**GOOD, "messages": [{"role": "user", "content": [1]}]}), "messages[0].content"),
    (json.dumps({**GOOD, "messages": [{"role": "system", "content": "x"}]}), "no user message"),
    (json.dumps({**GOOD, "messages": [*GOOD["messages"], {"role": "system", "content": "x"}]}), "messages[1]"),
])  # fmt: skip
def test_bad_line_is_refused_with_number_and_field(tmp_path, line, field):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(TrafficError, match=re.escape(field)) as caught:
        load(str(file))
    assert "line 3" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("empty", "no prompt"), ("binary", "UTF-8"), ("missing", "nor one of unittest, stdlib")):
        with pytest.raises(TrafficError, match=reason):
            load(str(tmp_path / name))


Answer = Callable[[dict], Awaitable[str]]


def stream(*events: dict | str) -> str:
    body = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{body}"


def chunk(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}


@asynccontextmanager
async def service(answer: Answer) -> AsyncIterator[str]:
    """Serve just enough HTTP to answer each request with the result of ``answer``."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        body = json.loads(await reader.readexactly(int(length[1]) if length else 0))
        writer.write((await answer(body)).encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def run(answer: Answer, prompts: list[Prompt], load: Load, **options) -> Tally:
    async def session() -> Tally:
        async with service(answer) as url:
            return await asyncio.wait_for(replay(prompts, url, load, **options), HANG_SECONDS)

    return asyncio.run(session())


PROMPTS = [Prompt(str(number), "test", (f"question {number}",)) for number in range(6)]


def test_arrivals_do_not_wait_for_answers():
    waiting: list[dict] = []

    async def answer(body: dict) -> str:
        waiting.append(body)
        while len(waiting) < len(PROMPTS):  # a closed-loop client would wait for ever
            await asyncio.sleep(0.01)
        return stream(chunk("yes", "stop"), USAGE, "[DONE]")

    seen: list[int] = []
    tally = run(answer, PROMPTS, Load(rate=100), on_change=lambda tally: seen.append(tally.in_flight))
    assert (tally.sent, tally.finished, tally.failed, tally.tokens) == (6, 6, 0, 42)
    assert max(seen) == 6
    assert seen[-1] == tally.in_flight == 0
    assert len(tally.latency) == len(tally.first_token) == 6


def test_converse_sends_each_turn_after_the_last_answer():
    bodies: list[dict] = []

    async def answer(body: dict) -> str:
        bodies.append(body)
        return stream(chunk("4"), chunk("2", "stop"), USAGE)

    tally = run(answer, [Prompt("x", "test", ("one", "two"), "Be brief.")], Load(rate=100, max_tokens=9))
    assert tally.sent == tally.finished == 2
    assert [message["content"] for message in bodies[1]["messages"]] == ["Be brief.", "one", "42", "two"]
    assert bodies[0]["max_tokens"] == 9


@pytest.mark.parametrize(("response", "reason"), [
    ("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "HTTP 503"),
    (stream(chunk("half")), "ended before"),
    (stream(chunk("all", "stop")), "ended before"),
    (stream({"error": {"message": "broken"}}), "broken"),
    (stream("{"), "protocol"),
])  # fmt: skip
def test_incomplete_answer_counts_as_failed(response, reason):
    async def answer(body: dict) -> str:
        return response

    tally = run(answer, PROMPTS, Load(rate=1000, limit=2))
    assert (tally.sent, tally.failed, tally.finished, tally.tokens) == (2, 2, 0, 0)
    assert all(reason in error for error in tally.errors)


def test_unreachable_service_counts_as_failed():
    tally = asyncio.run(replay(PROMPTS, "http://127.0.0.1:1", Load(rate=1000)))
    assert (tally.sent, tally.failed) == (6, 6)
