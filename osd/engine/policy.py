"""Speculation policy of a request."""

from __future__ import annotations

from dataclasses import dataclass

from osd.config import GrowthSettings
from osd.drafting.compatibility import check_compatible
from osd.drafting.growth import Growth, make_growth
from osd.verification import VERIFICATIONS, Rule
from osd.verification.base import Walk, follow


@dataclass(frozen=True, eq=False)
class Policy:
    """A growth policy, and a rule that is lossless for the drafts that it grows; compared by identity.

    ``walk`` verifies the drafts of greedy requests. Only measurements replace ``follow``.
    """

    growth: Growth
    rule: Rule
    walk: Walk = follow

    @classmethod
    def of(cls, growth: GrowthSettings, verification: str | None = None) -> Policy:
        """Return the policy of these settings; ``verification`` None selects the usual rule of the growth policy.

        Raises:
            ValueError: the growth settings contradict each other.
            IncompatibleError: this rule is not lossless for this growth policy.
        """
        made = make_growth(growth)
        policy = cls(made, VERIFICATIONS[verification or made.rule])
        check_compatible(made, policy.rule)
        return policy
