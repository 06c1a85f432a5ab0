"""Which requests a drafter has learnt from: hashes of their ids, which end up in the manifest of a version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from osd.registry.versions import Registry

_CHOICES = 1024  # of one response: ids of its records end in -0, -1, ...

MOST = 1_000_000
"""Requests that wait for a manifest; where no candidate ever passes the gate the oldest leave."""

REQUESTS = "requests"
"""The manifest's list: requests that were first trained on since the version before."""


def fingerprint(request_id: str) -> str:
    """A short hash of a request's id: ids are random, so that nobody can tell the one from the other."""
    return hashlib.blake2b(request_id.encode(), digest_size=8, person=b"osd-learnt").hexdigest()


def fingerprints(asked: str) -> set[str]:
    """The hashes that records of the request, or of the choices of the response, ``asked`` can have."""
    return {fingerprint(asked), *(fingerprint(f"{asked}-{index}") for index in range(_CHOICES))}


def versions_with(registry: Registry, domain: str, asked: str) -> list[int]:
    """The versions of a domain that have learnt from a request: those after the first that names it, and that one.

    The first may have been removed. Each candidate goes on from the weights of the one before, so that a later version
    contains it too, unless training was begun anew in between: one version too many is named rather than one too few.
    """
    wanted = fingerprints(asked)
    infos = registry.list(domain)
    manifests = {one.number: one.manifest for one in (*registry.removed(domain), *infos)}
    for number in sorted(manifests):
        named = manifests[number].get(REQUESTS)
        if isinstance(named, list) and not wanted.isdisjoint(map(str, named)):
            return [info.number for info in infos if info.number >= number]
    return []


class Learnt:
    """The requests that the drafter in training has learnt from and that no manifest names yet."""

    def __init__(self) -> None:
        self._hashes: dict[str, None] = {}

    def add(self, request_ids: Iterable[str]) -> None:
        """These were trained on."""
        self._hashes.update((fingerprint(request_id), None) for request_id in request_ids)
        while len(self._hashes) > MOST:
            del self._hashes[next(iter(self._hashes))]

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
