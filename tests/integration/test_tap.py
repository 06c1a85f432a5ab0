"""A tap in front of a real HTTP server, with a real Redis upstream_url it."""

from __future__ import annotations

import gzip
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
import redis

from osd.admin.audit import Actor
from osd.admin.purging import purge_request
from osd.capture import exchange
from osd.capture.server import RedisServer
from osd.capture.trace import FIELD
from osd.config import Settings
from osd.registry.replica_loads import ReplicaLoads
from osd.tap.agreement import AgreementError, agree
from osd.tap.app import ListenError, Tap
from osd.tap.upstream import Upstream as TapUpstream
from tests.redis_servers import free_port
from tests.upstream import CALL, MODEL, Upstream, serving
from tests.vllm_metrics import vllm_metrics
from tests.waiting import HANG_SECONDS, background

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "x-unknown": {"a": 1}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Upstream, str]]:
    upstream = Upstream()
    with serving(upstream.app) as url:
        yield upstream, url


@pytest.fixture
def upstream(server) -> Upstream:
    """The upstream server, reset to its initial state."""
    server[0].reset()
    return server[0]


@pytest.fixture
def upstream_url(server, upstream) -> str:
    return server[1]


class Running:
    """Running tap with its addresses."""

    def __init__(self, tap: Tap, settings: Settings) -> None:
        self.tap, self.settings = tap, settings
        self.url = f"http://127.0.0.1:{settings.tap.port}"

    def count(self, name: str, **labels: str) -> float:
        return self.tap.metrics.registry.get_sample_value(name, labels) or 0.0

    def chat(self, count: int = 1) -> None:
        for _ in range(count):
            assert httpx2.post(f"{self.url}/v1/chat/completions", json=CHAT).status_code == 200


@pytest.fixture
def start(tmp_path: Path, tiny_target: Path, redis_url: str, ends: ExitStack) -> Callable[..., Running]:
    def start(url: str, redis: str = redis_url, **settings) -> Running:
        ports = {"port": free_port(), "metrics_port": free_port(), **settings.pop("tap", {})}
        configured = Settings(home=tmp_path, target={"source": str(tiny_target)}, tap=ports, **settings)
        upstream = TapUpstream(url)
        tap = Tap(configured, upstream, agree(upstream, configured, None, False), redis)
        ends.enter_context(background(tap.run, tap.stop))
        return Running(tap, configured)

    return start


@pytest.fixture
def captured(redis_client: redis.Redis, eventually) -> Callable[[int], list[exchange.Exchange]]:
    def wait(count: int) -> list[exchange.Exchange]:
        eventually(lambda: redis_client.xlen("osd:tapped:domain:general") >= count)
        exchanges = [exchange.decode(fields[FIELD]) for _, fields in redis_client.xrange("osd:tapped:domain:general")]
        assert len(exchanges) == count
        return exchanges

    return wait


