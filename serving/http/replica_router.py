"""Ray Serve's router of requests to replicas, in each proxy: to those that have read how a prompt begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serving.http.affinity import Affinity, Beginnings


class BeginningsRouter(RequestRouter):
    """Asks replicas in the order of ``Beginnings``; one that is full is passed over."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray with what ``serving.app`` says: the service's own ``domain``, ``imbalance``, ``prefix_cache``.

        Without the latter nothing is kept of how prompts begin, and requests are told apart by their domains alone.
        """
        self._beginnings = Beginnings(kwargs["domain"])
        self._imbalance: int = kwargs["imbalance"]
        self._prefix_cache: bool = kwargs["prefix_cache"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """See ``RequestRouter``: one replica in each rank, the best one first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = await self._loads(candidate_replicas)
        order = self._beginnings.order(self._affinity(pending_request), loads, self._imbalance)
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See ``RequestRouter``."""
        self._beginnings.add(self._affinity(pending_request), replica_id.unique_id)

    async def _loads(self, replicas: Sequence[RunningReplica]) -> dict[str, int]:
        """The requests of each replica: as this proxy knows them, else as the replica says."""
        known = {replica: self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas}
        unknown = [replica for replica, load in known.items() if load is None]
        if unknown:
            known |= dict(await self._probe_queue_lens(unknown, 0))
        # Who does not answer now comes behind all others.
        return {
            replica.replica_id.unique_id: replica.max_ongoing_requests if load is None else load
            for replica, load in known.items()
        }

    def _affinity(self, request: PendingRequest | None) -> Affinity:
        if request is None:
            return Affinity()
        said = Affinity.read(request.metadata.session_id)
        return said if self._prefix_cache else said._replace(blocks=())
