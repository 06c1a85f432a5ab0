"""A tap in front of a real HTTP server, with a real Redis behind it."""

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
from osd.admin.forgetting import forget
from osd.capture import exchange
from osd.capture.server import RedisServer
from osd.capture.trace import FIELD
from osd.config import Settings
from osd.registry.replica_loads import ReplicaLoads
from osd.tap.agreement import AgreementError, agree
from osd.tap.app import ListenError, Tap
from osd.tap.upstream import Upstream as Behind
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
    """As if it had just begun."""
    server[0].reset()
    return server[0]


@pytest.fixture
def behind(server, upstream) -> str:
    return server[1]


class Running:
    """A tap that runs, and its addresses."""

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
    def started(url: str, redis: str = redis_url, **settings) -> Running:
        ports = {"port": free_port(), "metrics_port": free_port(), **settings.pop("tap", {})}
        made = Settings(home=tmp_path, target={"source": str(tiny_target)}, tap=ports, **settings)
        upstream = Behind(url)
        tap = Tap(made, upstream, agree(upstream, made, None, False), redis)
        ends.enter_context(background(tap.run, tap.stop))
        return Running(tap, made)

    return started


@pytest.fixture
def captured(redis_client: redis.Redis, eventually) -> Callable[[int], list[exchange.Exchange]]:
    def wait(count: int) -> list[exchange.Exchange]:
        eventually(lambda: redis_client.xlen("osd:tapped:domain:general") >= count)
        found = [exchange.decode(fields[FIELD]) for _, fields in redis_client.xrange("osd:tapped:domain:general")]
        assert len(found) == count
        return found

    return wait


def raw(client: httpx2.Client, method: str, path: str, **how) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """An answer as it is on the wire, without what every server says anew."""
    with client.stream(method, path, **how) as answer:
        body = b"".join(answer.iter_raw())
        headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() != b"date"]
        return answer.status_code, sorted(headers), body


def both(upstream: Upstream, direct: str, tapped: str, method: str, path: str, **how):
    """The same request both ways; the upstream counts its answers alike."""
    found = []
    for url in (direct, tapped):
        upstream.number = 0
        with httpx2.Client(base_url=url) as client:
            found.append(raw(client, method, path, **how))
    return found


def test_answers_are_the_same_bytes_with_tools_log_probabilities_and_unknown_fields(upstream, behind, start):
    tap = start(behind)
    for stream, upstream.calls, encoding in itertools.product([False, True], [False, True], ["identity", "gzip"]):
        upstream.asked.clear()
        body = {**CHAT, "stream": stream, "tools": TOOLS}
        headers = {"accept-encoding": encoding}
        direct, tapped = both(upstream, behind, tap.url, "POST", "/v1/chat/completions", json=body, headers=headers)
        assert tapped == direct
        packed = (b"content-encoding", b"gzip") in direct[1]
        assert packed == (encoding == "gzip" and not stream)
        said = gzip.decompress(direct[2]) if packed else direct[2]
        assert b"unknown" in said
        assert b"top_logprobs" in said
        assert (b"Rome" in said) == upstream.calls
        (_, one, sent), (_, other, again) = upstream.asked
        assert sent == again
        own = {"host", "connection"}
        assert {k: v for k, v in one.items() if k not in own} == {k: v for k, v in other.items() if k not in own}


def test_every_path_and_method_passes_on(upstream, behind, start):
    tap = start(behind)
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
        direct, tapped = both(upstream, behind, tap.url, method, path, **how)
        assert tapped[0] == direct[0], path
        assert tapped[2] == direct[2], path
        hop = (b"connection", b"x-gone")  # what the upstream says of its connection alone
        assert tapped[1] == [one for one in direct[1] if one[0] not in hop], path


def test_a_body_in_chunks_arrives_in_whole(upstream, behind, start):
    tap = start(behind)

    def parts() -> Iterator[bytes]:
        for n in range(200):
            yield b"%d," % n * 500

    with httpx2.Client(base_url=tap.url) as client:
        assert client.post("/upload", content=parts()).status_code == 200
    assert upstream.asked[0][2] == b"".join(parts())
    assert upstream.asked[0][1]["transfer-encoding"] == "chunked"


