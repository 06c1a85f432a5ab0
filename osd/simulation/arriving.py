"""Requests as they come to a deployment: from a trace, or by chance and the time of day."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from osd.config import DiurnalArrivals, DomainsAssumed, Scenario, TraceArrivals
from osd.traffic.arrivals import Arrival, paced, read

_DAY = 86_400.0
_AT_ONCE = 4096  # draws


@dataclass(frozen=True)
class Asked:
    """A request: ``due`` seconds after the start, ``prompt`` and ``answer`` tokens, of a domain by its number.

    Of the prompt ``cached`` tokens need not be read.
    """

    due: float
    prompt: int
    answer: int
    domain: int
    cached: int = 0


def domain_shares(domains: DomainsAssumed) -> np.ndarray:
    """[count] of the requests; the first domain has most."""
    weights = np.arange(1, domains.count + 1, dtype=float) ** -domains.skew
    return weights / weights.sum()


def arriving(scenario: Scenario, replicas: int, traced: Sequence[Arrival] | None = None) -> Iterator[Asked]:
    """What comes to ``replicas`` together, in order and without end, or exactly what ``traced`` says, once.

    Raises:
        osd.traffic.prompt.TrafficError: a trace cannot be read.
    """
    shares = domain_shares(scenario.domains).cumsum()
    chance = np.random.default_rng([scenario.seed, 1])
    if traced is not None:
        coming: Iterator[Arrival] = iter(traced)
    else:
        coming = _ARRIVALS[scenario.arrivals.kind](scenario.arrivals, replicas, np.random.default_rng(scenario.seed))
    while batch := [one for one, _ in zip(coming, range(_AT_ONCE), strict=False)]:
        drawn = np.minimum(np.searchsorted(shares, chance.random(len(batch)), "right"), len(shares) - 1)
        for one, domain in zip(batch, drawn.tolist(), strict=True):
            prompt = max(one.prompt, 1)
            yield Asked(one.due, prompt, one.tokens, domain, int(scenario.arrivals.cached * prompt))


def _diurnal(settings: DiurnalArrivals, replicas: int, chance: np.random.Generator) -> Iterator[Arrival]:
    """Thinning (Lewis and Shedler 1979): the highest rate, and of those as many as the time of day keeps."""
    most, due = settings.rate * replicas * (1 + settings.swing), 0.0
    while True:
        gaps, kept = chance.exponential(1 / most, _AT_ONCE), chance.random(_AT_ONCE)
        prompts, answers = (
            _lengths(mean, settings.lengths, chance).tolist() for mean in (settings.prompt, settings.answer)
        )
        for gap, keep, prompt, answer in zip(gaps.tolist(), kept.tolist(), prompts, answers, strict=True):
            due += gap
            phase = 2 * math.pi * (due / _DAY + settings.begins / 24)
            if keep * (1 + settings.swing) <= 1 - settings.swing * math.cos(phase):
                yield Arrival(due, answer, prompt)


def _lengths(mean: int, spread: str, chance: np.random.Generator) -> np.ndarray:
    if spread == "constant":
        return np.full(_AT_ONCE, mean)
    return chance.geometric(1 / mean, _AT_ONCE)  # whole numbers of at least 1 with this mean


def _trace(settings: TraceArrivals, replicas: int, chance: np.random.Generator) -> Iterator[Arrival]:
    traced = read(settings.file)
    rate = settings.rate * replicas
    stretched = paced(traced, rate, max(one.tokens for one in traced))
    begin, span = 0.0, stretched[-1].due + 1 / rate
    while True:
        for one in stretched:
            yield Arrival(begin + one.due, one.tokens, one.prompt)
        begin += span


_ARRIVALS: dict[str, Callable[[Any, int, np.random.Generator], Iterator[Arrival]]] = {
    "diurnal": _diurnal,
    "trace": _trace,
}
