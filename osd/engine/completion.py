"""Completions that end where a controller judges that what comes next is wrong.

Sun et al., "When Neural Code Completion Models Size up the Situation", ICSE 2024 (arXiv 2401.09964): the text ends
before a token where, behind some layer, STOP is the controller's first choice and more probable than the request's
threshold. The first token of an answer is never judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from osd.runtime.exit_controller import STOP, confident

if TYPE_CHECKING:
    from osd.engine.pool import ActiveDrafter


@dataclass(frozen=True)
class Completing:
    """What a request asks of the controller, by probabilities above which it counts; None is as the drafter does.

    ``stop`` ends the request where it is judged to go wrong, None never; ``exit`` lets its drafts leave the target.
    Where it is ``lossy`` the answer itself leaves there, nothing is drafted for it, and its text may differ.
    """

    stop: float | None = None
    exit: float | None = None
    lossy: bool = False

    @property
    def answers_leave(self) -> float | None:
        """The probability above which tokens of the answer leave the target, None where none do."""
        return (self.exit or 0.0) if self.lossy else None


@dataclass(frozen=True)
class Judged:
    """What became of that: how many ``tokens`` were judged, and the probability that it was ``stopped`` for, if any."""

    tokens: int = 0
    stopped: float | None = None


@dataclass(frozen=True)
class Skipped:
    """What an answer left out: ``layers`` of the target did not run for its tokens, of ``all`` that else had.

    Its first token, which the prompt's last one gives, never leaves and does not count.
    """

    layers: int = 0
    all: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        """Of both together."""
        return Skipped(self.layers + other.layers, self.all + other.all)


NONE = Skipped()


def judged(
    before: Judged, stop: float, drafter: ActiveDrafter, states: Tensor | None, exempt: int, tokens: int
) -> tuple[Judged, int]:
    """Judge the next tokens of a sequence; without a controller, as of a domain with another drafter, none is.

    Args:
        before: what was judged of it so far.
        stop: its threshold.
        drafter: whose controller says it.
        states: [n, taps * hidden] of the target, the last ones before each of the tokens.
        exempt: of the tokens, as many first ones are not judged.
        tokens: how many come.

    Returns:
        What has been judged by now, and how many of the tokens stay.
    """
    odds = None if states is None or exempt >= tokens else drafter.judge(states[len(states) - tokens + exempt :])
    if odds is None:
        return before, tokens
    sure = confident(odds, STOP).amax(-1)  # [tokens - exempt] the most of all layers
    over = (sure > stop).nonzero().flatten().tolist()
    if not over:
        return Judged(before.tokens + tokens - exempt), tokens
    return Judged(before.tokens + over[0] + 1, float(sure[over[0]])), exempt + over[0]
