"""Which requests the drafter in training has learnt from since the last version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from osd.registry.learnt import fingerprint, fingerprints


class Learnt:
    """The requests that the drafter in training has learnt from and that no manifest names yet."""

    def __init__(self) -> None:
        self._hashes: dict[str, None] = {}

    def add(self, request_ids: Iterable[str]) -> None:
        """These were trained on."""
        self._hashes.update((fingerprint(request_id), None) for request_id in request_ids)

    def published(self) -> None:
        """A version's manifest names them now."""
        self._hashes.clear()

    def knows(self, asked: str) -> bool:
        """Whether a request is among them."""
        return not self._hashes.keys().isdisjoint(fingerprints(asked))

    def state(self) -> list[str]:
        """The hashes, for the checkpoint and for a manifest."""
        return list(self._hashes)

    def resume(self, state: Iterable[Any]) -> None:
        """Add what a checkpoint has."""
        self._hashes = {**{str(one): None for one in state}, **self._hashes}
