"""Toy drafters: a lookup, riders in the target's forward, skipped target layers, and counted token pairs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import Drafter, Needs
from osd.drafting.growth import Growth
from osd.drafting.session import ANONYMOUS, CommittedTokens, DraftRequest, Origin, Proposal, Runtime, Session, Tree
from osd.runtime.batch import consecutive_rows
from osd.runtime.model import SlotModel
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, TreeBuilder


class TextSession(Session):
    """Session without weights that keeps the text of each slot."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.texts[slot] = [token]

    def close(self, slot: int) -> None:
        del self.texts[slot]


class Lookup(Drafter):
    """Drafter that repeats the target's last most probable token after each token, and its second best at the root."""

    kind: ClassVar[str] = "lookup"
    needs = Needs(target_rows=True)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Drafter:
        return cls()

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> LookupSession:
        return LookupSession()


class LookupSession(TextSession):
    def __init__(self) -> None:
        super().__init__()
        self.top_tokens: dict[int, list[int]] = {}

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        return Proposal(
            [self._tree(*slot_and_limit) for slot_and_limit in zip(request.slots, request.limits, strict=True)]
        )

    def _tree(self, slot: int, limit: int) -> Tree:
        tokens, parents = [], []
        token, at = self.texts[slot][-1], ROOT
        while len(tokens) < limit and token in self.top_tokens:
            best, second = self.top_tokens[token]
            tokens.append(best)
            parents.append(at)
            if at == ROOT and limit > 1:
                tokens.append(second)
                parents.append(ROOT)
            token, at = best, 0 if at == ROOT else len(tokens) - 1
        return Tree(tokens, parents, [Lookup.kind] * len(tokens))

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        text = self.texts[slot]
        text += kept.tokens
        if kept.rows is not None and kept.rows.top is not None:
            after = [text[-2 - len(kept.rows.path)], *kept.rows.tree.tokens]
            self.top_tokens |= zip(after, kept.rows.top.ids[: len(after), :2].tolist(), strict=True)


class Rider(Drafter):
    """Drafter with a blank rider at each node, which drafts the prediction of the target after the rider."""

    kind: ClassVar[str] = "rider"
    needs = Needs(riders=2)
    BLANK: ClassVar[int] = 0

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Drafter:
        return cls()

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> RiderSession:
        return RiderSession()


class RiderSession(TextSession):
    def __init__(self) -> None:
        super().__init__()
        self.guesses: dict[int, int] = {}

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        return Proposal(
            [self._tree(*slot_and_limit) for slot_and_limit in zip(request.slots, request.limits, strict=True)]
        )

    def _tree(self, slot: int, limit: int) -> Tree:
        tokens = [self.guesses[slot]] if limit and slot in self.guesses else []
        above = [ROOT, *range(len(tokens))] if limit else []
        return Tree(tokens, [ROOT] * len(tokens), [Rider.kind] * len(tokens), [Rider.BLANK] * len(above), above)

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        self.texts[slot] += kept.tokens
        self.guesses.pop(slot, None)
        if kept.rows is not None and kept.rows.tree.rider_tokens:
            rider = 1 + len(kept.rows.tree.tokens) + len(kept.rows.path)
            self.guesses[slot] = int(kept.rows.logits[rider].argmax())


class Skip(Drafter):
    """Drafter that uses the target's first and last layer, with the target's keys and values."""

    kind: ClassVar[str] = "skip"
    needs = Needs(layers=range(1))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Drafter:
        return cls()

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> SkipSession:
        return SkipSession(runtime.target)


class SkipSession(TextSession):
    def __init__(self, target: SlotModel) -> None:
        super().__init__()
        self.target = target

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        drafts = [self._draft(*slot_and_limit) for slot_and_limit in zip(request.slots, request.limits, strict=True)]
        return Proposal([Tree.chain(tokens, Skip.kind) for tokens in drafts])

    def _draft(self, slot: int, limit: int) -> list[int]:
        last, wanted = len(self.target.layers) - 1, torch.zeros(1, dtype=torch.int64)
        tokens = [self.texts[slot][-1]]
        for place in range(self.target.cache.length[slot], self.target.cache.length[slot] + limit):
            rows = consecutive_rows(slot, place, tokens[-1:])
            states = self.target.forward(rows, wanted, range(1)).states
            logits = self.target.forward(rows, wanted, range(last, last + 1), states).logits
            tokens.append(int(logits[0].argmax()))
        return tokens[1:]

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        self.texts[slot] += kept.tokens


class Pairs(Drafter):
    """Drafter that draws each token by the counts of token pairs."""

    kind: ClassVar[str] = "pairs"

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Drafter:
        return cls()

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> PairsSession:
        return PairsSession(runtime)


class PairsSession(AutoregressiveSession):
    source = Pairs.kind

    def __init__(self, runtime: Runtime) -> None:
        super().__init__({}, runtime)
        self.counts = torch.zeros(runtime.target.vocabulary, runtime.target.vocabulary)
        self.last: dict[int, int] = {}

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.last[slot] = token

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        for before, token in pairwise([self.last[slot], *kept.tokens]):
            self.counts[before, token] += 1
        self.last[slot] = kept.tokens[-1]

    def close(self, slot: int) -> None:
        del self.last[slot]

    def expand(self, slots: Any, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        roots = torch.tensor([self.last[slots[row]] for row in rows.tolist()])
        before = roots if not builder.capacity else torch.where(nodes < 0, roots, builder.tokens[rows, nodes])
        return (self.counts[before] + 0.01).log()
