"""What each threshold saves, and costs: of completions that stop, and of drafts and answers that leave early."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""As the paper sweeps them, and 1, above which nothing is."""

LOSSY = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of answers that leave early."""

WRONG, NEAR = 0.3, 0.9
"""Similarities to the reference below which a completion went wrong, and from which on it is nearly right."""

RIGHT = {
    "not wrong": lambda one: one.similar >= WRONG,
    "nearly right": lambda one: one.similar >= NEAR,
    "exact": lambda one: one.exact,
}
"""What may be meant by a completion that is right."""

_SPOILT = 0.02
"""Of the completions that are right, that may be stopped."""

_LOST = 0.01
"""Of ROUGE-L, that answers may lose by leaving early."""


@dataclass(frozen=True)
class Completed:
    """One greedy completion of n tokens.

    ``similar`` is its edit similarity to the reference, by the tokens' text, and ``exact`` whether it is the same.
    ``stops`` [n] are the probabilities of STOP where that is the controller's first choice, else 0.
    """

    said: tuple[int, ...]
    reference: tuple[int, ...]
    similar: float
    exact: bool
    stops: tuple[float, ...]

    def kept(self, threshold: float) -> int:
        """Tokens before the first that is judged to be wrong; the first one never is."""
        return next((at for at, p in enumerate(self.stops) if at and p > threshold), len(self.said))


@dataclass(frozen=True)
class Stops:
    """Completions that end above a ``threshold``: the share of those that went wrong, and of those that are ``right``.

    The latter by what is meant by it. ``saved`` is the share of tokens not generated, ``rouge`` and ``exact`` are over
    all completions.
    """

    threshold: float
    wrong: float
    right: dict[str, float]
    saved: float
    rouge: float
    exact: float


def rouge_l(said: Sequence[int], reference: Sequence[int]) -> float:
    """F1 of the longest common subsequence (Lin, "ROUGE", 2004), over tokens."""
    row = [0] * (len(reference) + 1)
    for token in said:
        before = 0
        for at, other in enumerate(reference, 1):
            here = row[at]
            row[at] = before + 1 if token == other else max(row[at], row[at - 1])
            before = here
    return 2 * row[-1] / (len(said) + len(reference)) if said else 0.0


def stops_at(completed: Sequence[Completed], threshold: float) -> Stops:
    """What ends above a threshold."""

    def share(some: Sequence[Completed]) -> float:
        return statistics.mean(one.kept(threshold) < len(one.said) for one in some) if some else 0.0

    kept = [one.kept(threshold) for one in completed]
    return Stops(
        threshold,
        share([one for one in completed if one.similar < WRONG]),
        {name: share([one for one in completed if is_right(one)]) for name, is_right in RIGHT.items()},
        1 - sum(kept) / sum(len(one.said) for one in completed),
        statistics.mean(rouge_l(one.said[:n], one.reference) for one, n in zip(completed, kept, strict=True)),
        statistics.mean(one.exact and n == len(one.said) for one, n in zip(completed, kept, strict=True)),
    )


def sparing(chosen: Sequence[Completed], name: str) -> float:
    """The lowest threshold that ends no more than 2% of the completions ``chosen`` that are right by that ``name``."""
    most = sorted((max(one.stops[1:], default=0.0) for one in chosen if RIGHT[name](one)), reverse=True)
    return most[int(_SPOILT * len(most))] if most else 1.0


@dataclass(frozen=True)
class Answered:
    """A completion that may have left early: its tokens, and the share of layers that did not run for them."""

    said: tuple[int, ...]
    skipped: float


@dataclass(frozen=True)
class Lossy:
    """Answers that leave above a ``threshold``; ``same`` is the share of tokens that are those of the target alone."""

    threshold: float
    skipped: float
    same: float
    rouge: float
    exact: float


def lossy_at(completed: Sequence[Completed], answers: Sequence[Answered], threshold: float) -> Lossy:
    """What comes of answers to the same prefixes as those of ``completed``, which never leave."""
    both = list(zip(completed, answers, strict=True))
    return Lossy(
        threshold,
        statistics.mean(mine.skipped for mine in answers),
        statistics.mean(a == b for one, mine in both for a, b in zip(one.said, mine.said, strict=True)),
        statistics.mean(rouge_l(mine.said, one.reference) for one, mine in both),
        statistics.mean(mine.said == one.reference for one, mine in both),
    )


def keeping(curve: Sequence[Lossy], plain: float) -> float:
    """The lowest threshold of a ``curve`` from which on answers lose at most 1% of the ``plain`` ROUGE-L."""
    lowest = 1.0
    for one in sorted(curve, key=lambda one: -one.threshold):
        if one.rouge < (1 - _LOST) * plain:
            break
        lowest = one.threshold
    return lowest
