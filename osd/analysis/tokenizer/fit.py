"""How vocabularies fit each other and the traffic: what they share, what they cover, how many tokens they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from osd.analysis.tokenizer.passages import Passage
from osd.target.vocabulary import Vocabulary

SMALLEST = 256
"""Ids of the smallest draft vocabulary that is looked at."""

SUFFICIENT = 0.99
"""Share of the held-out tokens that a suggested draft vocabulary covers."""


@dataclass(frozen=True)
class Overlap:
    """What a draft's vocabulary shares with the target's.

    ``same_ids`` are ids that stand for the same token in both, ``tokens`` those that both have under any id, and
    ``jaccard`` these over all that either has. The shares of traffic count the target's tokens by how often they came;
    None without traffic.
    """

    label: str
    same_ids: int
    tokens: int
    jaccard: float
    of_target: float
    of_draft: float
    traffic_same_ids: float | None
    traffic_tokens: float | None


def overlap(target: Vocabulary, draft: Vocabulary, counts: np.ndarray | None) -> Overlap:
    """Compare two vocabularies; ``counts`` [target ids] say how often each of the target's came."""
    same = {id for id, token in target.tokens.items() if draft.tokens.get(id) == token}
    common = target.distinct & draft.distinct
    known = {id for id, token in target.tokens.items() if token in common}
    return Overlap(
        label=draft.label,
        same_ids=len(same),
        tokens=len(common),
        jaccard=len(common) / len(target.distinct | draft.distinct),
        of_target=len(common) / len(target.distinct),
        of_draft=len(common) / len(draft.distinct),
        traffic_same_ids=None if counts is None else _share(counts, same),
        traffic_tokens=None if counts is None else _share(counts, known),
    )


def _share(counts: np.ndarray, ids: set[int]) -> float:
    return float(counts[list(ids)].sum() / counts.sum())


def counts_of(passages: Sequence[Passage], size: int) -> np.ndarray:
    """How often each id came, [size]."""
    return np.bincount(np.concatenate([passage.ids for passage in passages]), minlength=size)


@dataclass(frozen=True)
class Fertility:
    """How many tokens a tokenizer makes of a domain's text. Words are what stands between white space."""

    domain: str
    label: str
    tokens: int
    characters: int
    words: int

    @property
    def per_character(self) -> float:
        """Tokens per character."""
        return self.tokens / self.characters

    @property
    def per_word(self) -> float:
        """Tokens per word."""
        return self.tokens / self.words


def fertility(passages: Sequence[Passage], vocabularies: Sequence[Vocabulary]) -> list[Fertility]:
    """Of every domain that has a word, by each tokenizer: all of them read the same text."""
    domains: dict[str, list[str]] = {}
    for passage in passages:
        domains.setdefault(passage.domain, []).append(passage.text)
    found: list[Fertility] = []
    for domain, texts in sorted(domains.items()):
        characters, words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
        for vocabulary in vocabularies if words else ():
            tokens = sum(map(len, vocabulary.encode(texts)))
            found.append(Fertility(domain, vocabulary.label, tokens, characters, words))
    return found


@dataclass(frozen=True)
class Coverage:
    """What share of the traffic the n most frequent target ids cover.

    ``held_out`` and ``seen`` have a share for each of ``sizes``: of tokens in requests that had no part in choosing the
    ids, and of those in requests that had. ``suggested`` is the smallest of the sizes that covers ``SUFFICIENT`` of the
    held-out tokens, None where only the whole vocabulary does. ``distinct`` of all ids came at least once.
    """

    requests: int
    tokens: int
    distinct: int
    sizes: tuple[int, ...]
    held_out: tuple[float, ...]
    seen: tuple[float, ...]
    suggested: int | None


def coverage(passages: Sequence[Passage], size: int) -> Coverage:
    """Choose draft vocabularies by each half of the requests, as a drafter adapts its own, and try them on both halves.

    ``size`` is the number of the target's ids. Requests take turns in belonging to one half and the other.
    """
    halves = passages[::2], passages[1::2]
    counts = [counts_of(half, size) for half in halves]
    sizes = _sizes(size)
    held_out, seen = np.zeros(len(sizes)), np.zeros(len(sizes))
    for half, ours, others in zip(halves, counts, reversed(counts), strict=True):
        order = _most_expected(half, size)
        held_out += np.cumsum(others[order])[sizes - 1]
        seen += np.cumsum(ours[order])[sizes - 1]
    total = counts[0] + counts[1]
    tokens = int(total.sum())
    shares = held_out / tokens
    enough = [int(n) for n, share in zip(sizes, shares, strict=True) if share >= SUFFICIENT and n < size]
    return Coverage(
        requests=len(passages),
        tokens=tokens,
        distinct=int(np.count_nonzero(total)),
        sizes=tuple(map(int, sizes)),
        held_out=tuple(map(float, shares)),
        seen=tuple(map(float, seen / tokens)),
        suggested=enough[0] if enough else None,
    )


def share_covered(found: Coverage, ids: int) -> float:
    """The share of held-out tokens that ``ids`` ids cover, between the sizes that were looked at in proportion."""
    return float(np.interp(ids, found.sizes, found.held_out))


def _sizes(size: int) -> np.ndarray:
    """Powers of two below the whole vocabulary, and that."""
    powers = takewhile(lambda power: power < size, (SMALLEST << n for n in count()))
    return np.array([*powers, size])


def _most_expected(passages: Sequence[Passage], size: int) -> np.ndarray:
    """All ids, those first that were expected most; among equals the lower ones."""
    likely = np.concatenate([passage.likely for passage in passages])
    mass = np.concatenate([passage.mass for passage in passages])
    return np.argsort(-np.bincount(likely, mass, minlength=size), kind="stable")
