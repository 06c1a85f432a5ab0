"""Which requests a version has learnt from: hashes of their ids, in its manifest."""

from __future__ import annotations

import hashlib

from osd.registry.versions import Registry

_CHOICES = 1024  # of one response: ids of its records end in -0, -1, ...

REQUESTS = "requests"
"""The manifest's list: requests that were first trained on since the version before."""


def fingerprint(request_id: str) -> str:
    """A short hash of a request's id: ids are random, so that nobody can tell the one from the other."""
    return hashlib.blake2b(request_id.encode(), digest_size=8, person=b"osd-learnt").hexdigest()


def fingerprints(asked: str) -> set[str]:
    """The hashes that records of the request, or of the choices of the response, ``asked`` can have."""
    return {fingerprint(asked), *(fingerprint(f"{asked}-{index}") for index in range(_CHOICES))}


def versions_with(registry: Registry, domain: str, asked: str) -> list[int]:
    """The versions of a domain that have learnt from a request: the first that names it, and all after it.

    Each candidate goes on from the weights of the one before, so that a later version contains it too, unless training
    was begun anew in between: one version too many is named rather than one too few.
    """
    wanted = fingerprints(asked)
    infos = registry.list(domain)
    for place, info in enumerate(infos):
        named = info.manifest.get(REQUESTS)
        if isinstance(named, list) and not wanted.isdisjoint(map(str, named)):
            return [later.number for later in infos[place:]]
    return []
