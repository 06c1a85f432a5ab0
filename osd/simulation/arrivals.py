"""Arrivals of requests at a deployment: from a trace, or random with a daily rhythm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from osd.config import DiurnalArrivals, DomainAssumptions, Scenario, TraceArrivals
from osd.traffic.arrivals import Arrival, paced, read

_DAY = 86_400.0
_BATCH = 4096  # random draws at once


@dataclass(frozen=True)
class SimulatedRequest:
    """Request of a simulation.

    Attributes:
        due: arrival in seconds after the start.
        prompt: tokens of the prompt.
        answer: tokens of the answer.
        domain: number of the domain.
        cached: tokens of the prompt that are in the KV cache already.
    """

    due: float
    prompt: int
    answer: int
    domain: int
    cached: int = 0


def domain_shares(domains: DomainAssumptions) -> np.ndarray:
    """Return the share of requests of each domain [count]; the first domain has the largest."""
    weights = np.arange(1, domains.count + 1, dtype=float) ** -domains.skew
    return weights / weights.sum()


def generate_requests(
    scenario: Scenario, replicas: int, traced: Sequence[Arrival] | None = None
) -> Iterator[SimulatedRequest]:
    """Yield the requests of all replicas in order of arrival, without end; with ``traced`` only its requests.

    Args:
        scenario: arrivals and domains.
        replicas: number of replicas, which multiplies the rate.
        traced: requests to use in place of the scenario's arrivals.

    Raises:
        osd.traffic.prompt.TrafficError: a trace cannot be read.
    """
    shares = domain_shares(scenario.domains).cumsum()
    chance = np.random.default_rng([scenario.seed, 1])
    if traced is not None:
        arrivals: Iterator[Arrival] = iter(traced)
    else:
        arrivals = _ARRIVALS[scenario.arrivals.kind](scenario.arrivals, replicas, np.random.default_rng(scenario.seed))
    while batch := list(islice(arrivals, _BATCH)):
        drawn = np.minimum(np.searchsorted(shares, chance.random(len(batch)), "right"), len(shares) - 1)
        for arrival, domain in zip(batch, drawn.tolist(), strict=True):
            prompt = max(arrival.prompt, 1)
            yield SimulatedRequest(arrival.due, prompt, arrival.tokens, domain, int(scenario.arrivals.cached * prompt))


def _diurnal(settings: DiurnalArrivals, replicas: int, chance: np.random.Generator) -> Iterator[Arrival]:
    """Yield Poisson arrivals at the highest rate, thinned by the time of day (Lewis and Shedler 1979)."""
    most, due = settings.rate * replicas * (1 + settings.swing), 0.0
    while True:
        gaps, kept = chance.exponential(1 / most, _BATCH), chance.random(_BATCH)
        prompts, answers = (
            _lengths(mean, settings.lengths, chance).tolist() for mean in (settings.prompt, settings.answer)
        )
        for gap, keep, prompt, answer in zip(gaps.tolist(), kept.tolist(), prompts, answers, strict=True):
            due += gap
            phase = 2 * math.pi * (due / _DAY + settings.begins / 24)
            if keep * (1 + settings.swing) <= 1 - settings.swing * math.cos(phase):
                yield Arrival(due, answer, prompt)


def _lengths(mean: int, distribution: str, chance: np.random.Generator) -> np.ndarray:
    if distribution == "constant":
        return np.full(_BATCH, mean)
    return chance.geometric(1 / mean, _BATCH)  # integers of at least 1 with this mean


def _trace(settings: TraceArrivals, replicas: int, chance: np.random.Generator) -> Iterator[Arrival]:
    traced = read(settings.file)
    rate = settings.rate * replicas
    stretched = paced(traced, rate, max(arrival.tokens for arrival in traced))
    begin, span = 0.0, stretched[-1].due + 1 / rate
    while True:
        for arrival in stretched:
            yield Arrival(begin + arrival.due, arrival.tokens, arrival.prompt)
        begin += span


_ARRIVALS: dict[str, Callable[[Any, int, np.random.Generator], Iterator[Arrival]]] = {
    "diurnal": _diurnal,
    "trace": _trace,
}
