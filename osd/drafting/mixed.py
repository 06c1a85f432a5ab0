"""A trained drafter together with recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from osd.drafting.base import Drafter, DrafterError, Needs
from osd.drafting.growth import Growth
from osd.drafting.growth.chain import Chain
from osd.drafting.recall.drafter import RecallSession
from osd.drafting.session import (
    ANONYMOUS,
    Capabilities,
    DraftRequest,
    Exits,
    Kept,
    Origin,
    Proposal,
    Runtime,
    Session,
    Tree,
)
from osd.economy.calls import CallGains, Candidate
from osd.recall.memory import KEPT, DraftNodes, PathProposals
from osd.runtime.device import seconds_between, timestamp
from osd.runtime.top import most_probable
from osd.verification.noise import Noise
from osd.verification.sampling import GREEDY
from osd.verification.tree import ROOT


class Mixed(Drafter):
    """Drafts from the mixture of recall and a trained drafter; a version is one of the trained drafter."""

    kind: ClassVar[str] = "mixed"

    def __init__(self, trained: Drafter) -> None:
        self.trained = trained

    @property
    def needs(self) -> Needs:
        return replace(self.trained.needs, target_rows=True)

    @property
    def calls(self) -> str:
        return f"chains of {self.trained.kind}"

    def config(self) -> dict[str, Any]:
        return self.trained.config()

    def weights(self) -> dict[str, Tensor]:
        return self.trained.weights()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.trained.load_weights(weights)

    def session(self, runtime: Runtime) -> MixedSession:
        if runtime.memories is None:
            raise DrafterError("a mixed drafter needs the memories of its domain")
        recall = RecallSession(runtime.memories, runtime)
        return MixedSession(recall, self.trained.session(runtime), self.trained.kind, self.calls)


_LEVELS = 3
"""Tokens that the trained drafter drafts at most: recall goes on from there without a call."""


@dataclass
class _Unread:
    """Tokens of a sequence that the trained drafter has not read: those of the last step, and those before it.

    It may never have been ``asked`` about the sequence.
    """

    last: int
    before: int
    asked: bool = False


class MixedSession(Session):
    """Session of recall and a trained drafter.

    Recall drafts first. Where the trained drafter is expected to add more than its call takes, it drafts a chain of its
    most probable tokens. Along that chain its distributions are mixed into recall's, and the draft is made again.
    """

    def __init__(self, recall: RecallSession, trained: Session, kind: str, calls: str) -> None:
        """Join two sessions of the same slots; ``kind`` is that of the trained drafter, see ``Drafter.calls``."""
        self._recall, self._trained, self._kind, self._calls = recall, trained, kind, calls
        self._gains = CallGains(_LEVELS)
        self._chains = [Chain(levels) for levels in range(1, _LEVELS + 1)]
        self._unread: dict[int, _Unread] = {}  # by slot
        self._said: dict[int, PathProposals] = {}  # in this round, by slot

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._recall.open(slot, token, origin)
        self._trained.open(slot, token, origin)
        self._unread[slot] = _Unread(1, 0)

    @property
    def capabilities(self) -> Capabilities:
        """See ``Session.capabilities``: the trained drafter's, and recall's drafts behind forced tokens."""
        return replace(self._trained.capabilities, continuation=self._recall)

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        """See ``Session.propose``; without prices the trained drafter is always called."""
        mixture, riders = self._mixture(request, growth, noise), self._trained.capabilities.riders
        if riders is None:
            return mixture
        return riders.ride(request, growth, mixture, None if request.prices is None else self._gains.added)

    def _mixture(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        several = len(request.slots)
        riders = self._trained.capabilities.riders
        longest = request.limits
        if riders is not None:
            longest = list(map(min, request.limits, riders.reach(request.slots).tokens))
        may = [b for b, tokens in enumerate(longest) if tokens]
        sought = self._recall.sought(request)
        found = self._recall.draft(sought, request, growth)
        if request.prices is None:
            said, exits = self._ask(request, may, _LEVELS, noise)
            both = [replace(one, other=said.get(b)) for b, one in enumerate(sought)]
            proposal = self._recall.proposal(both, self._recall.draft(both, request, growth), request, self._kind)
            return replace(proposal, exits=exits)
        step, left = request.prices.step, request.prices.left
        count = step.best(found.chances)
        sure = _first(found, several)
        unread = [self._unread[request.slots[b]] for b in may]
        candidates = [
            Candidate(sure[b], one.before, left[b], longest[b], one.asked) for b, one in zip(may, unread, strict=True)
        ]
        chosen, levels = self._gains.decide(candidates, step.after(count), self._calls)
        if not chosen:
            return self._recall.proposal(sought, found, request, self._kind)
        members = [may[number] for number in chosen]
        missed = sum(candidates[number].missed for number in chosen)
        begun = timestamp(request.device)
        said, exits = self._ask(request, members, levels, noise)
        both = [replace(one, other=said.get(b)) for b, one in enumerate(sought)]
        better = self._recall.draft(both, request, growth)
        seconds = seconds_between(begun, timestamp(request.device))  # the second draft is part of the call's cost
        step.costs.observe_proposal(self._calls, len(members), levels, seconds, missed)
        more = step.best(better.chances)
        price = step.price(max(count, more))
        before, after = found.kept(count, several), better.kept(more, several)
        for b in members:
            self._gains.observe(sure[b], len(said[b].path), _value(after[b], price) - _value(before[b], price))
        return replace(self._recall.proposal(both, better, request, self._kind), exits=exits)

    def _ask(
        self, request: DraftRequest, members: Sequence[int], levels: int, noise: Noise
    ) -> tuple[dict[int, PathProposals], Sequence[Exits]]:
        """Return the trained drafter's distributions along its most probable tokens, by sequence, and its exits."""
        if not members:
            return {}, ()
        slots = [request.slots[b] for b in members]
        limits = [min(levels, request.limits[b]) for b in members]
        chains = DraftRequest(slots, limits, [GREEDY] * len(slots), device=request.device)
        chosen = noise.rows(torch.tensor(members, device=request.device))
        proposal = self._trained.propose(chains, self._chains[levels - 1], chosen)
        said = dict(zip(members, _along(proposal, proposal.drafted(), levels), strict=True))
        for slot, other in zip(slots, said.values(), strict=True):
            self._unread[slot] = _Unread(0, 0, asked=True)
            self._said[slot] = other
        return said, [exits.spread(members, len(request.slots)) for exits in proposal.exits]

    def commit(self, slot: int, kept: Kept) -> None:
        said, rows = self._said.pop(slot, None), kept.rows
        others = None if said is None or rows is None else _beside(rows.tree, said)
        self._recall.remember(slot, kept, others)
        self._trained.commit(slot, kept)
        unread = self._unread[slot]
        self._unread[slot] = _Unread(len(kept.tokens), unread.before + unread.last, unread.asked)

    def close(self, slot: int) -> None:
        self._recall.close(slot)
        self._trained.close(slot)
        del self._unread[slot]
        self._said.pop(slot, None)

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        return self._trained.stage(weights)

    def load(self, staged: dict[str, Any]) -> None:
        self._trained.load(staged)
        self._gains.renew()


