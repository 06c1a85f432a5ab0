"""Which replica may have read how a prompt begins: what a proxy tells its router of a request, and what that knows."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

HEADER = b"x-session-id"
"""Ray gives its value to the router, as the session of a request. What clients say there is not passed on."""

BLOCK = 128
"""Bytes of a prompt, in JSON, that are compared at once; what is shorter has no beginning."""

_BLOCKS = 128  # of one prompt
_KNOWN = 16_384  # blocks of all prompts: 2 MiB of text
_HOLDERS = 4  # replicas that are known for one block
_DIGITS = 16


class _Named(msgspec.Struct):
    domain: str = ""


class _Asked(msgspec.Struct):
    """What of a request decides where it is best read; the replica judges the rest, and all of this too."""

    model: str = ""
    osd: _Named | None = None
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_asked = msgspec.json.Decoder(_Asked)


class Affinity(NamedTuple):
    """The ``domain`` that a request names, "" for none, and its beginning: a hash of all up to each of its ``blocks``.

    Hashes are the same in all proxies. They depend on whose request it is: what one client's prompts left in a replica
    is nobody else's.
    """

    domain: str = ""
    blocks: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: bytes, key: bytes) -> Affinity:
        """What the ``body`` of a request with the ``key`` of a client says; nothing where it is not as it should be."""
        try:
            asked = _asked.decode(body)
        except msgspec.MsgspecError:
            return cls()
        domain = asked.osd.domain if asked.osd and asked.osd.domain else asked.model.partition(":")[2]
        text = bytes(asked.tools) + bytes(asked.messages) + bytes(asked.prompt)
        blocks: list[str] = []
        link = key
        for start in range(0, min(len(text), _BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
            link = hashlib.blake2b(link + text[start : start + BLOCK], digest_size=_DIGITS // 2).digest()
            blocks.append(link.hex())
        return cls(_hashed(domain) if domain else "", tuple(blocks))

    @classmethod
    def read(cls, text: str) -> Affinity:
        """What ``str`` wrote."""
        domain, _, blocks = text.partition(".")
        return cls(domain, tuple(blocks[at : at + _DIGITS] for at in range(0, len(blocks), _DIGITS)))

    def __str__(self) -> str:
        return f"{self.domain}.{''.join(self.blocks)}"


class Beginnings:
    """Which replicas were asked last what begins how, and of which domain, in bounded memory."""

    def __init__(self, own_domain: str) -> None:
        """Take no request for one of ``own_domain``'s: all replicas serve that."""
        self._own = _hashed(own_domain)
        self._holders: OrderedDict[str, dict[str, None]] = OrderedDict()

    def add(self, affinity: Affinity, replica: str) -> None:
        """Note that ``replica`` was asked."""
        # From the end on: what is forgotten first is how the longest ones go on.
        for key in (*reversed(affinity.blocks), *self._domain(affinity)):
            holders = self._holders.pop(key, {})
            holders.pop(replica, None)
            holders[replica] = None
            if len(holders) > _HOLDERS:
                del holders[next(iter(holders))]
            self._holders[key] = holders
        while len(self._holders) > _KNOWN:
            self._holders.popitem(last=False)

    def __len__(self) -> int:
        return len(self._holders)

    def knows(self, block: str) -> bool:
        """Whether a replica was asked something that begins so."""
        return block in self._holders

    def order(self, affinity: Affinity, loads: Mapping[str, int], imbalance: int) -> list[str]:
        """The replicas in the order in which to ask them; ``loads`` are the requests that each one has.

        Nobody is preferred who has more than ``imbalance`` requests more than the one with fewest. Of the others come
        first those that have read most of the beginning, then those that had requests of the domain, then the idlest.
        Of equals the beginning decides, by rendezvous hashing (Thaler and Ravishankar, 1998): all proxies agree.
        """
        least = min(loads.values(), default=0)
        near = {replica for replica, load in loads.items() if load <= least + imbalance}
        read = self._read(affinity.blocks, near)
        had = {replica for key in self._domain(affinity) for replica in self._holders.get(key, ())}
        turn = affinity.blocks[0] if affinity.blocks else secrets.token_hex(_DIGITS // 2)

        def preference(replica: str) -> tuple[bool, int, bool, int, str]:
            depth, of_domain = read.get(replica, 0), replica in had
            return replica not in near, -depth, not of_domain, loads[replica], _hashed(replica + turn)

        return sorted(loads, key=preference)

    def _domain(self, affinity: Affinity) -> Sequence[str]:
        return [f".{affinity.domain}"] if affinity.domain and affinity.domain != self._own else []

    def _read(self, blocks: Sequence[str], replicas: Collection[str]) -> dict[str, int]:
        """How many blocks each of ``replicas`` was asked before."""
        found: dict[str, int] = {}
        for depth, block in enumerate(blocks, 1):
            holders = self._holders.get(block)
            if not holders:
                break
            found.update({replica: depth for replica in holders if replica in replicas})
        return found


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGITS // 2).hexdigest()
