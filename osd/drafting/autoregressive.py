"""Sessions of drafters that give next-token distributions: a growth policy grows their trees node by node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from osd.drafting.acceptance_head import SessionHead
from osd.drafting.base import OPTIONAL
from osd.drafting.graph_chains import ChainDraws, GraphChains, NewTokens
from osd.drafting.growth import Growth, Reach
from osd.drafting.session import Asked, Chains, Exits, GrownTrees, Proposal, Session
from osd.drafting.worth import Bill, PayingTrees
from osd.economy.costs import at_level
from osd.runtime.device import between, mark, sent
from osd.runtime.kv_cache import KVCache
from osd.runtime.memory import recycled
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import DraftBatch, TreeBuilder

_LEVELS = 8  # that a cost model tells apart


class AutoregressiveSession(Session, ABC):
    """Proposes what a growth policy draws from ``expand``, or chains in one call where it can."""

    source: str
    """What its nodes are called in traces and counts."""

    levels: int | None = None
    """Tokens of the longest path that it drafts: all of their distributions come of one call, and asking for more of
    them is a look. None where there is no end."""

    block: int = 1
    """Tokens of a path that come of one call where there is no end: a call for every so many levels."""

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """The kinds by which a cost model knows what asking about nodes of depth 0, 1, 2, ... takes."""
        first, deeper = f"the first call of {self.source}", range(1, _LEVELS)
        made = [self.levels is None and not depth % self.block for depth in deeper]
        return first, *(f"{'a further call of' if call else 'another look at'} {self.source}" for call in made)

    @property
    @abstractmethod
    def support(self) -> Tensor | None:
        """[draft vocabulary] target ids, None for the whole vocabulary."""

    cache: KVCache
    """Its own keys and values, where it has some."""

    graphs: GraphChains | None = None
    """What drafts whole chains without the host, where the session computes as on a GPU."""

    head: SessionHead | None = None
    """What judges its states, where its version has such a head."""

    states: Tensor
    """[M, width] of the nodes that ``expand`` was asked about last, where a head reads them."""

    def propose(self, asked: Asked, growth: Growth, noise: Noise) -> Proposal:
        limits = [limit if self.levels is None else min(limit, self.levels) for limit in asked.limits]
        chains = None if asked.penalties is not None else self._chains(asked, limits, growth, noise)
        if chains is not None:
            return Proposal.of_chains(chains, limits, self.source, self.support)
        expansion, allowed = _Expansion(self, asked), sent(asked.limits, asked.device)
        if asked.worth is None:
            draft = growth.grow(expansion, asked.sampling, noise, allowed)
        else:
            bill = Bill(asked.worth, expansion.seconds, expansion.grown)
            draft = growth.grow_paying(expansion, asked.sampling, noise, allowed, bill)
        proposal = replace(Proposal.of(draft, self.source, expansion.logits), exits=self.take_exits(asked.slots))
        expansion.ended()
        return proposal

    def _chains(self, asked: Asked, limits: Sequence[int], growth: Growth, noise: Noise) -> Chains | None:
        """What ``growth`` would draft, in one call; None where it takes several."""
        floor, most = growth.stops_below, growth.stops_above
        if floor is not None and asked.greedy:
            return self.chains(asked.slots, limits, floor)
        if floor is not None:
            return self.drawn_chains(asked.slots, limits, floor, asked.sampling, noise)
        return self.judged_chains(asked.slots, limits, most) if most is not None and asked.greedy else None

    @abstractmethod
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Logits [M, draft vocabulary] after ``nodes`` [M] of trees ``rows`` [M]; tree b belongs to ``slots[b]``."""

    @torch.inference_mode()
    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains | None:
        """Draft the most probable tokens one after the other, in one call; None where ``expand`` is the only way.

        Each draft has up to ``limits`` tokens, and ends after one of less probability than ``floor``; that one is kept.
        """
        return None if self.graphs is None else self.graphs.chains(self.taken(slots, limits), limits, floor)

    def judged_chains(self, slots: Sequence[int], limits: Sequence[int], most: float) -> Chains | None:
        """The same where a draft ends by what the session's acceptance head says, as most are asked node by node.

        It ends after the token before which one of those that the drafter has read is rejected more probably than
        ``most``, as growth ``acceptance_head`` ends it.
        """
        return None

    @torch.inference_mode()
    def drawn_chains(
        self, slots: Sequence[int], limits: Sequence[int], floor: float, sampling: SamplingBatch, noise: Noise
    ) -> Chains | None:
        """Draw what growth ``chain`` would draw, in one call; None where ``expand`` is the only way.

        Each draft has up to ``limits`` tokens, and ends after one of less probability than ``floor`` at temperature 1;
        that one is kept.
        """
        if self.graphs is None:
            return None
        drawing = ChainDraws.of(sampling, noise, max(limits))
        return self.graphs.chains(self.taken(slots, limits), limits, floor, drawing)

    def taken(self, slots: Sequence[int], limits: Sequence[int]) -> NewTokens:
        """What was committed to the slots that draft since their last draft, which counts as read from now on."""
        places: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        hidden: list[Tensor] = []
        for slot, limit in zip(slots, limits, strict=True):
            new, states = self.unread(slot) if limit else ([], [])
            places.append((slot, self.cache.length[slot], len(new)))
            self.cache.length[slot] += len(new)
            tokens += new
            hidden += states
        return NewTokens(places, tokens, torch.cat(hidden) if hidden else None)

    def unread(self, slot: int) -> tuple[list[int], list[Tensor]]:
        """Committed tokens that are yet to be read, for sessions with ``graphs``, and the target's states before them.

        They are given once, where there are states.
        """
        raise NotImplementedError

    def grown_trees(  # most ask the host between two levels
        self, slots: Sequence[int], wanted: PayingTrees, calls: np.ndarray
    ) -> GrownTrees | None:
        """Grow trees that pay, in one call; None where ``expand`` is the only way.

        Asking about 0, 1, 2, ... nodes behind the first level takes ``calls`` seconds, and about more as long as about
        the last of these.
        """
        return None

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:  # most drafters run no layers of the target
        """What ``expand`` ran of the target for ``slots`` since it was last asked about their roots."""
        return ()

    def acceptance(self) -> Tensor:
        """[M] how probably the tokens of the nodes that ``expand`` asked about last are accepted; 1/2 if unknown."""
        if self.head is None:
            return torch.full((len(self.states),), 0.5, device=self.states.device)
        return self.head.acceptance(self.states)

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``Session.stage``: the tensors of an acceptance head."""
        if self.head is None:
            return {}
        return {name: value.to(self.head.device) for name, value in weights.items() if name.startswith(OPTIONAL)}

    def load(self, staged: dict[str, Tensor]) -> None:
        if self.head is not None:
            self.head.load(staged)


class _Expansion:
    """A session as a growth policy sees it; keeps the raw logits of every node for the traces."""

    def __init__(self, session: AutoregressiveSession, asked: Asked) -> None:
        self._session, self._asked = session, asked
        self.logits: Tensor | None = None  # [B, 1 + nodes, draft vocabulary], entry 1 + i after node i
        self._begun = mark(asked.device)
        self._counts: list[int] = []  # nodes that were asked about, of each level
        self._seconds: list[float] = []
        self._missed = 0

    @property
    def support(self) -> Tensor | None:
        """[draft vocabulary] target ids, None for the whole vocabulary."""
        return self._session.support

    @property
    def levels(self) -> int | None:
        """See ``osd.drafting.growth.Expander``."""
        return self._session.levels

    @property
    def reach(self) -> Reach | None:
        """See ``osd.drafting.growth.Expander``."""
        return self._session.reach(self._asked.slots)

    @property
    def block(self) -> int:
        """See ``osd.drafting.growth.Expander``."""
        return self._session.block

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """One forward of the drafter; see ``osd.drafting.growth.Expander``."""
        asked = self._asked
        begun = mark(asked.device)
        logits = self._session.expand(asked.slots, builder, rows, nodes)
        if asked.worth is not None:
            if not self._counts:
                self._missed = sum(asked.missed[row] for row in rows.tolist())
            self._counts.append(len(rows))
            self._seconds.append(between(begun, mark(asked.device)))
        if self.logits is None:
            shape = (len(asked.slots), 1 + max(asked.limits), logits.shape[-1])
            self.logits = recycled(shape, logits.dtype, logits.device)
        self.logits[rows, 1 + nodes] = logits
        if asked.penalties is None:
            return logits
        return asked.penalties.adjust(logits, rows, nodes, builder.tokens, builder.parents, self.support)

    def grown(self, wanted: PayingTrees) -> DraftBatch | None:
        """See ``Bill.grown``."""
        asked = self._asked
        if asked.penalties is not None:
            return None
        further = wanted.worth.costs.calls(self._session.calls[1], sum(wanted.room))
        found = self._session.grown_trees(asked.slots, wanted, further)
        if found is None:
            return None
        self._counts, self._seconds = list(found.asked), list(found.seconds)
        self._missed = sum(missed for missed, room in zip(asked.missed, wanted.room, strict=True) if room)
        self.logits = found.logits
        return DraftBatch.grown(found.tokens, found.parents, found.sizes, found.estimates, self.support)

    def ended(self) -> None:
        """Tell the cost model what was asked and took; what no level took by itself counts for the first."""
        asked = self._asked
        if asked.worth is None or not self._counts:
            return
        self._seconds[0] += between(self._begun, mark(asked.device)) - sum(self._seconds)
        session = self._session
        asked.worth.costs.observe_levels(session.source, session.calls, self._counts, self._seconds, self._missed)

    def seconds(self, rows: Sequence[int], depth: int) -> float:
        """See ``Bill.call``; what is read once is shared by all rounds to come."""
        asked = self._asked
        assert asked.worth is not None  # noqa: S101  nobody else asks
        costs, kind = asked.worth.costs, at_level(self._session.calls, depth)
        seconds = costs.call(kind, len(rows))
        if not depth:
            seconds += sum(costs.reading(kind, asked.missed[row]) / max(asked.left[row] / 3, 1) for row in rows)
        return seconds

    def acceptance(self) -> Tensor:
        """See ``osd.drafting.growth.Expander``."""
        return self._session.acceptance()
