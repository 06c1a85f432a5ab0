"""Traces of requests for an OpenTelemetry collector: queue, prefill and decoding times, and counts of drafts.

Spans are created from the record of a finished request and sent by a separate thread. They contain counts, times and
names, but no text of the user.
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
    """Exporter of a trace for each POST request.

    If the request has a ``traceparent`` header, its trace continues the trace of the client and follows the client's
    sampling decision.
    """

    def __init__(self, endpoint: str, model: str, replica: str) -> None:
        """Connect to a collector.

        Args:
            endpoint: base address of the collector, as in ``OTEL_EXPORTER_OTLP_ENDPOINT``.
            model: name of the model in the spans.
            replica: name of this instance of the service.
        """
        for name in _LIBRARY:
            # The library would log every failed export; ``_QuietExporter`` logs the first failure only.
            logging.getLogger(name).setLevel(logging.CRITICAL)
        service = {"service.name": "osd", "service.version": osd.__version__, "service.instance.id": replica}
        resource = Resource(service).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _QuietExporter(OTLPSpanExporter(endpoint=endpoint.rstrip("/") + _PATH), endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("osd", osd.__version__)
        self._propagator, self._model = TraceContextTextMapPropagator(), model

    def observe(self, observed: ObservedRequest) -> None:
        """Export the trace of a finished request."""
        if observed.method != "POST":
            return
        parent = self._propagator.extract({"traceparent": observed.traceparent}, Context())
        span = self._tracer.start_span(
            f"{observed.method} {observed.path}", parent, SpanKind.SERVER, start_time=observed.clock
        )
        if span.is_recording():
            observed.trace_id = f"{span.get_span_context().trace_id:032x}"
            span.set_attributes(_request_attributes(observed, self._model))
            if observed.status is None or observed.status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            for index, sequence in enumerate(observed.sequences.values()):
                self._export_sequence(span, observed, index, sequence)
        span.end(observed.clock + round(1e9 * observed.seconds))

    def close(self) -> None:
        """Send the remaining spans; wait for at most 2 seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)

    def _export_sequence(self, parent: Span, observed: ObservedRequest, index: int, sequence: ObservedSequence) -> None:
        """Create the queue, prefill and decode spans that the sequence completed."""
        life = sequence.lifetime
        if life is None:
            return
        for name, begin, end, attributes in (
            ("queue", life.queued, life.began, {}),
            ("prefill", life.began, life.first, _prefill_attributes(sequence)),
            ("decode", life.first, life.last, _decode_attributes(sequence)),
        ):
            if begin is not None and end is not None:
                context = set_span_in_context(parent)
                span = self._tracer.start_span(name, context, start_time=_clock(observed, begin))
                span.set_attributes({"osd.sequence": index, **attributes})
                span.end(_clock(observed, end))


def _prefill_attributes(sequence: ObservedSequence) -> dict[str, Any]:
    return {"gen_ai.usage.input_tokens": sequence.prompt_tokens, "osd.cached_tokens": sequence.cached_tokens}


def _decode_attributes(sequence: ObservedSequence) -> dict[str, Any]:
    version: dict[str, Any] = {}
    if sequence.drafted is not None:
        version = {"osd.domain": sequence.drafted[0], "osd.drafter_version": sequence.drafted[1]}
    return {
        "gen_ai.usage.output_tokens": sequence.completion_tokens,
        "osd.finish_reason": str(sequence.finish),
        "osd.rounds": sequence.counts.rounds,
        "osd.drafted_tokens": sequence.counts.drafted,
        "osd.accepted_tokens": sequence.counts.accepted,
        **version,
    }


def _request_attributes(observed: ObservedRequest, model: str) -> dict[str, Any]:
    sequences = observed.sequences.values()
    attributes: dict[str, Any] = {"http.request.method": observed.method, "http.route": observed.path}
    if observed.status is not None:
        attributes["http.response.status_code"] = observed.status
    if sequences:
        attributes |= {
            "gen_ai.response.id": observed.response_id,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": [str(sequence.finish) for sequence in sequences],
            "gen_ai.usage.input_tokens": sum(sequence.prompt_tokens for sequence in sequences),
            "gen_ai.usage.output_tokens": sum(sequence.completion_tokens for sequence in sequences),
        }
    return attributes


def _clock(observed: ObservedRequest, moment: float) -> int:
    """Convert a time of ``time.monotonic`` to nanoseconds since the epoch."""
    return observed.clock + round(1e9 * (moment - observed.arrived))


class _QuietExporter(SpanExporter):
    """Exporter that logs the first failure of a series and the recovery."""

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
