"""One pass of traffic through a service: what its clients saw, what it computed, and what that cost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.adaptation.service_sampler import Sample, ServiceSampler
from osd.config import Settings
from osd.metrics import acceptance_rate

_REQUESTS = "osd_requests"
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
_TOKENS, _BUSY, _TRAINING = "osd_completion_tokens", "osd_busy_seconds", "osd_training_cpu_seconds"
_PROMPTS, _CACHED, _WRITTEN = "osd_prompt_tokens", "vllm:prefix_cache_hits", "osd_traces_bytes"
_POINTS = 20  # of a curve, for each stream


@dataclass(frozen=True)
class Point:
    """What was done ``seconds`` after the first look, since that look; ``busy`` and ``training`` are seconds too."""

    seconds: float
    requests: float
    tokens: float
    drafted: float
    accepted: float
    busy: float
    training: float


@dataclass(frozen=True)
class Version:
    """A drafter in service from ``since`` to ``until``, as far as looks a second apart show.

    The trainer expected it to save ``predicted`` seconds of a core in each second, against the one before, None where
    it did not say; by the ledger, serving with it ``saved`` so many seconds of a core, against plain decoding.
    """

    number: int
    since: float
    until: float
    predicted: float | None
    saved: float


@dataclass(frozen=True)
class Turn:
    """One pass of the traffic.

    Attributes:
        way: what was done, one of ``net.WAYS``.
        clients: what the clients saw, as ``benchmarks.serve`` counts it.
        cpu_seconds: of all processes of the service, training included; the clients are left out.
        cores: threads of the engine.
        swaps: of drafters, counted in each replica.
        versions: of trained drafters, in the order in which they came into service.
        curve: from nothing to the end, at each twentieth of a stream's requests as far as looks can tell them apart.
        trainer: what it said of itself in the end.
        written: bytes of the records on the stream.
        prompt_tokens: of all requests.
        cached_tokens: those of them that did not have to be read.
    """

    way: str
    clients: dict[str, Any]
    cpu_seconds: float
    cores: int
    swaps: float
    versions: list[Version]
    curve: list[Point]
    trainer: dict[str, Any]
    written: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0

    @property
    def end(self) -> Point:
        """All that was done."""
        return self.curve[-1]

    @property
    def busy(self) -> float:
        """Share of the time that the engine computed."""
        return self.end.busy / self.clients["seconds"]

    @property
    def speed(self) -> float:
        """Tokens per second in which the engine computed: what it costs to serve, whatever arrives."""
        return self.end.tokens / self.end.busy

    @property
    def charged_speed(self) -> float:
        """``speed``, as if the engine had stood still while the trainer computed on all its cores."""
        return self.end.tokens / (self.end.busy + self.end.training / self.cores)

    @property
    def tokens_per_cpu_second(self) -> float:
        """Of all processes, training included."""
        return self.end.tokens / self.cpu_seconds

    @property
    def acceptance(self) -> float:
        """Accepted / drafted, 0 when nothing was drafted."""
        return acceptance_rate(self.end.accepted, self.end.drafted)

    def trained_until(self, requests: float) -> float:
        """CPU seconds of training until so many requests were answered."""
        answered, trained = [point.requests for point in self.curve], [point.training for point in self.curve]
        return float(np.interp(requests, answered, trained))

    def gains(self) -> list[tuple[Version, float]]:
        """Each version but the first, and what it saved in each second beyond what the one before would have.

        In seconds of a core, by the ledger and from token to token: traffic is not always as dense. 0 for one that the
        last look alone saw, and where nothing was answered.
        """
        found: list[tuple[Version, float]] = []
        for before, one in itertools.pairwise(self.versions):
            tokens, tokens_before = self._tokens(one), self._tokens(before)
            by_token = one.saved / tokens - before.saved / tokens_before if tokens and tokens_before else 0.0
            found.append((one, by_token * tokens / (one.until - one.since) if tokens else 0.0))
        return found

    def _tokens(self, one: Version) -> float:
        """Those that were answered with a version."""
        seconds, tokens = [point.seconds for point in self.curve], [point.tokens for point in self.curve]
        since, until = np.interp([one.since, one.until], seconds, tokens)
        return float(until - since)

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON."""
        derived = ("busy", "speed", "charged_speed", "tokens_per_cpu_second", "acceptance")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def turn_of(
    way: str,
    clients: dict[str, Any],
    looked: ServiceSampler,
    settings: Settings,
    said: dict[str, Any],
    streams: int = 1,
) -> Turn:
    """What a pass did, by what its clients saw, the looks at its service and what its trainer ``said``.

    Its traffic had so many ``streams``.
    """
    begin, end = looked.samples[0], looked.samples[-1]
    cores = settings.engine.threads or os.cpu_count() or 1
    return Turn(
        way=way,
        clients=clients,
        cpu_seconds=end.cpu_seconds - begin.cpu_seconds,
        cores=cores,
        swaps=end.count("osd_swaps") - begin.count("osd_swaps"),
        versions=versions(looked.samples, looked.dashboard, settings.domain, cores),
        curve=curve(looked.samples, _POINTS * streams),
        trainer=said,
        written=end.count(_WRITTEN) - begin.count(_WRITTEN),
        prompt_tokens=end.count(_PROMPTS) - begin.count(_PROMPTS),
        cached_tokens=end.count(_CACHED) - begin.count(_CACHED),
    )


def versions(samples: Sequence[Sample], dashboard: dict[str, Any], domain: str, cores: int) -> list[Version]:
    """Those that were in service, with what the dashboard says of them."""
    seen: list[tuple[float, int]] = []
    for sample in samples:
        number = sample.versions.get(domain)
        if number is not None and (not seen or seen[-1][1] != number):
            seen.append((sample.seconds, number))
    saved = {row["version"]: cores * row["saved"] for row in dashboard["ledger"]["versions"]}
    worth = {one["number"]: one["manifest"].get("worth", {}).get("saving_rate") for one in dashboard["versions"]}
    ends = [since for since, _ in seen[1:]] + [samples[-1].seconds]
    return [
        Version(number, since, until, worth.get(number), saved.get(number, 0.0))
        for (since, number), until in zip(seen, ends, strict=True)
    ]


def curve(samples: Sequence[Sample], points: int) -> list[Point]:
    """What was done until each part of the requests was answered, as far as looks can tell them apart."""
    begin, end = samples[0], samples[-1]
    found = [_point(begin, begin)]
    for point in range(1, points + 1):
        goal = begin.count(_REQUESTS) + (end.count(_REQUESTS) - begin.count(_REQUESTS)) * point / points
        edge = end if point == points else next(sample for sample in samples if sample.count(_REQUESTS) >= goal)
        if edge.count(_BUSY) - begin.count(_BUSY) > found[-1].busy:
            found.append(_point(begin, edge))
    return found


def _point(begin: Sample, edge: Sample) -> Point:
    names = (_REQUESTS, _TOKENS, _DRAFTED, _ACCEPTED, _BUSY, _TRAINING)
    return Point(edge.seconds - begin.seconds, *(edge.count(name) - begin.count(name) for name in names))
