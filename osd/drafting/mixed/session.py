"""The session of recall and a trained drafter together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from osd.drafting.growth import Growth
from osd.drafting.growth.chain import Chain
from osd.drafting.mixed.consulting import Candidate, Consulting
from osd.drafting.recall.session import RecallSession
from osd.drafting.session import NOBODY, Asked, EarlyHeads, Exits, Kept, Origin, Proposal, Session, Tree
from osd.recall.memory import KEPT, Found, Other
from osd.runtime.device import between, mark
from osd.runtime.top import top
from osd.verification.noise import Noise
from osd.verification.sampling import GREEDY
from osd.verification.tree import ROOT

_LEVELS = 3
"""Tokens that the trained drafter drafts at most: recall goes on from there without a call."""


@dataclass
class _Unread:
    """Tokens of a sequence that the trained drafter has not read: those of the last round, and those before it.

    It may never have been ``asked`` for the sequence.
    """

    last: int
    before: int
    asked: bool = False


class MixedSession(Session):
    """Drafts from the mixture of what both say; see ``osd.drafting.session.Session``.

    Recall drafts first. Where the trained drafter is expected to add more than its call takes, it drafts a chain of
    its most probable tokens; along that chain its distributions are mixed into recall's, and the draft is made again.
    Where it hardly ever is, most sequences do without it from their beginning to their end.
    """

    def __init__(self, recall: RecallSession, trained: Session, kind: str, calls: str) -> None:
        """Join two sessions of the same slots; ``kind`` is that of the trained drafter, see ``Drafter.calls``."""
        self._recall, self._trained, self._kind, self._calls = recall, trained, kind, calls
        self._consulting = Consulting(_LEVELS)
        self._chains = [Chain(levels) for levels in range(1, _LEVELS + 1)]
        self._unread: dict[int, _Unread] = {}  # of those for whom the trained drafter may be asked
        self._said: dict[int, Other] = {}  # in this round, by slot
        self._promised: dict[int, Sequence[float]] = {}  # the chances of what was drafted with a call, as above

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None:
        self._recall.open(slot, token, origin)
        if self._consulting.may_ask():
            self._trained.open(slot, token, origin)
            self._unread[slot] = _Unread(1, 0)

    def propose(self, asked: Asked, growth: Growth, noise: Noise) -> Proposal:
        """See ``Session.propose``; without ``Asked.worth`` the trained drafter is always asked."""
        if not any(slot in self._unread for slot in asked.slots):
            return self._recall.propose(asked, growth, noise)
        mixture = self._mixture(asked, growth, noise)
        return self._trained.ride(asked, growth, mixture, None if asked.worth is None else self._consulting.added)

    def behind(self, asked: Asked, chains: Sequence[Sequence[int]], growth: Growth) -> Proposal:
        """See ``Session.behind``: recall alone, which needs no states."""
        return self._recall.behind(asked, chains, growth)

    def _mixture(self, asked: Asked, growth: Growth, noise: Noise) -> Proposal:
        worth, several = asked.worth, len(asked.slots)
        may, followed = self._askable(asked)
        sought = self._recall.sought(asked)
        found = self._recall.draft(sought, asked, growth)
        if worth is None:
            said, exits = self._ask(asked, may, _LEVELS, noise)
            both = [replace(one, other=said.get(b)) for b, one in enumerate(sought)]
            proposal = self._recall.proposal(both, self._recall.draft(both, asked, growth), asked, self._kind)
            return replace(proposal, exits=exits)
        count = worth.best(found.chances, several)
        present = worth.after(count, sum(found.chances[:count]))
        sure = _first(found, several)
        unread = [self._unread[asked.slots[b]] for b in may]
        candidates = [
            Candidate(sure[b], one.before, asked.left[b], one.asked) for b, one in zip(may, unread, strict=True)
        ]
        consulted = self._consulting.decide(candidates, present, self._calls, followed - len(may))
        if not consulted.members:
            return self._recall.proposal(sought, found, asked, self._kind)
        members = [may[number] for number in consulted.members]
        missed = sum(candidates[number].missed for number in consulted.members)
        begun = mark(asked.device)
        said, exits = self._ask(asked, members, consulted.levels, noise)
        both = [replace(one, other=said.get(b)) for b, one in enumerate(sought)]
        better = self._recall.draft(both, asked, growth)
        seconds = between(begun, mark(asked.device))  # the second draft is made because the drafter was asked
        worth.costs.observe_proposal(self._calls, len(members), consulted.levels, seconds, missed)
        more = worth.best(better.chances, several)
        price = worth.price(max(count, more), consulted.pace)
        before, after = found.kept(count, several), better.kept(more, several)
        kept = self._consulting.kept
        gains = [_value(after[b], price, kept) - _value(before[b], price) for b in members]
        self._consulting.observe([sure[b] for b in members], gains, [len(said[b].path) for b in members])
        proposal = self._recall.proposal(both, better, asked, self._kind)
        self._promised |= {asked.slots[b]: proposal.chances[b] for b in members}
        return replace(proposal, exits=exits)

    def _askable(self, asked: Asked) -> tuple[list[int], int]:
        """Of those that may draft, whom the trained drafter may have something to say of, and how many it follows."""
        reach = self._trained.reach(asked.slots)
        both = enumerate(zip(asked.slots, asked.limits, strict=True))
        followed = [b for b, (slot, limit) in both if limit and slot in self._unread]
        return [b for b in followed if reach is None or reach.tokens[b]], len(followed)

    def _ask(
        self, asked: Asked, members: Sequence[int], levels: int, noise: Noise
    ) -> tuple[dict[int, Other], Sequence[Exits]]:
        """What the trained drafter says along its most probable tokens, by the numbers of the sequences.

        And what it ran of the target for that.
        """
        if not members:
            return {}, ()
        slots = [asked.slots[b] for b in members]
        limits = [min(levels, asked.limits[b]) for b in members]
        exits = [asked.exits[b] for b in members] if asked.exits else ()
        mine = Asked(slots, limits, [GREEDY] * len(slots), device=asked.device, exits=exits)
        chosen = noise.rows(torch.tensor(members, device=asked.device))
        proposal = self._trained.propose(mine, self._chains[levels - 1], chosen)
        paths = [tree.tokens for tree in proposal.trees] if proposal.pending is None else proposal.pending.tokens
        said = dict(zip(members, _along(proposal, paths, levels), strict=True))
        for slot, other in zip(slots, said.values(), strict=True):
            self._unread[slot] = _Unread(0, 0, asked=True)
            self._said[slot] = other
        return said, [exits.spread(members, len(asked.slots)) for exits in proposal.exits]

    def judge(self, states: Tensor) -> Tensor | None:
        """See ``Session.judge``: the trained drafter's."""
        return self._trained.judge(states)

    def early_heads(self) -> EarlyHeads | None:
        """See ``Session.early_heads``: the trained drafter's."""
        return self._trained.early_heads()

    def commit(self, slot: int, kept: Kept) -> None:
        if slot not in self._unread:
            self._recall.commit(slot, kept)
            return
        said, rows, promised = self._said.pop(slot, None), kept.rows, self._promised.pop(slot, None)
        if promised and rows is not None and len(promised) == len(rows.tree.tokens):  # it was not cut
            self._consulting.outcome(sum(promised), len(rows.path))
        others = None if said is None or rows is None else _beside(rows.tree, said)
        self._recall.remember(slot, kept, others)
        self._trained.commit(slot, kept)
        unread = self._unread[slot]
        self._unread[slot] = _Unread(len(kept.tokens), unread.before + unread.last, unread.asked)

    def close(self, slot: int) -> None:
        self._recall.close(slot)
        if self._unread.pop(slot, None) is not None:
            self._trained.close(slot)
            self._said.pop(slot, None)
            self._promised.pop(slot, None)

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        return self._trained.stage(weights)

    def load(self, staged: dict[str, Any]) -> None:
        self._trained.load(staged)
        self._consulting.renew()


