"""Compatibility of growth policies and verification rules: together they must not bias the output."""

from __future__ import annotations

from osd.drafting.growth.base import Growth
from osd.verification.base import Rule
from osd.verification.tree import Draw

_DRAWN = {
    Draw.IID: "draws siblings with replacement",
    Draw.WITHOUT_REPLACEMENT: "draws siblings without replacement",
    Draw.TOP_THEN_DRAWN: "draws only the last of siblings",
    Draw.DETERMINISTIC: "chooses tokens without drawing them",
}


class IncompatibleError(ValueError):
    """Error of a growth policy and a verification rule that would bias the output; the message gives the reason."""


def check_compatible(growth: Growth, rule: Rule) -> None:
    """Check that ``rule`` is lossless for the drafts that ``growth`` grows.

    Raises:
        IncompatibleError: it is not; the message names both and gives the reason.
    """
    for draw in sorted(growth.draws - rule.draws, key=lambda draw: draw.code):
        # A single child is an ordinary draw from q; the way of drawing a second one does not matter.
        if not growth.chains or draw is Draw.DETERMINISTIC:
            raise IncompatibleError(_biased(growth, rule, _DRAWN[draw]))
    if rule.chains_only and not growth.chains:
        raise IncompatibleError(_biased(growth, rule, "grows trees and this rule verifies chains"))
    if rule.fixed_width and not growth.fixed_width:
        reason = "lets the tokens drawn at a node decide how many more are drawn there"
        raise IncompatibleError(_biased(growth, rule, reason))


def _biased(growth: Growth, rule: Rule, reason: str) -> str:
    return f"verification {rule.name} would bias the output: growth {growth.name} {reason}"
