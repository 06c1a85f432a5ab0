"""Traces of requests as a collector receives them over OTLP/HTTP."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from starlette.testclient import TestClient

from deploy import contradictions
from deploy.contradictions import check_settings
from osd.config import ConfigError, Settings, load_settings
from serving.api.routes import create_app
from serving.telemetry.tracing import Tracing
from tests.collector import Collector, attributes_of
from tests.redis_servers import free_port
from tests.unit.serving.answers import updates_of
from tests.waiting import wait_until

PROMPT, KEY = "unmistakable-prompt-4711", "sk-unmistakable-key-0815"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def post(service, tracing, headers=(), path="/v1/completions", **body):
    service.script = updates_of
    client = TestClient(create_app(service, [tracing.observe]), base_url="http://127.0.0.1")
    headers = {"authorization": f"Bearer {KEY}", **dict(headers)}
    return client.post(path, json={"prompt": PROMPT, **body}, headers=headers)


def trace(service, collector, **more):
    """Send a request and return its response and spans."""
    tracing = Tracing(collector.url, "tiny", "replica a")
    response = post(service, tracing, **more)
    tracing.close()
    return response, collector.spans()


def test_standard_variables_name_the_service(service, collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=here")
    trace(service, collector)
    assert collector.resource()["service.name"] == "chat"
    assert collector.resource()["deployment.environment"] == "here"


def test_request_has_queue_prefill_and_decode_spans(service, collector):
    before = time.time_ns()
    response, spans = trace(service, collector)
    by_name = {span.name: span for span in spans}
    assert collector.paths == [("/v1/traces", "application/x-protobuf")]
    assert list(by_name) == ["queue", "prefill", "decode", "POST /v1/completions"]
    root = by_name.pop("POST /v1/completions")
    assert {span.parent_span_id for span in by_name.values()} == {root.span_id}
    assert {span.trace_id for span in by_name.values()} == {root.trace_id}
    assert not root.parent_span_id
    assert root.kind == root.SPAN_KIND_SERVER
    assert before <= root.start_time_unix_nano < root.end_time_unix_nano <= time.time_ns()
    assert attributes_of(root) == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.response.id": response.json()["id"], "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"], "gen_ai.usage.input_tokens": 1 + len(PROMPT),
        "gen_ai.usage.output_tokens": 3,
    }  # fmt: skip
    began = root.start_time_unix_nano
    offsets = {
        name: [round((at - began) / 1e9, 3) for at in (span.start_time_unix_nano, span.end_time_unix_nano)]
        for name, span in by_name.items()
    }
    assert offsets == {"queue": [0.5, 2.5], "prefill": [2.5, 3.5], "decode": [3.5, 7.5]}
    assert attributes_of(by_name["prefill"])["osd.cached_tokens"] == 4
    assert attributes_of(by_name["decode"]) == {
        "osd.sequence": 0, "gen_ai.usage.output_tokens": 3, "osd.finish_reason": "stop", "osd.rounds": 2,
        "osd.drafted_tokens": 6, "osd.accepted_tokens": 2, "osd.domain": "code", "osd.drafter_version": 7,
    }  # fmt: skip
    assert collector.resource()["service.name"] == "osd"
    assert collector.resource()["service.instance.id"] == "replica a"


def test_span_continues_the_trace_of_the_client(service, collector):
    _, spans = trace(service, collector, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    (root,) = (span for span in spans if span.name.startswith("POST"))
    assert root.parent_span_id.hex() == SPAN


@pytest.mark.parametrize("header", [f"00-{TRACE}-{SPAN}", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-{PROMPT}"])
def test_invalid_traceparent_starts_a_new_trace(service, collector, header):
    _, spans = trace(service, collector, headers={"traceparent": header})
    (root,) = (span for span in spans if span.name.startswith("POST"))
    assert not root.parent_span_id
    assert len({span.trace_id for span in spans}) == 1


def test_unsampled_traceparent_gives_no_spans(service, collector):
    response, spans = trace(service, collector, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert response.status_code == 200
    assert not spans


def test_each_choice_has_spans_and_errors_have_a_status(service, collector):
    tracing = Tracing(collector.url, "tiny", "replica a")
    post(service, tracing, n=3)
    post(service, tracing, max_tokens=-1)
    tracing.close()
    decoded = [attributes_of(span)["osd.sequence"] for span in collector.spans() if span.name == "decode"]
    assert sorted(decoded) == [0, 1, 2]
    roots = [attributes_of(span) for span in collector.spans() if span.name.startswith("POST")]
    assert [root["http.response.status_code"] for root in roots] == [200, 400]


def test_spans_contain_no_user_text_and_no_key(service, collector):
    tracing = Tracing(collector.url, "tiny", "replica a")
    headers = {"tracestate": f"a={PROMPT}", "baggage": f"a={PROMPT}", "x-request-id": PROMPT}
    for path, body in (
        ("/v1/completions", {"user": PROMPT, "stop": [PROMPT]}),
        ("/v1/completions", {"model": PROMPT}),
        ("/v1/completions", {PROMPT: PROMPT}),
        ("/v1/completions", {"osd": {"domain": PROMPT}}),
        (f"/v1/{PROMPT}", {}),
    ):
        post(service, tracing, headers | {"traceparent": f"00-{TRACE}-{SPAN}-01"}, path, **body)
    tracing.close()
    assert len([span for span in collector.spans() if span.name.startswith("POST")]) == 5
    for body in collector.bodies:
        assert PROMPT.encode() not in body
        assert KEY.encode() not in body


def test_hanging_collector_delays_neither_requests_nor_close(service, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")  # longer than a test may take
    monkeypatch.setattr("serving.telemetry.tracing._CLOSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        tracing = Tracing(f"http://127.0.0.1:{port}", "tiny", "replica a")
        for _ in range(5):
            assert post(service, tracing).status_code == 200
            time.sleep(0.02)
        silent.settimeout(10)
        connection, _ = silent.accept()  # a request has arrived, and the collector does not answer
        tracing.close()
        connection.close()
    collector = Collector(port)  # lets the sending thread end, because Hypothesis forbids its random numbers
    wait_until(lambda: "tracing-close" not in {thread.name for thread in threading.enumerate()})
    collector.close()


def test_collector_failure_and_recovery_are_logged_once(service, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    port = free_port()
    tracing = Tracing(f"http://127.0.0.1:{port}", "tiny", "replica a")

    def warnings():
        return [record.getMessage() for record in caplog.records if record.name == "serving.telemetry.tracing"]

    def ask_until(condition):
        wait_until(lambda: post(service, tracing).status_code == 200 and condition(), every=0.03)

    ask_until(warnings)
    more = time.monotonic() + 0.5
    ask_until(lambda: time.monotonic() > more)
    down = f"traces cannot be sent to http://127.0.0.1:{port} (serving.otlp_endpoint) and are lost"
    assert warnings() == [down]
    collector = Collector(port)
    ask_until(lambda: len(warnings()) > 1)
    tracing.close()
    collector.close()
    assert warnings() == [down, "traces are sent again"]
    assert collector.spans()
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_collector_without_the_packages_is_a_config_error(monkeypatch):
    settings = Settings.model_validate({"serving": {"otlp_endpoint": "http://127.0.0.1:4318"}})
    check_settings(settings)
    monkeypatch.setattr(contradictions, "_TRACING_NEEDS", ("nowhere.to.be.found",))
    with pytest.raises(ConfigError, match=r"serving\.otlp_endpoint needs packages .* pip install 'osd-llm\[otel\]'"):
        check_settings(settings)
    check_settings(Settings())


def test_osd_variable_overrides_the_standard_collector_variable():
    standard = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://one:4318"}
    assert load_settings(None, (), standard).serving.otlp_endpoint == "http://one:4318"
    both = standard | {"OSD_SERVING__OTLP_ENDPOINT": "https://two/otlp"}
    assert load_settings(None, (), both).serving.otlp_endpoint == "https://two/otlp"
    assert load_settings(None, (), {}).serving.otlp_endpoint is None


@pytest.mark.parametrize("address", ["collector:4318", "ftp://collector", "http://me:secret@collector:4318", "http://"])
def test_invalid_collector_address_is_refused_without_quoting_it(address):
    with pytest.raises(ConfigError, match=r"^serving\.otlp_endpoint \(--set\) must be an address") as refused:
        load_settings(None, [f"serving.otlp_endpoint={address}"], {})
    assert "secret" not in str(refused.value)
