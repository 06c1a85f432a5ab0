"""Savings and losses at each threshold, for completions that stop and answers that leave the target early."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""Thresholds of stopping, from the paper; no probability exceeds the last one."""

LOSSY = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds of leaving early."""

WRONG, NEAR = 0.3, 0.9
"""Edit similarities to the reference: below 0.3 a completion is wrong, from 0.9 it is nearly right."""

RIGHT = {
    "not wrong": lambda completion: completion.similar >= WRONG,
    "nearly right": lambda completion: completion.similar >= NEAR,
    "exact": lambda completion: completion.exact,
}
"""Definitions of a right completion."""

_SPOILT = 0.02  # largest share of right completions that may be stopped
_LOST = 0.01  # largest share of ROUGE-L that answers may lose by leaving early


@dataclass(frozen=True)
class ScoredCompletion:
    """Greedy completion of n tokens, compared with its reference."""

    tokens: tuple[int, ...]  # token ids of the completion
    reference: tuple[int, ...]  # token ids that follow in the text
    similar: float  # edit similarity of the two texts
    exact: bool  # True if all tokens are equal
    stops: tuple[float, ...]  # [n], the probability of STOP where it is the controller's first choice, else 0

    def kept(self, threshold: float) -> int:
        """Return the number of tokens before the first STOP above the threshold; the first token is always kept."""
        return next((index for index, p in enumerate(self.stops) if index and p > threshold), len(self.tokens))


@dataclass(frozen=True)
class StopFigures:
    """Completions that stop above a ``threshold``: shares of wrong and of right completions, and their quality.

    ``right`` has the share for each definition. ``saved`` is the share of tokens that are not generated; ``rouge`` and
    ``exact`` are means over all completions.
    """

    threshold: float
    wrong: float
    right: dict[str, float]
    saved: float
    rouge: float
    exact: float


def rouge_l(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """Return the F1 of the longest common subsequence of tokens (Lin, "ROUGE", 2004)."""
    row = [0] * (len(reference) + 1)
    for token in tokens:
        diagonal = 0
        for column, other in enumerate(reference, 1):
            above = row[column]
            row[column] = diagonal + 1 if token == other else max(row[column], row[column - 1])
            diagonal = above
    return 2 * row[-1] / (len(tokens) + len(reference)) if tokens else 0.0


def stops_at(completions: Sequence[ScoredCompletion], threshold: float) -> StopFigures:
    """Return the figures of stopping above a threshold."""

    def share(group: Sequence[ScoredCompletion]) -> float:
        return (
            statistics.mean(completion.kept(threshold) < len(completion.tokens) for completion in group)
            if group
            else 0.0
        )

    kept = [completion.kept(threshold) for completion in completions]
    return StopFigures(
        threshold,
        share([completion for completion in completions if completion.similar < WRONG]),
        {
            name: share([completion for completion in completions if is_right(completion)])
            for name, is_right in RIGHT.items()
        },
        1 - sum(kept) / sum(len(completion.tokens) for completion in completions),
        statistics.mean(
            rouge_l(completion.tokens[:n], completion.reference)
            for completion, n in zip(completions, kept, strict=True)
        ),
        statistics.mean(
            completion.exact and n == len(completion.tokens) for completion, n in zip(completions, kept, strict=True)
        ),
    )


def choose_stop_threshold(chosen: Sequence[ScoredCompletion], name: str) -> float:
    """Return the lowest threshold that stops at most 2% of the ``chosen`` completions right by definition ``name``."""
    probabilities = sorted(
        (max(completion.stops[1:], default=0.0) for completion in chosen if RIGHT[name](completion)), reverse=True
    )
    return probabilities[int(_SPOILT * len(probabilities))] if probabilities else 1.0


@dataclass(frozen=True)
class EarlyAnswer:
    """Answer that may have left the target early: its tokens, and the share of layers that did not run."""

    tokens: tuple[int, ...]
    skipped: float


@dataclass(frozen=True)
class EarlyExitFigures:
    """Answers that leave above a ``threshold``; ``same`` is the share of tokens equal to the whole target's."""

    threshold: float
    skipped: float
    same: float
    rouge: float
    exact: float


def lossy_at(
    completions: Sequence[ScoredCompletion], answers: Sequence[EarlyAnswer], threshold: float
) -> EarlyExitFigures:
    """Return the figures of answers compared with complete answers to the same prefixes."""
    pairs = list(zip(completions, answers, strict=True))
    return EarlyExitFigures(
        threshold,
        statistics.mean(answer.skipped for answer in answers),
        statistics.mean(
            a == b for completion, answer in pairs for a, b in zip(completion.tokens, answer.tokens, strict=True)
        ),
        statistics.mean(rouge_l(answer.tokens, completion.reference) for completion, answer in pairs),
        statistics.mean(answer.tokens == completion.reference for completion, answer in pairs),
    )


def choose_exit_threshold(curve: Sequence[EarlyExitFigures], plain: float) -> float:
    """Return the lowest threshold of ``curve`` from which answers lose at most 1% of the ``plain`` ROUGE-L."""
    lowest = 1.0
    for figures in sorted(curve, key=lambda figures: -figures.threshold):
        if figures.rouge < (1 - _LOST) * plain:
            break
        lowest = figures.threshold
    return lowest
