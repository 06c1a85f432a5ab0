"""Lossless verification: draft trees, noise, sampling settings, and the rules by name."""

from __future__ import annotations

from osd.verification.base import Rule, Verdict
from osd.verification.block import Block
from osd.verification.chain import Chain
from osd.verification.greedy_multidraft import GreedyMultidraft
from osd.verification.k_seq import KSeq
from osd.verification.naive import Naive
from osd.verification.siblings import Siblings
from osd.verification.traversal import Traversal

VERIFICATIONS: dict[str, Rule] = {
    rule.name: rule for rule in (Chain(), Block(), Siblings(), Traversal(), Naive(), GreedyMultidraft(), KSeq())
}

__all__ = ["VERIFICATIONS", "Rule", "Verdict"]
