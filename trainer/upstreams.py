"""What the servers behind taps count of their drafts, as evidence for or against a canary."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from redis.exceptions import RedisError

from osd.registry.replica_loads import ReplicaLoads, UpstreamReport
from trainer.canary import Evidence

logger = logging.getLogger(__name__)

_PERIOD = 1.0


class Upstreams:
    """Reads what taps report of a ``domain``, once a second.

    Counts are of the version that drafted at both ends of a second; a second in which it was changed says nothing.
    """

    def __init__(self, loads: ReplicaLoads, domain: str) -> None:
        self._loads, self._domain = loads, domain
        self._before: dict[str, UpstreamReport] = {}
        self._next = 0.0

    def new(self) -> list[Evidence]:
        """What was shown since the call before; nothing while Redis is gone."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + _PERIOD
        try:
            now = {name: one for name, one in self._loads.upstreams().items() if one.domain == self._domain}
        except RedisError as error:
            logger.debug("upstreams cannot be read: %s", error)
            return []
        found = list(self._since(now))
        self._before = now
        return found

    def _since(self, now: dict[str, UpstreamReport]) -> Iterator[Evidence]:
        for name, report in now.items():
            before = self._before.get(name)
            if before is None or before.version != report.version or report.rounds < before.rounds:
                continue  # another version, or a server that was started anew
            rounds, accepted = report.rounds - before.rounds, report.accepted - before.accepted
            if rounds:
                yield Evidence(report.version, accepted, _tested(report) - _tested(before), rounds + accepted)


def _tested(report: UpstreamReport) -> int:
    """Draft tokens behind none that was rejected: one in each round, and one behind each accepted one but the last.

    Drafts are taken to be as long as the longest was.
    """
    last = report.accepted_per_position[-1] if report.accepted_per_position else 0
    return report.rounds + report.accepted - last
