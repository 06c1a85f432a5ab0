"""Loads of replicas and their work for each domain, which the trainer reads from Redis to pause and to spend.

Taps report the servers behind them in the same way.
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
"""A replica that has not reported for so long is gone."""

WORK_EXPIRY_MS = 10_000
"""The same for its work, and for a server behind a tap."""

ATTENTION_MS = 10_000
"""For how long after a look somebody counts as looking."""

_GLANCE_MS = 1

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_KEY, _WORK_KEY, _UPSTREAMS_KEY = "osd:load", "osd:work", "osd:upstreams"
_EFFECTS_KEY = "osd:effects"
_EFFECTS_EXPIRY_MS = 10_000


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What a replica does now: requests running and waiting, its drafter version, completion tokens per second.

    ``inter_token_ms`` is the mean time between two tokens of a request since the report before, 0 without tokens.
    Since the replica started its decoding ``steps``, with so many ``rows`` in all, took ``step_seconds``.
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
    """Work of a replica for a drafter's domain since the replica started.

    Attributes:
        busy: seconds of decoding steps.
        uptake: mean core seconds of taking up a version: to read, check and stage it, and while steps wait for it.
    """

    busy: float
    uptake: float = 0.0


Work = dict[str, DomainWork]
"""By drafter domain."""


class UpstreamReport(msgspec.Struct, frozen=True):
    """What a tap knows of the server behind it, at a ``time`` in seconds since the epoch.

    ``version`` of ``domain`` drafts there, 0 where it does not say. The counts are since the server, or the tap, was
    started: ``rounds`` drafted tokens of one sequence each, ``accepted_per_position[i]`` were accepted at depth ``i``.
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


class DomainEffects(msgspec.Struct, frozen=True):
    """Measured effects of a domain's drafter versions in one replica.

    Attributes:
        comparison: the version on trial against the stable version; None without a trial.
    """

    comparison: Comparison | None = None


Effects = dict[str, DomainEffects]
"""By drafter domain."""


@cache
def this_machine() -> str:
    """Return a name of this machine that containers on it share, and that no other machine has; a reboot changes it."""
    try:
        found = _BOOT_ID.read_text()
    except OSError:
        found = socket.gethostname()
    return hashlib.sha256(found.encode()).hexdigest()[:16]


class ReplicaLoads(RedisClient):
    """The loads of replicas, their work, and upstreams, in Redis hashes; each method is one round trip.

    Loads are those of one machine's replicas: what trains there takes cores from these, and from no others.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, takes no reports now (also from methods that only read), or
            holds something else under the key.
    """

    def __init__(self, url: str, machine: str | None = None) -> None:
        """Tell and read the loads of ``machine``'s replicas, None for this one's."""
        super().__init__(url)
        self._key = f"{_KEY}:{machine or this_machine()}"
        self._loads = LiveReports(self._client, self._key, ReplicaLoad, "replica loads")
        self._work = LiveReports(self._client, _WORK_KEY, Work, "work of replicas")
        self._upstreams = LiveReports(self._client, _UPSTREAMS_KEY, UpstreamReport, "upstreams")
        self._effects = LiveReports(self._client, _EFFECTS_KEY, Effects, "effects of versions")

    def report(self, replica_id: str, load: ReplicaLoad, work: Work | None = None) -> bool:
        """Report a replica's load, which stays for two seconds, and its work, which stays for ten.

        Says whether somebody looks at the loads.
        """
        with self._client.pipeline(transaction=False) as pipe:
            self._loads.tell(replica_id, load, EXPIRY_MS, pipe)
            if work is not None:
                self._work.tell(replica_id, work, WORK_EXPIRY_MS, pipe)
            return bool(pipe.execute()[0])

    def read(self, glance: bool = False) -> dict[str, ReplicaLoad]:
        """The loads of the machine's replicas that reported within the last two seconds.

        Replicas report as often as who looks needs it, once a second where nobody does more than ``glance``.
        """
        return self._loads.read(EXPIRY_MS, _GLANCE_MS if glance else ATTENTION_MS)

    def work(self) -> dict[str, Work]:
        """Return the work of the replicas that reported it within the last ten seconds."""
        return self._work.read(WORK_EXPIRY_MS, ATTENTION_MS)

    def report_upstream(self, name: str, report: UpstreamReport) -> None:
        """Report a server behind a tap; it stays for ten seconds."""
        self._upstreams.tell(name, report, WORK_EXPIRY_MS)

    def upstreams(self) -> dict[str, UpstreamReport]:
        """The servers behind taps that were reported within the last ten seconds."""
        return self._upstreams.read(WORK_EXPIRY_MS, ATTENTION_MS)

    def report_effects(self, replica_id: str, effects: Effects) -> None:
        """Report what a replica measured of drafter versions; the report expires after ten seconds."""
        self._effects.tell(replica_id, effects, _EFFECTS_EXPIRY_MS)

    def effects(self) -> dict[str, Effects]:
        """Return what replicas measured of drafter versions, as reported within the last ten seconds."""
        return self._effects.read(_EFFECTS_EXPIRY_MS, ATTENTION_MS)
