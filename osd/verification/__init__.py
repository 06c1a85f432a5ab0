"""Lossless verification: draft trees, noise, sampling settings, and the rules by name."""

from __future__ import annotations

from osd.verification.base import Rule, Verdict
from osd.verification.chains import BlockRule, ChainRule
from osd.verification.descent import GreedyMultidraftRule, KSeqRule, NaiveRule
from osd.verification.siblings import SiblingsRule
from osd.verification.traversal import TraversalRule

_RULES = (ChainRule, BlockRule, SiblingsRule, TraversalRule, NaiveRule, GreedyMultidraftRule, KSeqRule)

VERIFICATIONS: dict[str, Rule] = {rule.name: rule() for rule in _RULES}
"""The rules by name."""

__all__ = ["VERIFICATIONS", "Rule", "Verdict"]
