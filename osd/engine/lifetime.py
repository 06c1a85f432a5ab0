"""When a sequence came, began and drew its tokens, and what that adds to the histograms of all requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from osd.histogram import FIRST_SECONDS, LONG_SECONDS, SHORT_SECONDS, TOKENS, Histogram
from osd.metrics import Metric


@dataclass
class Lifetime:
    """The moments of a sequence on ``time.monotonic``, None for those that have not come.

    The request ``arrived`` with its first byte, and was ``queued`` in the engine when it had been read and encoded. It
    ``began`` with a slot, to read its prompt, and drew its ``first`` and its ``last`` token so far.
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
         "Between two rounds that gave a sequence tokens, however many came at once.", history=True),
    _row("vllm:request_time_per_output_token_seconds", "time_per_token", SHORT_SECONDS,
         "Of a finished sequence: the time from its first token to its last, by the tokens after the first."),
    _row("vllm:request_queue_time_seconds", "queue_time", LONG_SECONDS,
         "Of a finished sequence: its wait for a slot.", history=True),
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
         "Completion tokens that a finished sequence might have had."),
)  # fmt: skip
"""Histograms of requests. Times are from the first byte of a request at a replica."""


def _empty() -> dict[str, Histogram]:
    return {row.key: Histogram(row.bounds) for row in REQUEST_METRICS}


@dataclass
class RequestHistograms:
    """Times and lengths of sequences, by the keys of ``REQUEST_METRICS``."""

    by_name: dict[str, Histogram] = field(default_factory=_empty)

    def drew(self, lifetime: Lifetime, now: float) -> None:
        """A round gave a sequence tokens, which reach its client together: ``inter_token`` is one figure a round."""
        if lifetime.last is None:
            lifetime.first = now
            self._observe("time_to_first_token", now - lifetime.arrived)
        else:
            self._observe("inter_token", now - lifetime.last)
        lifetime.last = now

    def finished(self, lifetime: Lifetime, prompt: int, completion: int, most: int) -> None:
        """A sequence that drew ``completion`` tokens, of the ``most`` it might, came to its end by itself."""
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
        self._observe("max_tokens", most)
        if completion > 1:
            self._observe("time_per_token", (last - first) / (completion - 1))

    def copy(self) -> RequestHistograms:
        """The same, which no longer grow."""
        return RequestHistograms({name: histogram.copy() for name, histogram in self.by_name.items()})

    def _observe(self, name: str, figure: float) -> None:
        self.by_name[name].observe(figure)
