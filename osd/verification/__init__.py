"""Lossless verification: draft trees, noise, sampling settings, and the rules by name."""

from __future__ import annotations

from osd.verification.base import Rule, Verdict
from osd.verification.chains import Block, Chain
from osd.verification.descent import GreedyMultidraft, KSeq, Naive
from osd.verification.siblings import Siblings
from osd.verification.traversal import Traversal

VERIFICATIONS: dict[str, Rule] = {
    rule.name: rule for rule in (Chain(), Block(), Siblings(), Traversal(), Naive(), GreedyMultidraft(), KSeq())
}

__all__ = ["VERIFICATIONS", "Rule", "Verdict"]