def test_tap_passes_each_event_on_before_the_server_sends_the_next(upstream, behind, start):
    upstream.says, upstream.goes_on = "x" * 40, threading.Semaphore(0)
    tap = start(behind)
    with httpx2.stream("POST", f"{tap.url}/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        events = 0
        for _ in answer.iter_raw():
            events += 1
            upstream.goes_on.release()
    assert events >= 10


def test_a_client_that_leaves_ends_the_upstreams_request(upstream, behind, start, eventually):
    upstream.says, upstream.wait = "x" * 400, 0.05
    tap = start(behind)
    with httpx2.stream("POST", f"{tap.url}/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        next(answer.iter_raw())
    eventually(lambda: upstream.left == 1)
    eventually(lambda: tap.count("osd_tap_passed_over_total", reason="unfinished") == 1)
    assert tap.count("osd_tap_running") == 0


def test_prompts_and_answers_are_captured(upstream, behind, start, captured, tiny_target):
    tap = start(behind)
    with httpx2.Client(base_url=tap.url, headers={"authorization": "Bearer hush"}) as client:
        client.post("/v1/chat/completions", json={**CHAT, "temperature": 0.5, "top_p": 0.9})
        client.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers={"accept-encoding": "identity"})
        client.post("/v1/completions", json={"prompt": "Once", "stream": True, "stop": "x"})
        client.post("/v1/completions", json={"prompt": [[1, 2], [3]]})
        upstream.calls = True
        turns = [{"role": "developer", "content": "Be."}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
        client.post("/v1/chat/completions", json={"messages": turns, "tools": TOOLS})
        client.post("/v1/chat/completions", json={"messages": turns, "tools": TOOLS, "stream": True})
    first, second, text, ids, call, streamed = captured(6)
    assert (first.request_id, first.target, first.domain) == ("chatcmpl-1-0", str(tiny_target), "general")
    assert (first.temperature, first.top_p, first.ended) == (0.5, 0.9, True)
    assert first.conversation.messages == [{"role": "user", "content": "Hi"}]
    assert first.answer == second.answer == text.answer == "Hello you."
    assert (text.prompt, text.ended, ids.prompt) == ("Once", False, [1, 2])
    for one in (call, streamed):
        assert [(c.id, c.name, c.arguments) for c in one.calls] == [("call_1", "look", '{"at": "Rome"}')]
        assert one.conversation.tools == TOOLS
        system, called = one.conversation.messages
        assert system == {"role": "system", "content": "Be."}
        assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": "Rome"}}
    assert b"hush" not in b"".join(exchange.encode(one) for one in (first, second, text, ids, call, streamed))


def test_what_policy_does_not_allow_is_not_captured(upstream, behind, start, captured, redis_client):
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    bodies = {
        "policy": {**CHAT, "store": False},
        "model": {**CHAT, "model": "other"},
        "form": {**CHAT, "messages": [{"role": "user", "content": image}]},
        "size": {**CHAT, "messages": [{"role": "user", "content": "x" * 3000}]},
    }
    tap = start(behind, tap={"max_bytes": 2000})
    with httpx2.Client(base_url=tap.url) as client:
        for body in bodies.values():
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
    captured(1)
    for reason in bodies:
        assert tap.count("osd_tap_passed_over_total", reason=reason) == 1, reason
    careful = start(behind, serving={"capture_default": False})
    silent = start(behind, capture={"enabled": False})
    with httpx2.Client() as client:
        for url in (careful.url, silent.url):
            client.post(f"{url}/v1/chat/completions", json=CHAT)
        client.post(f"{careful.url}/v1/chat/completions", json={**CHAT, "store": True})
    captured(2)
    assert careful.count("osd_tap_passed_over_total", reason="policy") == 1
    assert silent.count("osd_tap_passed_over_total", reason="policy") == 1


def test_of_a_sample_the_rest_is_counted(behind, start, captured):
    tap = start(behind, tap={"share": 1e-9})
    tap.chat()
    assert tap.count("osd_tap_passed_over_total", reason="share") == 1


def test_an_upstream_that_is_gone_is_502_and_its_own_errors_are_its_own(upstream, start):
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


def test_an_answer_that_breaks_off_does_not_look_whole(upstream, behind, start, eventually):
    upstream.breaks = True
    tap = start(behind)
    with httpx2.Client(base_url=tap.url) as client, pytest.raises(httpx2.RemoteProtocolError):
        client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    eventually(lambda: tap.count("osd_tap_passed_over_total", reason="unfinished") == 1)
    assert tap.count("osd_tap_upstream_errors_total", kind="broken") == 1


def test_without_redis_everything_passes_on_and_what_is_lost_is_counted(behind, start, eventually, tmp_path):
    with RedisServer(max_memory_mb=32) as server:
        tap = start(behind, server.url)
        with httpx2.Client(base_url=tap.url) as client:
            client.post("/v1/chat/completions", json=CHAT)
            eventually(lambda: tap.count("osd_tap_captured_total") == 1)
            server.close()

            def ask(_: int) -> int:
                return client.post("/v1/chat/completions", json=CHAT, timeout=60).status_code

            with ThreadPoolExecutor(8) as clients:
                assert set(clients.map(ask, range(80))) == {200}
    eventually(lambda: tap.count("osd_tap_dropped_total") + tap.count("osd_tap_unread_total") == 80)


def test_what_cannot_be_read_in_time_is_counted(behind, start, eventually, monkeypatch):
    from osd.tap import captures

    go, read = threading.Event(), captures.exchanges_of
    monkeypatch.setattr(captures, "exchanges_of", lambda *given: (go.wait(HANG_SECONDS), read(*given))[1])
    tap = start(behind, tap={"max_queue": 2})
    tap.chat(9)
    eventually(lambda: tap.count("osd_tap_unread_total") in (6, 7))
    go.set()
    names = ("captured", "dropped", "unread")
    eventually(lambda: sum(tap.count(f"osd_tap_{name}_total") for name in names) == 9)


def test_the_stream_is_bounded_and_purged_like_traces(behind, start, captured, redis_client, tmp_path):
    tap = start(behind)
    tap.chat(3)
    ids = [one.request_id for one in captured(3)]
    found = forget(tap.settings, tap_redis(redis_client), Actor.local(), ids[1].rpartition("-")[0])
    assert found.streamed == 1
    assert [one.request_id for one in captured(2)] == [ids[0], ids[2]]


def tap_redis(client: redis.Redis) -> str:
    about = client.connection_pool.connection_kwargs
    return f"redis://:{about['password']}@{about['host']}:{about['port']}/0"


def test_its_metrics_have_a_port_of_their_own(behind, start):
    tap = start(behind)
    tap.chat()
    told = httpx2.get(f"http://127.0.0.1:{tap.settings.tap.metrics_port}/metrics").text
    assert httpx2.get(f"{tap.url}/metrics").text.startswith("/metrics?")  # the upstream's
    assert 'osd_tap_requests_total{status="200"} 1.0' in told
    assert "osd_tap_added_seconds_count 1.0" in told
    for name in ("captured", "dropped", "unread"):
        assert f"osd_tap_{name}_total " in told


def test_trainers_and_dashboards_hear_of_the_server_behind(upstream, behind, start, redis_url, eventually):
    upstream.metrics = vllm_metrics(version=4, rounds=10, accepted=(6, 2))
    tap = start(behind)
    tap.chat()
    name = f"tap 127.0.0.1:{tap.settings.tap.port}"
    with ReplicaLoads(redis_url) as loads:

        def told():
            return loads.upstreams().get(name)

        eventually(lambda: (one := told()) is not None and one.captured == 1)
        report = told()
        assert report is not None
        assert (report.domain, report.version, report.requests, report.failed) == ("general", 4, 1, 0)
        assert (report.rounds, report.drafted, report.accepted) == (10, 30, 8)
        assert report.accepted_per_position == (6, 2)
        eventually(lambda: (load := loads.read().get(name)) is not None and load.drafter_version == 4)
        upstream.metrics = vllm_metrics(version=5, rounds=12, accepted=(7, 2))
        eventually(lambda: (one := told()) is not None and (one.version, one.rounds) == (5, 12))


def test_pages_of_other_names_are_refused(behind, start):
    tap = start(behind)
    with httpx2.Client(base_url=tap.url) as client:
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        local = {"host": "localhost:1", "origin": "http://localhost:3000"}
        assert client.get("/v1/models", headers=local).status_code == 200
    named = start(behind, tap={"allowed_hosts": "llm.example"})
    with httpx2.Client(base_url=named.url) as client:
        assert client.get("/v1/models", headers={"host": "llm.example"}).status_code == 200


def refusal(url: str, tiny_target: Path, model: str | None = None, same: bool = False) -> str:
    with pytest.raises(AgreementError) as error:
        agree(Behind(url), Settings(target={"source": str(tiny_target)}), model, same)
    return str(error.value)


def test_another_tokenizer_is_refused_with_both_names(upstream, behind, tiny_target):
    upstream.shifted = 1
    said = refusal(behind, tiny_target, same=True)
    assert f"model {MODEL} " in said
    assert f"target {tiny_target}" in said


def test_without_its_tokenizer_the_names_must_agree_or_somebody_vouch(upstream, behind, tiny_target):
    upstream.tokenizes = False
    said = refusal(behind, tiny_target)
    assert f"model {MODEL} " in said
    assert f"target {tiny_target}" in said
    settings = Settings(target={"source": str(tiny_target)})
    assert agree(Behind(behind), settings, None, True).names == {MODEL}
    upstream.cards[0]["root"] = f"org/{tiny_target.name}"
    assert agree(Behind(behind), settings, None, False).names == {MODEL}


def test_of_several_models_one_has_to_be_named_and_adapters_are_not_the_target(upstream, behind, tiny_target):
    settings = Settings(target={"source": str(tiny_target)})
    upstream.cards.append({"id": "adapter", "root": "elsewhere", "parent": MODEL})
    assert agree(Behind(behind), settings, None, False).names == {MODEL}
    upstream.cards.append({"id": "other", "root": "other"})
    assert "--model" in refusal(behind, tiny_target)
    assert agree(Behind(behind), settings, MODEL, False).names == {MODEL}
    assert "has no model none" in refusal(behind, tiny_target, "none")


def test_an_upstream_that_does_not_answer_is_one_sentence(tiny_target):
    assert "does not answer" in refusal(f"http://127.0.0.1:{free_port()}", tiny_target)


def test_a_port_that_is_taken_is_told_by_its_setting(behind, start):
    tap = start(behind)
    with pytest.raises(ListenError, match=r"tap\.port"):
        start(behind, tap={"port": tap.settings.tap.port})
