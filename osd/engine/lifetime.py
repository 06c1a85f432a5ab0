"""Times of a sequence, and histograms of the times and lengths of all sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

from osd.histogram import FIRST_SECONDS, LONG_SECONDS, SHORT_SECONDS, TOKENS, Histogram
from osd.metrics import Metric


@dataclass
class Lifetime:
    """Times of a sequence on ``time.monotonic``, None before the event.

    Attributes:
        arrived: first byte of the request.
        queued: submission to the engine, after parsing and tokenisation.
        began: assignment of a slot.
        first: first token.
        last: last token so far.
    """

    arrived: float
    queued: float
    began: float | None = None
    first: float | None = None
    last: float | None = None


def _row(
    name: str, key: str, bounds: tuple[float, ...], sentence: str, history: bool = False
) -> Metric[RequestHistograms]:
    unit = "" if bounds is TOKENS else "seconds"
    return Metric(name, key, sentence, read=lambda histograms: histograms.by_name[key], kind="histogram", bounds=bounds,
                  history=history, unit=unit)  # fmt: skip


REQUEST_METRICS = (
    _row("vllm:time_to_first_token_seconds", "time_to_first_token", FIRST_SECONDS,
         "From the arrival of a request to the first token of a sequence.", history=True),
    _row("vllm:inter_token_latency_seconds", "inter_token", SHORT_SECONDS,
         "Between two decoding steps with new tokens of a sequence, regardless of their number.", history=True),
    _row("vllm:request_time_per_output_token_seconds", "time_per_token", SHORT_SECONDS,
         "Of a finished sequence: time from its first to its last token, per token after the first."),
    _row("vllm:request_queue_time_seconds", "queue_time", LONG_SECONDS,
         "Of a finished sequence: time until it got a slot.", history=True),
    _row("vllm:request_prefill_time_seconds", "prefill_time", LONG_SECONDS,
         "Of a finished sequence: from its slot to its first token."),
    _row("vllm:request_decode_time_seconds", "decode_time", LONG_SECONDS,
         "Of a finished sequence: from its first token to its last."),
    _row("vllm:request_inference_time_seconds", "inference_time", LONG_SECONDS,
         "Of a finished sequence: from its slot to its last token."),
    _row("vllm:e2e_request_latency_seconds", "request_time", LONG_SECONDS,
         "From the arrival of a request to the last token of a sequence that finished.", history=True),
    _row("vllm:request_prompt_tokens", "prompt_length", TOKENS, "Prompt tokens of a finished sequence."),
    _row("vllm:request_generation_tokens", "completion_length", TOKENS, "Completion tokens of a finished sequence."),
    _row("vllm:request_params_max_tokens", "max_tokens", TOKENS,
         "Limit of completion tokens of a finished sequence, its max_tokens."),
)  # fmt: skip
"""Histograms of requests. The arrival of a request is the time of its first byte at a replica."""


def _empty() -> dict[str, Histogram]:
    return {row.key: Histogram(row.bounds) for row in REQUEST_METRICS}


@dataclass
class RequestHistograms:
    """Histograms by the keys of ``REQUEST_METRICS``."""

    by_name: dict[str, Histogram] = field(default_factory=_empty)

    def observe_tokens(self, lifetime: Lifetime, now: float) -> None:
        """Observe a step with new tokens of a sequence; ``inter_token`` gets one value for all of them."""
        if lifetime.last is None:
            lifetime.first = now
            self._observe("time_to_first_token", now - lifetime.arrived)
        else:
            self._observe("inter_token", now - lifetime.last)
        lifetime.last = now

    def observe_finished(self, lifetime: Lifetime, prompt: int, completion: int, max_tokens: int) -> None:
        """Observe a sequence that ended by itself: its prompt and completion tokens, and its ``max_tokens``."""
        began, first, last = lifetime.began, lifetime.first, lifetime.last
        if began is None or first is None or last is None:
            return
        self._observe("queue_time", began - lifetime.queued)
        self._observe("prefill_time", first - began)
        self._observe("decode_time", last - first)
        self._observe("inference_time", last - began)
        self._observe("request_time", last - lifetime.arrived)
        self._observe("prompt_length", prompt)
        self._observe("completion_length", completion)
        self._observe("max_tokens", max_tokens)
        if completion > 1:
            self._observe("time_per_token", (last - first) / (completion - 1))

    def copy(self) -> RequestHistograms:
        """Return a copy that no longer grows."""
        return RequestHistograms({name: histogram.copy() for name, histogram in self.by_name.items()})

    def _observe(self, name: str, value: float) -> None:
        self.by_name[name].observe(value)
