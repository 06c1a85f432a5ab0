"""Record of the requests that a drafter was trained on, as hashes that end up in the manifest of a version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from osd.registry.versions import Registry

_MAX_CHOICES = 1024  # of one response: the ids of its records end in -0, -1, ...

MAX_REQUESTS = 1_000_000
"""Maximum number of requests that wait for a manifest; the oldest are dropped when no candidate passes the gate."""

REQUESTS = "requests"
"""Field of the manifest: the hashes of the requests that were trained on since the previous version."""


def fingerprint(request_id: str) -> str:
    """Return a short hash of a request's id; ids are random, so the hash does not reveal the id."""
    return hashlib.blake2b(request_id.encode(), digest_size=8, person=b"osd-learnt").hexdigest()


def fingerprints(request_id: str) -> set[str]:
    """Return the possible hashes of the records of a request, or of all choices of a response."""
    return {fingerprint(request_id), *(fingerprint(f"{request_id}-{index}") for index in range(_MAX_CHOICES))}


def versions_trained_on(registry: Registry, domain: str, request_id: str) -> list[int]:
    """Return the numbers of the versions of a domain that were trained on a request.

    These are the first version whose manifest lists the request, and all later versions, because each training run
    continues from the weights of the previous version. The first version may have been removed; only existing versions
    are returned. After a restart from new weights the result may contain too many versions, but never too few.
    """
    hashes = fingerprints(request_id)
    infos = registry.list(domain)
    manifests = {version.number: version.manifest for version in (*registry.removed(domain), *infos)}
    for number in sorted(manifests):
        listed = manifests[number].get(REQUESTS)
        if isinstance(listed, list) and not hashes.isdisjoint(map(str, listed)):
            return [info.number for info in infos if info.number >= number]
    return []


class TrainedRequests:
    """Hashes of the requests that the drafter was trained on since the last published manifest."""

    def __init__(self) -> None:
        self._hashes: dict[str, None] = {}

    def add(self, request_ids: Iterable[str]) -> None:
        """Add requests that the drafter was trained on."""
        self._hashes.update((fingerprint(request_id), None) for request_id in request_ids)
        while len(self._hashes) > MAX_REQUESTS:
            del self._hashes[next(iter(self._hashes))]

    def clear(self) -> None:
        """Remove all hashes after the publication of a manifest that lists them."""
        self._hashes.clear()

    def contains(self, request_id: str) -> bool:
        """Return whether the drafter was trained on a request since the last manifest."""
        return not self._hashes.keys().isdisjoint(fingerprints(request_id))

    def state(self) -> list[str]:
        """Return the hashes, for a checkpoint or a manifest."""
        return list(self._hashes)

    def resume(self, state: Iterable[Any]) -> None:
        """Add the hashes of a checkpoint; they count as older than the present hashes."""
        self._hashes = {**{str(value): None for value in state}, **self._hashes}
