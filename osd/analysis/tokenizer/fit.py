"""Overlap of vocabularies, their coverage of the traffic, and the number of tokens that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from osd.analysis.tokenizer.passages import Passage
from osd.target.vocabulary import Vocabulary

SMALLEST = 256
"""Number of ids of the smallest draft vocabulary in the analysis."""

SUFFICIENT = 0.99
"""Share of the held-out tokens that a suggested draft vocabulary covers."""


@dataclass(frozen=True)
class VocabularyOverlap:
    """Overlap of a draft vocabulary with the target's.

    Attributes:
        label: name of the draft vocabulary.
        same_ids: number of ids with the same token in both vocabularies.
        tokens: number of common tokens, under any id.
        jaccard: common tokens divided by all tokens of both vocabularies.
        of_target: share of the target's tokens that are common.
        of_draft: share of the draft's tokens that are common.
        traffic_same_ids: share of the traffic in ids with the same token; None without traffic.
        traffic_tokens: share of the traffic in common tokens; None without traffic.
    """

    label: str
    same_ids: int
    tokens: int
    jaccard: float
    of_target: float
    of_draft: float
    traffic_same_ids: float | None
    traffic_tokens: float | None


def overlap(target: Vocabulary, draft: Vocabulary, counts: np.ndarray | None) -> VocabularyOverlap:
    """Compare two vocabularies; ``counts`` [target ids] has the frequency of each id in the traffic."""
    same = {id for id, token in target.tokens.items() if draft.tokens.get(id) == token}
    common = target.distinct & draft.distinct
    known = {id for id, token in target.tokens.items() if token in common}
    return VocabularyOverlap(
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
    """Return the number of occurrences of each token id in the passages, [size]."""
    return np.bincount(np.concatenate([passage.ids for passage in passages]), minlength=size)


@dataclass(frozen=True)
class Fertility:
    """Number of tokens that a tokenizer needs for the text of a domain; white space separates words."""

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
    """Return the fertility of each tokenizer for each domain with at least a word; all read the same text."""
    domains: dict[str, list[str]] = {}
    for passage in passages:
        domains.setdefault(passage.domain, []).append(passage.text)
    results: list[Fertility] = []
    for domain, texts in sorted(domains.items()):
        characters, words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
        for vocabulary in vocabularies if words else ():
            tokens = sum(map(len, vocabulary.encode(texts)))
            results.append(Fertility(domain, vocabulary.label, tokens, characters, words))
    return results


@dataclass(frozen=True)
class Coverage:
    """Share of the traffic that the most frequent target ids cover.

    Attributes:
        requests: number of requests.
        tokens: number of tokens.
        distinct: number of ids that occur.
        sizes: sizes of draft vocabularies.
        held_out: covered share for each size, in requests that were not used to choose the ids.
        seen: covered share for each size, in the requests that were used to choose the ids.
        suggested: smallest size that covers ``SUFFICIENT`` of the held-out tokens; None if only the whole vocabulary
            does.
    """

    requests: int
    tokens: int
    distinct: int
    sizes: tuple[int, ...]
    held_out: tuple[float, ...]
    seen: tuple[float, ...]
    suggested: int | None


def coverage(passages: Sequence[Passage], size: int) -> Coverage:
    """Choose draft vocabularies on each half of the requests, as a drafter does, and evaluate them on both halves.

    Requests belong to the two halves in turn. ``size`` is the number of the target's ids.
    """
    halves = passages[::2], passages[1::2]
    counts = [counts_of(half, size) for half in halves]
    sizes = _sizes(size)
    held_out, seen = np.zeros(len(sizes)), np.zeros(len(sizes))
    for half, seen_counts, held_out_counts in zip(halves, counts, reversed(counts), strict=True):
        order = _by_expected_frequency(half, size)
        held_out += np.cumsum(held_out_counts[order])[sizes - 1]
        seen += np.cumsum(seen_counts[order])[sizes - 1]
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


def share_covered(covered: Coverage, ids: int) -> float:
    """Return the share of held-out tokens that ``ids`` ids cover, interpolated linearly between the sizes."""
    return float(np.interp(ids, covered.sizes, covered.held_out))


def _sizes(size: int) -> np.ndarray:
    """Return the powers of two below ``size``, and ``size``."""
    powers = takewhile(lambda power: power < size, (SMALLEST << n for n in count()))
    return np.array([*powers, size])


def _by_expected_frequency(passages: Sequence[Passage], size: int) -> np.ndarray:
    """Return all ids in order of decreasing expected frequency; ties are ordered by id."""
    likely = np.concatenate([passage.likely for passage in passages])
    mass = np.concatenate([passage.mass for passage in passages])
    return np.argsort(-np.bincount(likely, mass, minlength=size), kind="stable")
