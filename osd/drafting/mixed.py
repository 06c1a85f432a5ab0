"""Mixed drafter: a trained drafter together with recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from osd.drafting.base import Drafter, Needs
from osd.drafting.growth import Growth
from osd.drafting.growth.chain import Chain
from osd.drafting.recall.drafter import RecallSession
from osd.drafting.session import (
    ANONYMOUS,
    Capabilities,
    CommittedTokens,
    DraftRequest,
    Exits,
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
    """Drafter from the mixture of recall and a trained drafter; its versions are those of the trained drafter."""

    kind: ClassVar[str] = "mixed"

    def __init__(self, trained: Drafter) -> None:
        self.trained = trained
        self.needs: Needs = replace(trained.needs, target_rows=True)
        self.calls: str | None = f"chains of {trained.kind}"

    def config(self) -> dict[str, Any]:
        return self.trained.config()

    def weights(self) -> dict[str, Tensor]:
        return self.trained.weights()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.trained.load_weights(weights)

    def session(self, runtime: Runtime) -> MixedSession:
        recall = RecallSession(self.kind, runtime)
        return MixedSession(recall, self.trained.session(runtime), self.trained.kind, f"chains of {self.trained.kind}")


_LEVELS = 3
"""Most tokens of the trained drafter; recall continues from there without a call."""


@dataclass
class _Unread:
    """Numbers of tokens that the trained drafter has not read: in the ``last`` step, and ``before`` it.

    ``read`` is true after the trained drafter has drafted for the sequence, and so has read its prompt.
    """

    last: int
    before: int
    read: bool = False


class MixedSession(Session):
    """Session of recall and a trained drafter.

    Recall drafts first. If the expected gain of the trained drafter exceeds the cost of its call, it drafts a chain of
    its most probable tokens. Its distributions along this chain are mixed into recall's, and recall drafts again.
    """

    def __init__(self, recall: RecallSession, trained: Session, kind: str, calls: str) -> None:
        """Join two sessions of the same slots; ``kind`` is the trained drafter's, and ``calls`` names its calls."""
        self._recall, self._trained, self._kind, self._calls = recall, trained, kind, calls
        self._gains = CallGains(_LEVELS)
        self._chains = [Chain(levels) for levels in range(1, _LEVELS + 1)]
        self._unread: dict[int, _Unread] = {}  # by slot
        self._mixed_in: dict[int, PathProposals] = {}  # in the current step, by slot

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._recall.open(slot, token, origin)
        self._trained.open(slot, token, origin)
        self._unread[slot] = _Unread(1, 0)

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the trained drafter's session, and recall's drafts after forced tokens."""
        return replace(self._trained.capabilities, continuation=self._recall)

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        """Return the joint drafts of both, see ``Session.propose``; without prices always call the trained drafter."""
        mixture, riders = self._mixture(request, growth, noise), self._trained.capabilities.riders
        if riders is None:
            return mixture
        return riders.ride(request, growth, mixture, None if request.prices is None else self._gains.added)

    def _mixture(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        """Return the proposal without riders."""
        recall, sequences, riders = self._recall, len(request.slots), self._trained.capabilities.riders
        longest = request.limits
        if riders is not None:
            longest = list(map(min, request.limits, riders.reach(request.slots).tokens))
        possible = [b for b, tokens in enumerate(longest) if tokens]
        queries = recall.queries(request)
        nodes = recall.draft(queries, request, growth)
        if request.prices is None:
            mixed, exits = self._chain_outputs(request, possible, _LEVELS, noise)
            queries = [replace(query, other=mixed.get(b)) for b, query in enumerate(queries)]
            proposal = recall.proposal(queries, recall.draft(queries, request, growth), request, self._kind)
            return replace(proposal, exits=exits)
        step, left = request.prices.step, request.prices.left
        count, certainty = step.best(nodes.chances), _first_chances(nodes, sequences)
        unread = [self._unread[request.slots[b]] for b in possible]
        candidates = [
            Candidate(certainty[b], state.before, left[b], longest[b], state.read)
            for b, state in zip(possible, unread, strict=True)
        ]
        chosen, levels = self._gains.decide(candidates, step.after(count), self._calls)
        if not chosen:
            return recall.proposal(queries, nodes, request, self._kind)
        members = [possible[number] for number in chosen]
        missed = sum(candidates[number].missed for number in chosen)
        started = timestamp(request.device)
        mixed, exits = self._chain_outputs(request, members, levels, noise)
        queries = [replace(query, other=mixed.get(b)) for b, query in enumerate(queries)]
        better = recall.draft(queries, request, growth)
        seconds = seconds_between(started, timestamp(request.device))  # the second draft is part of the call's cost
        step.costs.observe_proposal(self._calls, len(members), levels, seconds, missed)
        more = step.best(better.chances)
        price = step.price(max(count, more))
        before, after = nodes.kept(count, sequences), better.kept(more, sequences)
        for b in members:
            gain = _value(after[b], price) - _value(before[b], price)
            self._gains.observe(certainty[b], len(mixed[b].path), gain)
        return replace(recall.proposal(queries, better, request, self._kind), exits=exits)

    def _chain_outputs(
        self, request: DraftRequest, members: Sequence[int], levels: int, noise: Noise
    ) -> tuple[dict[int, PathProposals], Sequence[Exits]]:
        """Return the trained drafter's distributions along its most probable tokens, by sequence, and its exits."""
        if not members:
            return {}, ()
        slots = [request.slots[b] for b in members]
        limits = [min(levels, request.limits[b]) for b in members]
        chains = DraftRequest(slots, limits, [GREEDY] * len(slots), device=request.device)
        rows = noise.rows(torch.tensor(members, device=request.device))
        proposal = self._trained.propose(chains, self._chains[levels - 1], rows)
        outputs = dict(zip(members, _along(proposal, proposal.drafted(), levels), strict=True))
        for slot, output in zip(slots, outputs.values(), strict=True):
            self._unread[slot] = _Unread(0, 0, read=True)
            self._mixed_in[slot] = output
        return outputs, [exits.spread(members, len(request.slots)) for exits in proposal.exits]

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        mixed, rows = self._mixed_in.pop(slot, None), kept.rows
        self._recall.remember(slot, kept, None if mixed is None or rows is None else _on_tree(rows.tree, mixed))
        self._trained.commit(slot, kept)
        unread = self._unread[slot]
        self._unread[slot] = _Unread(len(kept.tokens), unread.before + unread.last, unread.read)

    def close(self, slot: int) -> None:
        self._recall.close(slot)
        self._trained.close(slot)
        del self._unread[slot]
        self._mixed_in.pop(slot, None)

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        return self._trained.stage(weights)

    def load(self, staged: dict[str, Any]) -> None:
        self._trained.load(staged)
        self._gains.renew()


