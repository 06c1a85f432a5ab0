"""Figures of one pass of traffic through a service: latencies at the clients, work done and costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.net.service_sampler import ServiceSample, ServiceSampler
from osd.config import DrafterSettings, MixedSettings, NoDrafterSettings, RecallDrafterSettings, Settings
from osd.metrics import acceptance_rate

PLAIN, FROZEN, TRAINED = "plain", "frozen", "trained"
RECALL, RECALL_FROZEN, RECALL_TRAINED = "recall", "recall + frozen", "recall + trained"
WAYS = (PLAIN, FROZEN, TRAINED, RECALL, RECALL_FROZEN, RECALL_TRAINED)

FIRST_VERSION = 1
"""Version number of the drafter at the start of a service."""

_REQUESTS = "osd_requests"
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
_TOKENS, _BUSY, _TRAINING = "osd_completion_tokens", "osd_busy_seconds", "osd_training_cpu_seconds"
_PROMPTS, _CACHED, _WRITTEN = "osd_prompt_tokens", "vllm:prefix_cache_hits", "osd_traces_bytes"
_POINTS = 20  # points of a curve


@dataclass(frozen=True)
class TrafficPoint:
    """Totals since the first sample, ``seconds`` after it; ``busy`` and ``training`` are in seconds too."""

    seconds: float
    requests: float
    tokens: float
    drafted: float
    accepted: float
    busy: float
    training: float


@dataclass(frozen=True)
class ServicePass:
    """One pass of the traffic."""

    way: str  # name from WAYS
    clients: dict[str, Any]  # figures of the clients, see benchmarks.service.serve
    cpu_seconds: float  # CPU time of all processes of the service, with training and without the clients
    cores: int  # threads of the engine
    swaps: float  # drafter swaps, counted in each replica
    versions: list[int]  # numbers of the trained drafters in the order of their activation
    curve: list[TrafficPoint]  # totals from the start to the end, at each twentieth of the requests if possible
    trainer: dict[str, Any]  # status of the trainer at the end
    written: float = 0.0  # bytes of the records on the stream
    prompt_tokens: float = 0.0  # prompt tokens of all requests
    cached_tokens: float = 0.0  # prompt tokens found in the prefix cache

    @property
    def end(self) -> TrafficPoint:
        """Totals of the whole pass."""
        return self.curve[-1]

    @property
    def busy(self) -> float:
        """Share of the time in which the engine computed."""
        return self.end.busy / self.clients["seconds"]

    @property
    def speed(self) -> float:
        """Tokens per second of engine time, which does not depend on the arrival rate."""
        return self.end.tokens / self.end.busy

    @property
    def charged_speed(self) -> float:
        """Tokens per second of engine time and training; the trainer's CPU time is divided among the engine's cores."""
        return self.end.tokens / (self.end.busy + self.end.training / self.cores)

    @property
    def tokens_per_cpu_second(self) -> float:
        """Completion tokens per CPU second of all processes of the service, with training and without the clients."""
        return self.end.tokens / self.cpu_seconds

    @property
    def acceptance(self) -> float:
        """Accepted / drafted tokens, 0 without drafts."""
        return acceptance_rate(self.end.accepted, self.end.drafted)

    def figures(self) -> dict[str, Any]:
        """Return all fields and derived figures for JSON."""
        derived = ("busy", "speed", "charged_speed", "tokens_per_cpu_second", "acceptance")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def summarize_pass(
    way: str, clients: dict[str, Any], sampler: ServiceSampler, settings: Settings, trainer: dict[str, Any]
) -> ServicePass:
    """Return the figures of a pass from its clients, the samples of its service and the status of its trainer."""
    first, last = sampler.samples[0], sampler.samples[-1]
    cores = settings.engine.threads or os.cpu_count() or 1
    return ServicePass(
        way=way,
        clients=clients,
        cpu_seconds=last.cpu_seconds - first.cpu_seconds,
        cores=cores,
        swaps=last.count("osd_swaps") - first.count("osd_swaps"),
        versions=versions(sampler.samples, settings.domain),
        curve=curve(sampler.samples, _POINTS),
        trainer=trainer,
        written=last.count(_WRITTEN) - first.count(_WRITTEN),
        prompt_tokens=last.count(_PROMPTS) - first.count(_PROMPTS),
        cached_tokens=last.count(_CACHED) - first.count(_CACHED),
    )


def versions(samples: Sequence[ServiceSample], domain: str) -> list[int]:
    """Return the version numbers that served ``domain``, in the order of the samples.

    A version that stays in service over several samples counts once. A version that returns after a rollback counts
    again. If the replicas have different versions, a sample has the oldest of them.
    """
    seen: list[int] = []
    for sample in samples:
        number = sample.versions.get(domain)
        if number is not None and number not in seen[-1:]:
            seen.append(number)
    return seen


def curve(samples: Sequence[ServiceSample], points: int) -> list[TrafficPoint]:
    """Return the totals at each of ``points`` equal parts of the requests; dense parts need dense samples."""
    first, last = samples[0], samples[-1]
    curve_points = [_point(first, first)]
    for point in range(1, points + 1):
        requests = first.count(_REQUESTS) + (last.count(_REQUESTS) - first.count(_REQUESTS)) * point / points
        sample = last if point == points else next(s for s in samples if s.count(_REQUESTS) >= requests)
        if sample.count(_BUSY) - first.count(_BUSY) > curve_points[-1].busy:
            curve_points.append(_point(first, sample))
    return curve_points


def _point(first: ServiceSample, sample: ServiceSample) -> TrafficPoint:
    names = (_REQUESTS, _TOKENS, _DRAFTED, _ACCEPTED, _BUSY, _TRAINING)
    return TrafficPoint(sample.seconds - first.seconds, *(sample.count(name) - first.count(name) for name in names))


@dataclass(frozen=True)
class BurstCapacity:
    """Throughput of the service without drafts for ``requests`` requests that arrive at once."""

    requests: int
    requests_per_second: float
    tokens_per_second: float


@dataclass(frozen=True)
class NetResults:
    """Capacity of the service, request rate, and the passes of each turn by way."""

    capacity: BurstCapacity
    rate: float
    turns: list[dict[str, ServicePass]]

    @property
    def load(self) -> float:
        """Request rate as a share of the capacity."""
        return self.rate / self.capacity.requests_per_second

    @property
    def ways(self) -> list[str]:
        """Measured ways in the order of ``WAYS``."""
        return [way for way in WAYS if way in self.turns[0]]

    @property
    def trained_per_second(self) -> float:
        """Trained tokens per CPU second of the trainer, gates included, over all passes with training; 0 for none."""
        trained = [turn[way] for turn in self.turns for way in (TRAINED, RECALL_TRAINED) if way in turn]
        tokens, seconds = sum(run.trainer["tokens"] for run in trained), sum(run.end.training for run in trained)
        return tokens / seconds if seconds else 0.0


def settings_of_way(settings: Settings, way: str, home: Path) -> Settings:
    """Return the settings of a service for a ``way`` of ``WAYS``, with ``home`` as home directory and its own Redis."""
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