def _first(found: DraftNodes, sequences: int) -> list[float]:
    """Return the chance of the most probable first token of each sequence, 0 without any."""
    sure = [0.0] * sequences
    for owner, parent, chance in zip(found.owners, found.parents, found.chances, strict=True):
        if parent == ROOT and not sure[owner]:
            sure[owner] = chance
    return sure


def _value(chances: Sequence[float], price: float) -> float:
    """Return the tokens expected of nodes with these chances, less the price of their rows."""
    return sum(chances) - price * len(chances)


def _along(proposal: Proposal, paths: Sequence[list[int]], levels: int) -> list[PathProposals]:
    """Return the most probable tokens at the root and behind each but the last token of each path."""
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
            found = most_probable(proposal.logits, rows, KEPT, proposal.support).on_host()
            places = [b * (1 + levels) + level for b, path in enumerate(paths) for level in range(len(path))]
            kept = found.ids.shape[1]
            ids.view(-1, KEPT)[places, :kept] = found.ids
            p.view(-1, KEPT)[places, :kept] = found.logp.exp()
    return [PathProposals(torch.tensor(path, dtype=torch.int64), ids[b], p[b]) for b, path in enumerate(paths)]


def _beside(tree: Tree, said: PathProposals) -> tuple[Tensor, Tensor]:
    """Return the trained drafter's distributions after the root and each node of a tree, none off its path."""
    path = said.path.tolist()
    along = [0]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        level = along[1 + parent]
        along.append(level + 1 if 0 <= level < len(path) and path[level] == token else -1)
    places = torch.tensor(along)
    ids = said.ids[places].masked_fill((places < 0)[:, None], -1)
    return ids.contiguous(), said.p[places].contiguous()
