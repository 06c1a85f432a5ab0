"""One pass of traffic through a service: what its clients saw, what it computed, and what that cost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.adaptation.service_sampler import Sample
from osd.config import Settings
from osd.metrics import acceptance_rate

_REQUESTS = "osd_requests"
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
_TOKENS, _BUSY = "osd_completion_tokens", "osd_busy_seconds"
_POINTS = 20  # of a curve


@dataclass(frozen=True)
class Turn:
    """One pass of the traffic.

    Attributes:
        way: what was done, one of ``net.WAYS``.
        clients: what the clients saw, as ``benchmarks.serve`` counts it.
        tokens: of all answers, by the engine's count.
        busy_seconds: in which the engine computed.
        cpu_seconds: of all processes of the service, training included; the clients are left out.
        training_cpu_seconds: of the trainer's process.
        cores: threads of the engine.
        drafted: tokens.
        accepted: of them.
        swaps: of drafters, counted in each replica.
        versions: (seconds, version): since when each was in service, as far as looks a second apart show.
        curve: (requests, acceptance rate, tokens per busy second) of each twentieth of the requests.
        trainer: what it said of itself in the end.
    """

    way: str
    clients: dict[str, Any]
    tokens: float
    busy_seconds: float
    cpu_seconds: float
    training_cpu_seconds: float
    cores: int
    drafted: float
    accepted: float
    swaps: float
    versions: list[tuple[float, int]]
    curve: list[tuple[float, float, float]]
    trainer: dict[str, Any]

    @property
    def busy(self) -> float:
        """Share of the time that the engine computed."""
        return self.busy_seconds / self.clients["seconds"]

    @property
    def speed(self) -> float:
        """Tokens per second in which the engine computed: what it costs to serve, whatever arrives."""
        return self.tokens / self.busy_seconds

    @property
    def charged_speed(self) -> float:
        """``speed``, as if the engine had stood still while the trainer computed on all its cores."""
        return self.tokens / (self.busy_seconds + self.training_cpu_seconds / self.cores)

    @property
    def tokens_per_cpu_second(self) -> float:
        """Of all processes, training included."""
        return self.tokens / self.cpu_seconds

    @property
    def acceptance(self) -> float:
        """Accepted / drafted, 0 when nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON."""
        derived = ("busy", "speed", "charged_speed", "tokens_per_cpu_second", "acceptance")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def turn_of(
    way: str, clients: dict[str, Any], samples: Sequence[Sample], settings: Settings, said: dict[str, Any]
) -> Turn:
    """What a pass did, by what its clients saw, the looks at its service and what its trainer ``said``."""
    begin, end = samples[0], samples[-1]

    def spent(name: str) -> float:
        return end.count(name) - begin.count(name)

    versions: list[tuple[float, int]] = []
    for sample in samples:
        version = sample.versions.get(settings.domain)
        if version is not None and (not versions or versions[-1][1] != version):
            versions.append((sample.seconds, version))
    return Turn(
        way=way,
        clients=clients,
        tokens=spent(_TOKENS),
        busy_seconds=spent(_BUSY),
        cpu_seconds=end.cpu_seconds - begin.cpu_seconds,
        training_cpu_seconds=spent("osd_training_cpu_seconds"),
        cores=settings.engine.threads or os.cpu_count() or 1,
        drafted=spent(_DRAFTED),
        accepted=spent(_ACCEPTED),
        swaps=spent("osd_swaps"),
        versions=versions,
        curve=curve(samples),
        trainer=said,
    )


def curve(samples: Sequence[Sample], points: int = _POINTS) -> list[tuple[float, float, float]]:
    """(requests so far, acceptance rate, tokens per busy second) of each part, as far as looks can tell them apart."""
    begin, end = samples[0], samples[-1]
    requests = end.count(_REQUESTS) - begin.count(_REQUESTS)
    edges = [begin]
    for point in range(1, points + 1):
        goal = begin.count(_REQUESTS) + requests * point / points
        edge = end if point == points else next(sample for sample in samples if sample.count(_REQUESTS) >= goal)
        if edge.count(_BUSY) > edges[-1].count(_BUSY):
            edges.append(edge)
    found = []
    for one, two in itertools.pairwise(edges):
        drafted, accepted, tokens, busy = (
            two.count(name) - one.count(name) for name in (_DRAFTED, _ACCEPTED, _TOKENS, _BUSY)
        )
        rate = acceptance_rate(accepted, drafted)
        found.append((two.count(_REQUESTS) - begin.count(_REQUESTS), rate, tokens / busy))
    return found
