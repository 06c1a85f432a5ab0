"""Completions that a controller may stop, and lossy answers, whose tokens leave the target early.

Sun et al., "When Neural Code Completion Models Size up the Situation", ICSE 2024 (arXiv 2401.09964). The text stops
before a token where, behind some layer, STOP is the controller's first choice and more probable than the request's
threshold. The first token of an answer is never judged. ``osd.runtime.leaving`` runs the rows that leave early.

The rest of the engine knows four things of this: ``Request.is_exact``, ``Sequence.completion``, ``EarlyAnswers``, and
how many layers were skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from osd.runtime.exit_controller import STOP, confident

if TYPE_CHECKING:
    from osd.engine.pool import ActiveDrafter


@dataclass(frozen=True)
class Completing:
    """What a request asks of the controller: probabilities above which its choice counts. None keeps the default.

    ``stop`` ends the request where the next token is judged to be wrong, None never; ``exit`` lets drafts leave the
    target. With ``lossy`` the answer itself leaves there, nothing is drafted for it, and its text may differ.
    """

    stop: float | None = None
    exit: float | None = None
    lossy: bool = False


@dataclass(frozen=True)
class Judged:
    """How many ``tokens`` of a request were judged, and the probability that it was ``stopped`` for, if any."""

    tokens: int = 0
    stopped: float | None = None


@dataclass(frozen=True)
class Skipped:
    """How many ``layers`` of the target did not run for the tokens of an answer, out of ``all`` of them.

    The first token does not count: the last token of the prompt gives it, and that never leaves.
    """

    layers: int = 0
    all: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        """Return the sum of both."""
        return Skipped(self.layers + other.layers, self.all + other.all)


class Completion:
    """State of one request that asks for the controller: what was ``judged`` and ``skipped``, None where not asked."""

    def __init__(self, asked: Completing) -> None:
        self._stop = asked.stop or 0.0
        self.judged = None if asked.stop is None else Judged()
        self.skipped = Skipped() if asked.lossy else None

    def judge(self, drafter: ActiveDrafter | None, states: Tensor | None, tokens: int, exempt: int) -> int:
        """Return how many of the next ``tokens`` of the text stay; a ``drafter`` without a controller judges none.

        The last of ``states`` [n, taps * hidden], the target's, precede the tokens. The first ``exempt`` of the tokens
        are not judged.
        """
        if self.judged is None or drafter is None or states is None or exempt >= tokens:
            return tokens
        odds = drafter.judge(states[len(states) - tokens + exempt :])
        if odds is None:
            return tokens
        sure = confident(odds, STOP).amax(-1)  # [tokens - exempt] the most of all layers
        over = (sure > self._stop).nonzero().flatten().tolist()
        if not over:
            self.judged = Judged(self.judged.tokens + tokens - exempt)
            return tokens
        self.judged = Judged(self.judged.tokens + over[0] + 1, float(sure[over[0]]))
        return exempt + over[0]

    def not_stopped(self) -> None:
        """Forget the last stop: the text had ended by itself before that token."""
        if self.judged is not None:
            self.judged = replace(self.judged, stopped=None)

    def skip(self, skipped: Skipped) -> None:
        """Count what did not run for the last token."""
        if self.skipped is not None:
            self.skipped += skipped
