"""Completions that a controller may stop, and lossy answers, whose tokens leave the target early.

Sun et al., "When Neural Code Completion Models Size up the Situation", ICSE 2024 (arXiv 2401.09964). The text ends
before a token if STOP is the controller's most probable decision behind some layer, with a probability above the
request's threshold. The first token of an answer is never judged. ``osd.runtime.exit_rule`` runs the rows that leave
early.

The rest of the engine uses ``Request.is_exact``, ``SequenceState.completion``, ``EarlyAnswers`` and the number of
skipped layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from osd.runtime.exit_controller import STOP, confident

if TYPE_CHECKING:
    from osd.engine.domain_drafters import ActiveDrafter


@dataclass(frozen=True)
class ControllerOptions:
    """Thresholds of a request for the controller's decisions.

    Attributes:
        stop: probability above which a STOP ends the request; None never ends it.
        exit: probability above which an EXIT lets a draft token leave the target; None keeps the drafter's default.
        lossy: whether the tokens of the answer itself may leave the target. Then nothing is drafted for the request,
            and its text may differ from the target's.
    """

    stop: float | None = None
    exit: float | None = None
    lossy: bool = False


@dataclass(frozen=True)
class JudgedTokens:
    """Number of judged ``tokens`` of a request; ``stopped`` is the probability of the STOP that ended it, if any."""

    tokens: int = 0
    stopped: float | None = None


@dataclass(frozen=True)
class SkippedLayers:
    """Target ``layers`` that did not run for the tokens of an answer, of ``all`` layers for these tokens.

    The first token does not count: it comes from the last token of the prompt, which never leaves the target.
    """

    layers: int = 0
    all: int = 0

    def __add__(self, other: SkippedLayers) -> SkippedLayers:
        """Return the sum of both."""
        return SkippedLayers(self.layers + other.layers, self.all + other.all)


class CompletionState:
    """Controller state of one request: ``judged`` and ``skipped``, each None if the request does not use it."""

    def __init__(self, options: ControllerOptions) -> None:
        self._stop = options.stop or 0.0
        self.judged = None if options.stop is None else JudgedTokens()
        self.skipped = SkippedLayers() if options.lossy else None

    def judge(self, drafter: ActiveDrafter | None, states: Tensor | None, tokens: int, exempt: int) -> int:
        """Return how many of the next ``tokens`` tokens stay in the text.

        Args:
            drafter: source of the controller; without a controller all tokens stay.
            states: [n, taps * hidden] of the target; the last ``tokens`` rows precede the tokens.
            tokens: number of tokens.
            exempt: number of first tokens that are not judged.
        """
        if self.judged is None or drafter is None or states is None or exempt >= tokens:
            return tokens
        odds = drafter.judge(states[len(states) - tokens + exempt :])
        if odds is None:
            return tokens
        confidence = confident(odds, STOP).amax(-1)  # [tokens - exempt], the maximum over the layers
        stops = (confidence > self._stop).nonzero().flatten().tolist()
        if not stops:
            self.judged = JudgedTokens(self.judged.tokens + tokens - exempt)
            return tokens
        self.judged = JudgedTokens(self.judged.tokens + stops[0] + 1, float(confidence[stops[0]]))
        return exempt + stops[0]

    def clear_stop(self) -> None:
        """Discard the last STOP, because the text ended before that token."""
        if self.judged is not None:
            self.judged = replace(self.judged, stopped=None)

    def count_skipped(self, skipped: SkippedLayers) -> None:
        """Add the layers that the last token skipped."""
        if self.skipped is not None:
            self.skipped += skipped
