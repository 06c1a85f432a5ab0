"""Loads of replicas and their work for each domain, in Redis; the trainer reads them to pause and to measure savings.

Taps report their upstream servers in the same way, and so does a vLLM with capture.
"""

from __future__ import annotations

import hashlib
import socket
from functools import cache
from pathlib import Path

import msgspec

from osd.economy.report import Comparison
from osd.redis_client import LiveReports, RedisClient

EXPIRY_MS = 2000
"""Milliseconds without a report after which a replica counts as gone."""

WORK_EXPIRY_MS = 10_000
"""Validity of reports on work and on upstream servers, in milliseconds."""

ATTENTION_MS = 10_000
"""Milliseconds after a read during which replicas report frequently."""

_GLANCE_MS = 1

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_KEY, _WORK_KEY, _UPSTREAMS_KEY = "osd:load", "osd:work", "osd:upstreams"
_EFFECTS_KEY = "osd:effects"
_EFFECTS_EXPIRY_MS = 10_000


class ReplicaLoad(msgspec.Struct, frozen=True):
    """Load of a replica.

    Attributes:
        running: number of running requests.
        waiting: number of waiting requests.
        drafter_version: the drafter version in use.
        tokens_per_second: completion tokens per second.
        inter_token_ms: mean time between two tokens of a request since the last report, 0 without tokens.
        steps: number of decoding steps since the replica started.
        rows: number of rows of these steps.
        step_seconds: duration of these steps.
    """

    running: int
    waiting: int
    drafter_version: int
    tokens_per_second: float
    inter_token_ms: float = 0.0
    steps: int = 0
    rows: int = 0
    step_seconds: float = 0.0


class DomainWork(msgspec.Struct, frozen=True):
    """Work of a replica for the drafter of a domain, since the replica started.

    Attributes:
        busy: seconds of decoding steps.
        uptake: mean core seconds to load a version: to read, check and stage it, and the wait of decoding steps for it.
    """

    busy: float
    uptake: float = 0.0


WorkByDomain = dict[str, DomainWork]
"""Work by domain of the drafter."""


class UpstreamReport(msgspec.Struct, frozen=True):
    """Report of a tap on its upstream server, or of a vLLM with capture on itself.

    Counts are since the start of the server or of the tap.

    Attributes:
        time: time of the report, in seconds since the epoch.
        domain: domain of the drafter.
        version: drafter version of the domain that drafts there, 0 if unknown.
        rounds: number of drafts, one per sequence and decoding step.
        accepted_per_position: number of accepted tokens at each depth.
        traced: whether the trainer learns of the drafts in another way, by traces or by another report, so that these
            counts must not be evidence on a canary.
    """

    time: float
    domain: str = ""
    version: int = 0
    running: int = 0
    waiting: int = 0
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    rejected_versions: int = 0
    captured: int = 0
    dropped: int = 0
    traced: bool = False


class DomainEffects(msgspec.Struct, frozen=True):
    """Measured effects of a domain's drafter versions in one replica.

    Attributes:
        comparisons: the version on trial against the stable version, or that against references.
    """

    comparisons: tuple[Comparison, ...] = ()


EffectsByDomain = dict[str, DomainEffects]
"""Effects by domain of the drafter."""


@cache
def this_machine() -> str:
    """Return a name of this machine, which its containers share and no other machine has; a reboot changes it."""
    try:
        name = _BOOT_ID.read_text()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class ReplicaLoads(RedisClient):
    """Loads of replicas, their work and upstream servers, in Redis hashes; each method makes one round trip.

    Loads are read for the replicas of one machine, because training takes cores from these only.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, cannot be written (this also affects methods that read), or
            holds data of another kind under a key.
    """

    def __init__(self, url: str, machine: str | None = None) -> None:
        """Use the loads of the replicas of ``machine``, by default of this machine."""
        super().__init__(url)
        self._key = f"{_KEY}:{machine or this_machine()}"
        self._loads = LiveReports(self._client, self._key, ReplicaLoad, "replica loads")
        self._work = LiveReports(self._client, _WORK_KEY, WorkByDomain, "work of replicas")
        self._upstreams = LiveReports(self._client, _UPSTREAMS_KEY, UpstreamReport, "upstreams")
        self._effects = LiveReports(self._client, _EFFECTS_KEY, EffectsByDomain, "effects of versions")

    def report(self, replica_id: str, load: ReplicaLoad, work: WorkByDomain | None = None) -> bool:
        """Report a replica's load, valid for two seconds, and its work, valid for ten.

        Returns:
            Whether a process reads the loads at present.
        """
        with self._client.pipeline(transaction=False) as pipe:
            self._loads.write(replica_id, load, EXPIRY_MS, pipe)
            if work is not None:
                self._work.write(replica_id, work, WORK_EXPIRY_MS, pipe)
            return bool(pipe.execute()[0])

    def read(self, glance: bool = False) -> dict[str, ReplicaLoad]:
        """Return the loads of the machine's replicas that reported within the last two seconds.

        Args:
            glance: whether to leave the rate of reports unchanged. Otherwise replicas report frequently for the next
                ten seconds; without readers they report once a second.
        """
        return self._loads.read(EXPIRY_MS, _GLANCE_MS if glance else ATTENTION_MS)

    def work(self) -> dict[str, WorkByDomain]:
        """Return the work of the replicas that reported it within the last ten seconds."""
        return self._work.read(WORK_EXPIRY_MS, ATTENTION_MS)

    def report_upstream(self, name: str, report: UpstreamReport) -> None:
        """Report on an upstream server; the report is valid for ten seconds."""
        self._upstreams.write(name, report, WORK_EXPIRY_MS)

    def upstreams(self) -> dict[str, UpstreamReport]:
        """Return the reports on upstream servers of the last ten seconds."""
        return self._upstreams.read(WORK_EXPIRY_MS, ATTENTION_MS)

    def report_effects(self, replica_id: str, effects: EffectsByDomain) -> None:
        """Report the effects of drafter versions in a replica; the report is valid for ten seconds."""
        self._effects.write(replica_id, effects, _EFFECTS_EXPIRY_MS)

    def effects(self) -> dict[str, EffectsByDomain]:
        """Return the effects of drafter versions in replicas, as reported within the last ten seconds."""
        return self._effects.read(_EFFECTS_EXPIRY_MS, ATTENTION_MS)
