"""When a sequence came, began and drew its tokens, and what that adds to the histograms of all requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from osd.histogram import REQUEST_HISTOGRAMS, Histogram


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


def _empty() -> dict[str, Histogram]:
    return {name: Histogram(bounds) for name, bounds in REQUEST_HISTOGRAMS.items()}


@dataclass
class RequestHistograms:
    """Times and lengths of sequences, by the names of ``REQUEST_HISTOGRAMS``."""

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
