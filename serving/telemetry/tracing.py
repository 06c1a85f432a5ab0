"""Traces of requests for an OpenTelemetry collector: what waited, read and decoded how long, and how drafts did.

Spans are made when a request has ended, out of moments that were noted anyway, and sent by a thread of their own. They
hold counts, times and names; nothing that a user wrote.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import osd
from serving.telemetry.observed import ObservedRequest, ObservedSequence

logger = logging.getLogger(__name__)

_PATH = "/v1/traces"
_CLOSE_SECONDS = 2.0
_LIBRARY = ("opentelemetry.exporter.otlp", "opentelemetry.exporter.http", "opentelemetry.sdk._shared_internal")


class Tracing:
    """Sends a trace of each request that asks for an answer; ``close`` sends what is left, and waits for 2 s at most.

    A trace goes on with that of the client where the request has a ``traceparent``, and is sent where that says so.
    """

    def __init__(self, endpoint: str, model: str, replica: str) -> None:
        """Send to the collector at ``endpoint``, a base address as ``OTEL_EXPORTER_OTLP_ENDPOINT`` is."""
        for name in _LIBRARY:
            # It would say at each try that a collector cannot be reached; ``_Quiet`` says so once.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        mine = {"service.name": "osd", "service.version": osd.__version__, "service.instance.id": replica}
        resource = Resource(mine).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _Quiet(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + _PATH), endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("osd", osd.__version__)
        self._propagator, self._model = TraceContextTextMapPropagator(), model

    def observe(self, observed: ObservedRequest) -> None:
        """Hear of a request that has ended."""
        if observed.method != "POST":
            return
        parent = self._propagator.extract({"traceparent": observed.traceparent}, Context())
        span = self._tracer.start_span(
            f"{observed.method} {observed.path}", parent, SpanKind.SERVER, start_time=observed.clock
        )
        if span.is_recording():
            observed.trace_id = f"{span.get_span_context().trace_id:032x}"
            span.set_attributes(_of_request(observed, self._model))
            if observed.status is None or observed.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            for index, one in enumerate(observed.sequences.values()):
                self._sequence(span, observed, index, one)
        span.end(observed.clock + round(1e9 * observed.seconds))

    def close(self) -> None:
        """Send what is left."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _sequence(self, parent: Span, observed: ObservedRequest, index: int, one: ObservedSequence) -> None:
        """The parts of a sequence's life, as far as it came."""
        life = one.lifetime
        if life is None:
            return
        for name, begin, end, about in (
            ("queue", life.queued, life.began, {}),
            ("prefill", life.began, life.first, _of_prefill(one)),
            ("decode", life.first, life.last, _of_decode(one)),
        ):
            if begin is not None and end is not None:
                context = set_span_in_context(parent)
                span = self._tracer.start_span(name, context, start_time=_clock(observed, begin))
                span.set_attributes({"osd.sequence": index, **about})
                span.end(_clock(observed, end))


def _of_prefill(one: ObservedSequence) -> dict[str, Any]:
    return {"gen_ai.usage.input_tokens": one.prompt_tokens, "osd.cached_tokens": one.cached_tokens}


def _of_decode(one: ObservedSequence) -> dict[str, Any]:
    drafted = {} if one.drafted is None else {"osd.domain": one.drafted[0], "osd.drafter_version": one.drafted[1]}
    return {
        "gen_ai.usage.output_tokens": one.completion_tokens,
        "osd.finish_reason": str(one.finish),
        "osd.rounds": one.counts.rounds,
        "osd.drafted_tokens": one.counts.drafted,
        "osd.accepted_tokens": one.counts.accepted,
        **drafted,
    }


def _of_request(observed: ObservedRequest, model: str) -> dict[str, Any]:
    sequences = observed.sequences.values()
    attributes: dict[str, Any] = {"http.request.method": observed.method, "http.route": observed.path}
    if observed.status is not None:
        attributes["http.response.status_code"] = observed.status
    if sequences:
        attributes |= {
            "gen_ai.response.id": observed.response_id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [str(one.finish) for one in sequences],
            "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in sequences),
            "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in sequences),
        }
    return attributes


def _clock(observed: ObservedRequest, moment: float) -> int:
    """Nanoseconds of the epoch at a moment of ``time.monotonic``."""
    return observed.clock + round(1e9 * (moment - observed.arrived))


class _Quiet(SpanExporter):
    """Says once that spans cannot be sent, and once that they can again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint, self._failing = exporter, endpoint, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            logger.warning("traces cannot be sent to %s (serving.otlp_endpoint) and are lost", self._endpoint)
        elif self._failing and not failed:
            logger.warning("traces are sent again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
