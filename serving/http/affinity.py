"""Prefix-aware routing: hashes of prompt prefixes, and the replicas that received them."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from osd.nesting import NestingError, check_nesting

HEADER = b"x-session-id"
"""Header that carries an ``Affinity`` to the router; Ray passes it as the session of a request.

The proxy overwrites the value that a client sends.
"""

BLOCK = 128
"""Bytes of a prompt, in JSON, in a block; a shorter prompt has no blocks."""

_BLOCKS = 128  # largest number of blocks of a prompt
_KNOWN = 16_384  # largest number of blocks of all prompts: 2 MiB of text
_HOLDERS = 4  # largest number of replicas per block
_DIGITS = 16


class _Options(msgspec.Struct):
    domain: str = ""


class _RoutedFields(msgspec.Struct):
    """Fields of a request body that decide the replica. The replica validates the body."""

    model: str = ""
    osd: _Options | None = None
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_RoutedFields)


class Affinity(NamedTuple):
    """Routing key of a request.

    Attributes:
        domain: hash of the domain that the request names; "" for none.
        blocks: for each block of the prompt, the hash of the prompt up to the end of that block.

    All proxies compute the same hashes. Hashes depend on the key of the client, because replicas do not share cached
    prompts between clients.
    """

    domain: str = ""
    blocks: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: bytes, key: bytes) -> Affinity:
        """Return the affinity of a request.

        Args:
            body: JSON body; an invalid body gives an empty affinity.
            key: Authorization header of the client.
        """
        try:
            check_nesting(body)
            fields = _decoder.decode(body)
        except (NestingError, msgspec.MsgspecError):
            return cls()
        domain = fields.osd.domain if fields.osd and fields.osd.domain else fields.model.partition(":")[2]
        text = bytes(fields.tools) + bytes(fields.messages) + bytes(fields.prompt)
        blocks: list[str] = []
        digest = key
        for start in range(0, min(len(text), _BLOCKS * BLOCK) - BLOCK + 1, BLOCK):
            digest = hashlib.blake2b(digest + text[start : start + BLOCK], digest_size=_DIGITS // 2).digest()
            blocks.append(digest.hex())
        return cls(_hash(domain) if domain else "", tuple(blocks))

    @classmethod
    def read(cls, text: str) -> Affinity:
        """Parse the text that ``str`` returns."""
        domain, _, blocks = text.partition(".")
        return cls(domain, tuple(blocks[at : at + _DIGITS] for at in range(0, len(blocks), _DIGITS)))

    def __str__(self) -> str:
        return f"{self.domain}.{''.join(self.blocks)}"


class PrefixIndex:
    """Least-recently-used index of the replicas that received a prompt prefix or a domain, in bounded memory."""

    def __init__(self, default_domain: str) -> None:
        """Create an empty index; requests for ``default_domain`` are not indexed, because all replicas serve it."""
        self._default_domain = _hash(default_domain)
        self._holders: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def add(self, affinity: Affinity, replica: str) -> None:
        """Record that ``replica`` received a request."""
        # Insert from the end, so that the ends of long prompts are evicted first.
        for key in (*reversed(affinity.blocks), *self._domain(affinity)):
            others = [holder for holder in self._holders.pop(key, ()) if holder != replica]
            self._holders[key] = (*others, replica)[-_HOLDERS:]
        while len(self._holders) > _KNOWN:
            self._holders.popitem(last=False)

    def __len__(self) -> int:
        return len(self._holders)

    def order(self, affinity: Affinity, loads: Mapping[str, int], imbalance: int) -> list[str]:
        """Return the replicas, the preferred replica first.

        Replicas with at most ``imbalance`` requests more than the least loaded replica come first. Among them the
        order is: most blocks of the prompt received, requests of the domain received, fewest requests. Rendezvous
        hashing of the first block (Thaler and Ravishankar, 1998) breaks ties, so all proxies agree.

        Args:
            affinity: routing key of the request.
            loads: number of running requests of each replica.
            imbalance: largest tolerated difference in requests.
        """
        least = min(loads.values(), default=0)
        balanced = {replica for replica, load in loads.items() if load <= least + imbalance}
        depths = self._depths(affinity.blocks, balanced)
        holders = {replica for key in self._domain(affinity) for replica in self._holders.get(key, ())}
        tie_breaker = affinity.blocks[0] if affinity.blocks else secrets.token_hex(_DIGITS // 2)

        def preference(replica: str) -> tuple[bool, int, bool, int, str]:
            depth, has_domain = depths.get(replica, 0), replica in holders
            return replica not in balanced, -depth, not has_domain, loads[replica], _hash(replica + tie_breaker)

        return sorted(loads, key=preference)

    def _domain(self, affinity: Affinity) -> Sequence[str]:
        return [f".{affinity.domain}"] if affinity.domain and affinity.domain != self._default_domain else []

    def _depths(self, blocks: Sequence[str], replicas: Collection[str]) -> dict[str, int]:
        """Return the number of leading blocks that each of ``replicas`` received before."""
        depths: dict[str, int] = {}
        for depth, block in enumerate(blocks, 1):
            holders = self._holders.get(block)
            if not holders:
                break
            depths.update({replica: depth for replica in holders if replica in replicas})
        return depths


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGITS // 2).hexdigest()
