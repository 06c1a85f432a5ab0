"""Request router of Ray Serve that prefers replicas which received the prefix of a prompt before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serving.http.affinity import Affinity, PrefixIndex


class PrefixRouter(RequestRouter):
    """Router that tries replicas in the order of ``PrefixIndex``; Ray skips full replicas."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Set the parameters; Ray calls this with the arguments that ``serving.app`` configures.

        Args:
            kwargs: ``domain``, the default domain of the service; ``imbalance``, see ``PrefixIndex.order``; and
                ``prefix_cache``, without which only the domain of a request is used.
        """
        self._prefixes = PrefixIndex(kwargs["domain"])
        self._imbalance: int = kwargs["imbalance"]
        self._prefix_cache: bool = kwargs["prefix_cache"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each, the preferred replica first; see ``RequestRouter``."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = await self._loads(candidate_replicas)
        order = self._prefixes.order(self._affinity(pending_request), loads, self._imbalance)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Index the request; see ``RequestRouter``."""
        self._prefixes.add(self._affinity(pending_request), replica_id.unique_id)

    async def _loads(self, replicas: Sequence[RunningReplica]) -> dict[str, int]:
        """Return the number of requests of each replica, from this proxy's cache or else from the replica."""
        known = {replica: self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas}
        unknown = [replica for replica, load in known.items() if load is None]
        if unknown:
            known |= dict(await self._probe_queue_lens(unknown, 0))
        # A replica that does not answer counts as full.
        return {
            replica.replica_id.unique_id: replica.max_ongoing_requests if load is None else load
            for replica, load in known.items()
        }

    def _affinity(self, request: PendingRequest | None) -> Affinity:
        if request is None:
            return Affinity()
        affinity = Affinity.read(request.metadata.session_id)
        return affinity if self._prefix_cache else affinity._replace(blocks=())