def raw(client: httpx2.Client, method: str, path: str, **how) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an answer as they were sent, without the date."""
    with client.stream(method, path, **how) as answer:
        body = b"".join(answer.iter_raw())
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() != b"date"]
        return answer.status_code, sorted(headers), body


def both(upstream: Upstream, direct: str, tapped: str, method: str, path: str, **how):
    """Send the same request to the upstream and to the tap, with equal response numbers; return both answers."""
    answers = []
    for url in (direct, tapped):
        upstream.number = 0
        with httpx2.Client(base_url=url) as client:
            answers.append(raw(client, method, path, **how))
    return answers


def test_answers_pass_the_tap_byte_for_byte(upstream, upstream_url, start):
    tap = start(upstream_url)
    for stream, upstream.calls_tool, encoding in itertools.product([False, True], [False, True], ["identity", "gzip"]):
        upstream.requests.clear()
        body = {**CHAT, "stream": stream, "tools": TOOLS}
        headers = {"accept-encoding": encoding}
        direct, tapped = both(
            upstream, upstream_url, tap.url, "POST", "/v1/chat/completions", json=body, headers=headers
        )
        assert tapped == direct
        packed = (b"content-encoding", b"gzip") in direct[1]
        assert packed == (encoding == "gzip" and not stream)
        content = gzip.decompress(direct[2]) if packed else direct[2]
        assert b"unknown" in content
        assert b"top_logprobs" in content
        assert (b"Rome" in content) == upstream.calls_tool
        (_, direct_headers, direct_body), (_, tapped_headers, tapped_body) = upstream.requests
        assert direct_body == tapped_body
        hop = {"host", "connection"}
        expected = {name: value for name, value in direct_headers.items() if name not in hop}
        assert {name: value for name, value in tapped_headers.items() if name not in hop} == expected


def test_every_path_and_method_is_forwarded(upstream, upstream_url, start):
    tap = start(upstream_url)
    for method, path in (
        ("GET", "/any/pa%2Fth%20x?status=418&q=a%2Bb+c&x=[1]"),
        ("POST", "/v1/embeddings"),
        ("PUT", "/x?status=500"),
        ("DELETE", "/v1/files/1?status=404"),
        ("PATCH", "//double//slash"),
        ("GET", "/metrics"),
        ("OPTIONS", "/v1/models"),
        ("HEAD", "/v1/models"),
    ):
        how = {} if method in ("GET", "HEAD", "OPTIONS") else {"content": b"\x00\xffany", "headers": {"x-mine": "1"}}
        direct, tapped = both(upstream, upstream_url, tap.url, method, path, **how)
        assert tapped[0] == direct[0], path
        assert tapped[2] == direct[2], path
        hop = (b"connection", b"x-gone")  # headers of a single connection
        assert tapped[1] == [header for header in direct[1] if header[0] not in hop], path


def test_chunked_body_is_forwarded_completely(upstream, upstream_url, start):
    tap = start(upstream_url)

    def parts() -> Iterator[bytes]:
        for n in range(200):
            yield b"%d," % n * 500

    with httpx2.Client(base_url=tap.url) as client:
        assert client.post("/upload", content=parts()).status_code == 200
    assert upstream.requests[0][2] == b"".join(parts())
    assert upstream.requests[0][1]["transfer-encoding"] == "chunked"


def test_each_event_is_forwarded_before_the_next(upstream, upstream_url, start):
    upstream.text, upstream.gate = "x" * 40, threading.Semaphore(0)
    tap = start(upstream_url)
    with httpx2.stream("POST", f"{tap.url}/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        events = 0
        for _ in answer.iter_raw():
            events += 1
            upstream.gate.release()
    assert events >= 10


def test_disconnect_ends_the_upstream_request(upstream, upstream_url, start, eventually):
    upstream.text, upstream.wait = "x" * 400, 0.05
    tap = start(upstream_url)
    with httpx2.stream("POST", f"{tap.url}/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        next(answer.iter_raw())
    eventually(lambda: upstream.disconnects == 1)
    eventually(lambda: tap.count("osd_tap_passed_over_total", reason="unfinished") == 1)
    eventually(lambda: tap.count("osd_tap_running") == 0)


def test_prompts_and_answers_are_captured(upstream, upstream_url, start, captured, tiny_target):
    tap = start(upstream_url)
    with httpx2.Client(base_url=tap.url, headers={"authorization": "Bearer hush"}) as client:
        client.post("/v1/chat/completions", json={**CHAT, "temperature": 0.5, "top_p": 0.9})
        client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"accept-encoding": "identity"})
        client.post("/v1/completions", json={"prompt": "Once", "stream": True, "stop": "x"})
        client.post("/v1/completions", json={"prompt": [[1, 2], [3]]})
        upstream.calls_tool = True
        turns = [{"role": "developer", "content": "Be."}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
        client.post("/v1/chat/completions", json={"messages": turns, "tools": TOOLS})
        client.post("/v1/chat/completions", json={"messages": turns, "tools": TOOLS, "stream": True})
    first, second, text, ids, call, streamed = captured(6)
    assert (first.request_id, first.target, first.domain) == ("chatcmpl-1-0", str(tiny_target), "general")
    assert (first.temperature, first.top_p, first.ended) == (0.5, 0.9, True)
    assert first.conversation.messages == [{"role": "user", "content": "Hi"}]
    assert first.answer == second.answer == text.answer == "Hello you."
    assert (text.prompt, text.ended, ids.prompt) == ("Once", False, [1, 2])
    for record in (call, streamed):
        assert [(c.id, c.name, c.arguments) for c in record.calls] == [("call_1", "look", '{"at": "Rome"}')]
        assert record.conversation.tools == TOOLS
        system, called = record.conversation.messages
        assert system == {"role": "system", "content": "Be."}
        assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "Rome"}}
    assert b"hush" not in b"".join(map(exchange.encode, (first, second, text, ids, call, streamed)))


def test_policy_decides_what_is_captured(upstream, upstream_url, start, captured, redis_client):
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    bodies = {
        "policy": {**CHAT, "store": False},
        "model": {**CHAT, "model": "other"},
        "form": {**CHAT, "messages": [{"role": "user", "content": image}]},
        "size": {**CHAT, "messages": [{"role": "user", "content": "x" * 3000}]},
    }
    tap = start(upstream_url, tap={"max_bytes": 2000})
    with httpx2.Client(base_url=tap.url) as client:
        for body in bodies.values():
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    captured(1)
    for reason in bodies:
        assert tap.count("osd_tap_passed_over_total", reason=reason) == 1, reason
    careful = start(upstream_url, serving={"capture_default": False})
    silent = start(upstream_url, capture={"enabled": False})
    with httpx2.Client() as client:
        for url in (careful.url, silent.url):
            client.post(f"{url}/v1/chat/completions", json=CHAT)
        client.post(f"{careful.url}/v1/chat/completions", json={**CHAT, "store": True})
    captured(2)
    assert careful.count("osd_tap_passed_over_total", reason="policy") == 1
    assert silent.count("osd_tap_passed_over_total", reason="policy") == 1


def test_exchanges_outside_the_sample_are_counted(upstream_url, start, captured):
    tap = start(upstream_url, tap={"share": 1e-9})
    tap.chat()
    assert tap.count("osd_tap_passed_over_total", reason="share") == 1


def test_unreachable_upstream_is_502(upstream, start):
    with serving(upstream.app) as url:
        tap = start(url)
        with httpx2.Client(base_url=tap.url) as client:
            assert client.post("/busy?status=503", content=b"x").status_code == 503
    with httpx2.Client(base_url=tap.url) as client:
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 502
        assert answer.json()["error"] == {
            "message": "The upstream gives no answer. Try again later.",
            "type": "server_error",
            "param": None,
            "code": "upstream_unreachable",
        }
        assert tap.count("osd_tap_upstream_errors_total", kind="unreachable") == 1
        with serving(upstream.app, int(url.rpartition(":")[2])):
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_broken_answer_is_forwarded_as_broken(upstream, upstream_url, start, eventually):
    upstream.fails = True
    tap = start(upstream_url)
    with httpx2.Client(base_url=tap.url) as client, pytest.raises(httpx2.RemoteProtocolError):
        client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    eventually(lambda: tap.count("osd_tap_passed_over_total", reason="unfinished") == 1)
    assert tap.count("osd_tap_upstream_errors_total", kind="broken") == 1


def test_tap_without_redis_forwards_and_counts_losses(upstream_url, start, eventually, tmp_path):
    with RedisServer(max_memory_mb=32) as server:
        tap = start(upstream_url, server.url)
        with httpx2.Client(base_url=tap.url) as client:
            client.post("/v1/chat/completions", json=CHAT)
            eventually(lambda: tap.count("osd_tap_captured_total") == 1)
            server.close()

            def ask(_: int) -> int:
                return client.post("/v1/chat/completions", json=CHAT, timeout=60).status_code

            with ThreadPoolExecutor(8) as clients:
                assert set(clients.map(ask, range(80))) == {200}
    eventually(lambda: tap.count("osd_tap_dropped_total") + tap.count("osd_tap_unread_total") == 80)


def test_exchanges_over_the_queue_are_counted(upstream_url, start, eventually, monkeypatch):
    from osd.tap import captures

    may_read, read = threading.Event(), captures.exchanges_of
    monkeypatch.setattr(captures, "exchanges_of", lambda *args: (may_read.wait(HANG_SECONDS), read(*args))[1])
    tap = start(upstream_url, tap={"max_queue": 2})
    tap.chat(9)
    eventually(lambda: tap.count("osd_tap_unread_total") in (6, 7))
    may_read.set()
    names = ("captured", "dropped", "unread")
    eventually(lambda: sum(tap.count(f"osd_tap_{name}_total") for name in names) == 9)


def test_exchange_can_be_purged(upstream_url, start, captured, redis_client, tmp_path):
    tap = start(upstream_url)
    tap.chat(3)
    ids = [record.request_id for record in captured(3)]
    result = purge_request(tap.settings, url_of(redis_client), Actor.local(), ids[1].rpartition("-")[0])
    assert result.streamed == 1
    assert [record.request_id for record in captured(2)] == [ids[0], ids[2]]


def url_of(client: redis.Redis) -> str:
    options = client.connection_pool.connection_kwargs
    return f"redis://:{options['password']}@{options['host']}:{options['port']}/0"


def test_tap_metrics_have_their_own_port(upstream_url, start):
    tap = start(upstream_url)
    tap.chat()
    text = httpx2.get(f"http://127.0.0.1:{tap.settings.tap.metrics_port}/metrics").text
    assert httpx2.get(f"{tap.url}/metrics").text.startswith("/metrics?")  # the answer of the upstream
    assert 'osd_tap_requests_total{status="200"} 1.0' in text
    assert "osd_tap_added_seconds_count 1.0" in text
    for name in ("captured", "dropped", "unread"):
        assert f"osd_tap_{name}_total " in text


def test_tap_reports_the_upstream_to_trainers_and_dashboards(upstream, upstream_url, start, redis_url, eventually):
    upstream.metrics = vllm_metrics(version=4, rounds=10, accepted=(6, 2))
    tap = start(upstream_url)
    tap.chat()
    name = f"tap 127.0.0.1:{tap.settings.tap.port}"
    with ReplicaLoads(redis_url) as loads:

        def read():
            return loads.upstreams().get(name)

        eventually(lambda: (report := read()) is not None and report.captured == 1)
        report = read()
        assert report is not None
        assert (report.domain, report.version, report.requests, report.failed) == ("general", 4, 1, 0)
        assert (report.rounds, report.drafted, report.accepted) == (10, 30, 8)
        assert report.accepted_per_position == (6, 2)
        eventually(lambda: (load := loads.read().get(name)) is not None and load.drafter_version == 4)
        upstream.metrics = vllm_metrics(version=5, rounds=12, accepted=(7, 2))
        eventually(lambda: (now := read()) is not None and (now.version, now.rounds) == (5, 12))
        assert not read().traced
        upstream.metrics += "osd_capturing 0.0\n"
        eventually(lambda: read().traced, what="a server that reports itself is traced")


def test_foreign_host_names_are_refused(upstream_url, start):
    tap = start(upstream_url)
    with httpx2.Client(base_url=tap.url) as client:
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        local = {"host": "localhost:1", "origin": "http://localhost:3000"}
        assert client.get("/v1/models", headers=local).status_code == 200
    named = start(upstream_url, tap={"allowed_hosts": "llm.example"})
    with httpx2.Client(base_url=named.url) as client:
        assert client.get("/v1/models", headers={"host": "llm.example"}).status_code == 200


def refusal(url: str, tiny_target: Path, model: str | None = None, same: bool = False) -> str:
    with pytest.raises(AgreementError) as error:
        agree(TapUpstream(url), Settings(target={"source": str(tiny_target)}), model, same)
    return str(error.value)


def test_different_tokenizer_is_refused_with_both_names(upstream, upstream_url, tiny_target):
    upstream.token_offset = 1
    message = refusal(upstream_url, tiny_target, same=True)
    assert f"model {MODEL} " in message
    assert f"target {tiny_target}" in message


def test_unknown_tokenizer_needs_equal_names_or_consent(upstream, upstream_url, tiny_target):
    upstream.has_tokenize = False
    message = refusal(upstream_url, tiny_target)
    assert f"model {MODEL} " in message
    assert f"target {tiny_target}" in message
    settings = Settings(target={"source": str(tiny_target)})
    assert agree(TapUpstream(upstream_url), settings, None, True).names == {MODEL}
    upstream.cards[0]["root"] = f"org/{tiny_target.name}"
    assert agree(TapUpstream(upstream_url), settings, None, False).names == {MODEL}


def test_one_of_several_models_must_be_named(upstream, upstream_url, tiny_target):
    settings = Settings(target={"source": str(tiny_target)})
    upstream.cards.append({"id": "adapter", "root": "elsewhere", "parent": MODEL})
    assert agree(TapUpstream(upstream_url), settings, None, False).names == {MODEL}
    upstream.cards.append({"id": "other", "root": "other"})
    assert "--model" in refusal(upstream_url, tiny_target)
    assert agree(TapUpstream(upstream_url), settings, MODEL, False).names == {MODEL}
    assert "has no model none" in refusal(upstream_url, tiny_target, "none")


def test_unreachable_upstream_error_is_one_sentence(tiny_target):
    assert "does not answer" in refusal(f"http://127.0.0.1:{free_port()}", tiny_target)


def test_taken_tap_port_error_names_the_setting(upstream_url, start):
    tap = start(upstream_url)
    with pytest.raises(ListenError, match=r"tap\.port"):
        start(upstream_url, tap={"port": tap.settings.tap.port})