def _first(found: Found, sequences: int) -> list[float]:
    """The chance of the most probable first token of each sequence, 0 where there is none."""
    sure = [0.0] * sequences
    for owner, parent, chance in zip(found.owners, found.parents, found.chances, strict=True):
        if parent == ROOT and not sure[owner]:
            sure[owner] = chance
    return sure


def _value(chances: Sequence[float], price: float, kept: float = 1.0) -> float:
    """The tokens expected of nodes with these chances, of which so many are ``kept``, less the worth of their rows."""
    return kept * sum(chances) - price * len(chances)


def _along(proposal: Proposal, paths: Sequence[list[int]], levels: int) -> list[Other]:
    """The most probable tokens before the first and after each but the last token of each path."""
    ids = torch.full((len(paths), 1 + levels, KEPT), -1)
    p = torch.zeros(len(paths), 1 + levels, KEPT)
    if proposal.logits is None:
        for b, path in enumerate(paths):
            ids[b, : len(path), 0] = torch.tensor(path)
            p[b, : len(path), 0] = 1.0
    else:
        width = proposal.logits.shape[1]
        rows = [b * width + level for b, path in enumerate(paths) for level in range(len(path))]
        if rows:
            found = top(proposal.logits, rows, KEPT, proposal.support).on_host()
            places = [b * (1 + levels) + level for b, path in enumerate(paths) for level in range(len(path))]
            kept = found.ids.shape[1]
            ids.view(-1, KEPT)[places, :kept] = found.ids
            p.view(-1, KEPT)[places, :kept] = found.logp.exp()
    return [Other(torch.tensor(path, dtype=torch.int64), ids[b], p[b]) for b, path in enumerate(paths)]


def _beside(tree: Tree, said: Other) -> tuple[Tensor, Tensor]:
    """What the trained drafter said after the root and each node of a tree, nothing where it left its path."""
    path = said.path.tolist()
    along = [0]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        level = along[1 + parent]
        along.append(level + 1 if 0 <= level < len(path) and path[level] == token else -1)
    places = torch.tensor(along)
    ids = said.ids[places].masked_fill((places < 0)[:, None], -1)
    return ids.contiguous(), said.p[places].contiguous()
