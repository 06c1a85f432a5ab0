"""How busy replicas are, and with what: each tells Redis, and the trainer reads when to pause and what pays.

Taps tell the same of the servers behind them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import redis
from redis.exceptions import DataError

from osd.demand import Workload
from osd.machine import machine as this_machine
from osd.redis_client import RedisClient

EXPIRY_MS = 2000
"""A replica that has not reported for so long is gone."""

WORKLOADS_EXPIRY_MS = 10_000
"""The same for what is asked of it, and for a server behind a tap."""

ATTENTION_MS = 10_000
"""For how long after a look somebody counts as looking."""

_KEY, _WORKLOADS_KEY, _UPSTREAMS_KEY = "osd:load", "osd:workloads", "osd:upstreams"

# Reports carry the server's time: the clocks of replicas and trainer may differ.
_REPORT = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now[1] * 1000 + now[2] / 1000) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return redis.call('EXISTS', KEYS[2])
"""

# It writes too: a Redis that takes no reports, because it is full or a replica, must not look like one without any.
_READ = """
local now = redis.call('TIME')
redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
local oldest = now[1] * 1000 + now[2] / 1000 - ARGV[1]
local fields = redis.call('HGETALL', KEYS[1])
local fresh = {}
for i = 1, #fields, 2 do
  local space = string.find(fields[i + 1], ' ', 1, true)
  if tonumber(string.sub(fields[i + 1], 1, space - 1)) < oldest then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    fresh[#fresh + 1] = fields[i]
    fresh[#fresh + 1] = string.sub(fields[i + 1], space + 1)
  end
end
return fresh
"""


_Said = TypeVar("_Said")


class ReplicaLoad(msgspec.Struct, frozen=True):
    """What a replica does now: requests running and waiting, its drafter version, completion tokens per second.

    ``inter_token_ms`` is the mean time between two tokens of a request since the report before, 0 without tokens.
    Since the replica started its forwards took ``forward_seconds``, and would have taken ``rest_seconds`` with the
    machine to itself.
    """

    running: int
    waiting: int
    drafter_version: int
    tokens_per_second: float
    inter_token_ms: float = 0.0
    forward_seconds: float = 0.0
    rest_seconds: float = 0.0


Workloads = dict[str, Workload]
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


class ReplicaLoads(RedisClient):
    """The loads of replicas, what is asked of them, and upstreams, in Redis hashes; each method is one round trip.

    Loads are those of one machine's replicas: what trains there takes cores from these, and from no others.

    Raises:
        redis.exceptions.RedisError: Redis does not answer, or holds something else under the key.
    """

    def __init__(self, url: str, machine: str | None = None) -> None:
        """Tell and read the loads of ``machine``'s replicas, None for this one's."""
        super().__init__(url)
        self._key = f"{_KEY}:{machine or this_machine()}"
        self._report = self._client.register_script(_REPORT)
        self._read = self._client.register_script(_READ)

    def report(self, replica_id: str, load: ReplicaLoad, workloads: Workloads | None = None) -> bool:
        """Report a replica's load, which stays for two seconds, and what is asked of it, which stays for ten.

        Says whether somebody looks at the loads.
        """
        with self._client.pipeline(transaction=False) as pipe:
            self._tell(self._key, replica_id, load, EXPIRY_MS, pipe)
            if workloads is not None:
                self._tell(_WORKLOADS_KEY, replica_id, workloads, WORKLOADS_EXPIRY_MS, pipe)
            return bool(pipe.execute()[0])

    def read(self) -> dict[str, ReplicaLoad]:
        """The loads of the machine's replicas that reported within the last two seconds.

        Raises:
            redis.exceptions.RedisError: also when Redis takes no reports now.
        """
        return self._fresh(self._key, EXPIRY_MS, ReplicaLoad)

    def workloads(self) -> dict[str, Workloads]:
        """What is asked of the replicas that reported it within the last ten seconds.

        Raises:
            redis.exceptions.RedisError: also when Redis takes no reports now.
        """
        return self._fresh(_WORKLOADS_KEY, WORKLOADS_EXPIRY_MS, Workloads)

    def report_upstream(self, name: str, report: UpstreamReport) -> None:
        """Report a server behind a tap; it stays for ten seconds."""
        self._tell(_UPSTREAMS_KEY, name, report, WORKLOADS_EXPIRY_MS, self._client)

    def upstreams(self) -> dict[str, UpstreamReport]:
        """The servers behind taps that were reported within the last ten seconds.

        Raises:
            redis.exceptions.RedisError: also when Redis takes no reports now.
        """
        return self._fresh(_UPSTREAMS_KEY, WORKLOADS_EXPIRY_MS, UpstreamReport)

    def _tell(self, key: str, name: str, said: Any, expiry_ms: int, client: redis.Redis) -> None:
        self._report([key, f"{key}:read"], [name, msgspec.json.encode(said), expiry_ms], client)

    def _fresh(self, key: str, expiry_ms: int, kind: type[_Said]) -> dict[str, _Said]:
        fields: list[bytes] = self._read(keys=[key, f"{key}:read"], args=[expiry_ms, ATTENTION_MS])
        try:
            return {
                name.decode(): msgspec.json.decode(data, type=kind)
                for name, data in zip(fields[::2], fields[1::2], strict=True)
            }
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(f"replica loads: {error}") from None
