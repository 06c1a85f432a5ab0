"""What was said, as it travels: pieces of texts as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from osd.recall.memory import ORDERS

LONGEST = 1000
"""Token ids of a record at most, contexts included."""
_HEAD = 2


@dataclass
class Fragment:
    """``tokens`` that a target said after ``context``, which are the last few tokens before them."""

    context: Sequence[int]
    tokens: list[int]

    @property
    def end(self) -> list[int]:
        """The context of what comes next."""
        return [*self.context, *self.tokens][-ORDERS:]


def encoded(fragments: Iterable[Fragment]) -> Iterator[bytes]:
    """Records of at most ``LONGEST`` ids: of each fragment two lengths, context and tokens, 32 bits little-endian."""
    record: list[int] = []
    for fragment in fragments:
        rest = fragment
        while rest.tokens:
            if len(record) + _HEAD + ORDERS >= LONGEST:
                yield _packed(record)
                record = []
            room = LONGEST - len(record) - _HEAD - len(rest.context)
            part = Fragment(rest.context, rest.tokens[:room])
            record += len(part.context), len(part.tokens), *part.context, *part.tokens
            rest = Fragment(part.end, rest.tokens[room:])
    if record:
        yield _packed(record)


def decoded(data: bytes, vocabulary: int) -> list[Fragment]:
    """The fragments of a record; none of one that is damaged or holds ids that are not below ``vocabulary``."""
    if len(data) % 4 or len(data) > 4 * LONGEST:
        return []
    numbers = np.frombuffer(data, "<i4").tolist()
    found: list[Fragment] = []
    place = 0
    while place < len(numbers):
        context, tokens = (*numbers[place : place + _HEAD], 0)[:_HEAD]
        begin = place + _HEAD + context
        place = begin + tokens
        ids = numbers[begin - context : place]
        if not (0 <= context <= ORDERS and tokens > 0 and place <= len(numbers)):
            return []
        if not all(0 <= token < vocabulary for token in ids):
            return []
        found.append(Fragment(ids[:context], ids[context:]))
    return found


def _packed(record: Sequence[int]) -> bytes:
    return np.array(record, "<i4").tobytes()
