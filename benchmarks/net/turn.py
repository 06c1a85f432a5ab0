"""One pass of traffic through a service: what its clients saw, what it computed, and what that cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.net.service_sampler import Sample, ServiceSampler
from osd.config import DrafterSettings, MixedSettings, NoDrafterSettings, RecallDrafterSettings, Settings
from osd.metrics import acceptance_rate

PLAIN, FROZEN, TRAINED = "plain", "frozen", "trained"
RECALL, RECALL_FROZEN, RECALL_TRAINED = "recall", "recall + frozen", "recall + trained"
WAYS = (PLAIN, FROZEN, TRAINED, RECALL, RECALL_FROZEN, RECALL_TRAINED)

FIRST_VERSION = 1
"""The number of the drafter that a service starts with."""

_REQUESTS = "osd_requests"
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
_TOKENS, _BUSY, _TRAINING = "osd_completion_tokens", "osd_busy_seconds", "osd_training_cpu_seconds"
_PROMPTS, _CACHED, _WRITTEN = "osd_prompt_tokens", "vllm:prefix_cache_hits", "osd_traces_bytes"
_POINTS = 20  # of a curve


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
class Turn:
    """One pass of the traffic.

    Attributes:
        way: one of ``WAYS``.
        clients: what the clients saw, as ``benchmarks.service.serve`` counts it.
        cpu_seconds: of all processes of the service, training included; the clients are left out.
        cores: threads of the engine.
        swaps: of drafters, counted in each replica.
        versions: numbers of trained drafters, in the order in which they came into service.
        curve: from nothing to the end, at each twentieth of the requests as far as looks can tell them apart.
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
    versions: list[int]
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
) -> Turn:
    """Summarise a pass by what its clients saw, the looks at its service and what its trainer ``said``."""
    begin, end = looked.samples[0], looked.samples[-1]
    cores = settings.engine.threads or os.cpu_count() or 1
    return Turn(
        way=way,
        clients=clients,
        cpu_seconds=end.cpu_seconds - begin.cpu_seconds,
        cores=cores,
        swaps=end.count("osd_swaps") - begin.count("osd_swaps"),
        versions=versions(looked.samples, settings.domain),
        curve=curve(looked.samples, _POINTS),
        trainer=said,
        written=end.count(_WRITTEN) - begin.count(_WRITTEN),
        prompt_tokens=end.count(_PROMPTS) - begin.count(_PROMPTS),
        cached_tokens=end.count(_CACHED) - begin.count(_CACHED),
    )


def versions(samples: Sequence[Sample], domain: str) -> list[int]:
    """Return the numbers of the versions that were in service."""
    seen: list[int] = []
    for sample in samples:
        number = sample.versions.get(domain)
        if number is not None and number not in seen[-1:]:
            seen.append(number)
    return seen


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


@dataclass(frozen=True)
class Capacity:
    """What the service takes at most without drafts, by a burst of ``requests`` that came at once."""

    requests: int
    requests_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class Found:
    """What the service could take, its rate of requests, and the turns, each of them one turn of every way."""

    capacity: Capacity
    rate: float
    turns: list[dict[str, Turn]]

    @property
    def ways(self) -> list[str]:
        """The ways that were measured, in the order of ``WAYS``."""
        return [way for way in WAYS if way in self.turns[0]]

    @property
    def trained_per_second(self) -> float:
        """Tokens that a CPU second of training trains, gates included."""
        trained = [turn[way] for turn in self.turns for way in (TRAINED, RECALL_TRAINED) if way in turn]
        tokens, seconds = sum(one.trainer["tokens"] for one in trained), sum(one.end.training for one in trained)
        return tokens / seconds if seconds else 0.0


def settings_of_way(settings: Settings, way: str, home: Path | None) -> Settings:
    """Return the settings of a service that drafts in this way, on a home and a Redis of its own."""
    alone = settings.drafter.distilled
    drafters: dict[str, DrafterSettings] = {
        PLAIN: NoDrafterSettings(),
        FROZEN: alone,
        TRAINED: alone,
        RECALL: RecallDrafterSettings(recall=settings.recall),
    }
    drafter = drafters.get(way) or MixedSettings(trained=alone, recall=settings.recall)
    trainer = settings.trainer.model_copy(update={"enabled": way in (TRAINED, RECALL_TRAINED)})
    return settings.model_copy(update={"home": home, "redis_url": None, "drafter": drafter, "trainer": trainer})
