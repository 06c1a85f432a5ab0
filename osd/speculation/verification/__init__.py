"""Verification rules by name: what the target keeps of a draft. Each is lossless for the draws that it names."""

from __future__ import annotations

from osd.speculation.verification.base import Rule, Verdict
from osd.speculation.verification.block import Block
from osd.speculation.verification.chain import Chain
from osd.speculation.verification.greedy_multidraft import GreedyMultidraft
from osd.speculation.verification.k_seq import KSeq
from osd.speculation.verification.naive import Naive
from osd.speculation.verification.siblings import Siblings
from osd.speculation.verification.traversal import Traversal

VERIFICATIONS: dict[str, Rule] = {
    rule.name: rule for rule in (Chain(), Block(), Siblings(), Traversal(), Naive(), GreedyMultidraft(), KSeq())
}

__all__ = ["VERIFICATIONS", "Rule", "Verdict"]