def _first_chances(nodes: DraftNodes, sequences: int) -> list[float]:
    """Return the chance of the most probable first token of each sequence, 0 without any."""
    chances = [0.0] * sequences
    for owner, parent, chance in zip(nodes.owners, nodes.parents, nodes.chances, strict=True):
        if parent == ROOT and not chances[owner]:
            chances[owner] = chance
    return chances


def _value(chances: Sequence[float], price: float) -> float:
    """Return the expected tokens of nodes with these chances, less the price of their rows."""
    return sum(chances) - price * len(chances)


def _along(proposal: Proposal, paths: Sequence[list[int]], levels: int) -> list[PathProposals]:
    """Return the most probable tokens at the root and after each but the last token of each path."""
    ids = torch.full((len(paths), 1 + levels, KEPT), -1)
    p = torch.zeros(len(paths), 1 + levels, KEPT)
    if proposal.logits is None:
        for b, path in enumerate(paths):
            ids[b, : len(path), 0] = torch.tensor(path)
            p[b, : len(path), 0] = 1.0
    else:
        width = proposal.logits.shape[1]
        nodes = [(b, level) for b, path in enumerate(paths) for level in range(len(path))]
        if nodes:
            best = most_probable(
                proposal.logits, [b * width + level for b, level in nodes], KEPT, proposal.support
            ).on_host()
            places, kept = [b * (1 + levels) + level for b, level in nodes], best.ids.shape[1]
            ids.view(-1, KEPT)[places, :kept] = best.ids
            p.view(-1, KEPT)[places, :kept] = best.logp.exp()
    return [PathProposals(torch.tensor(path, dtype=torch.int64), ids[b], p[b]) for b, path in enumerate(paths)]


def _on_tree(tree: Tree, mixed: PathProposals) -> tuple[Tensor, Tensor]:
    """Return the trained drafter's distributions after the root and each node of a tree; -1 for tokens off its path."""
    path = mixed.path.tolist()
    along = [0]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        level = along[1 + parent]
        along.append(level + 1 if 0 <= level < len(path) and path[level] == token else -1)
    places = torch.tensor(along)
    ids = mixed.ids[places].masked_fill((places < 0)[:, None], -1)
    return ids.contiguous(), mixed.p[places].contiguous()
