"""Base class of sessions with next-token distributions: weights, and drafts that a growth policy places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from osd.drafting.acceptance_head import SessionHead
from osd.drafting.base import OPTIONAL, check, split
from osd.drafting.draft_vocabulary import check_maps, draft_ids
from osd.drafting.graph_chains import ChainDraws, GraphChains, NewTokens
from osd.drafting.growth import DraftBudget, Growth, GrowthPlan, Reach, Stop
from osd.drafting.session import (
    ANONYMOUS,
    CommittedTokens,
    DraftRequest,
    Exits,
    Origin,
    Proposal,
    Runtime,
    Session,
    Tree,
)
from osd.economy.calls import STEP_TOKENS
from osd.economy.costs import at_level
from osd.runtime.device import copy_all, seconds_between, side_stream, timestamp, to_device
from osd.runtime.kv_cache import KVCache
from osd.runtime.linear import PackedLinear, PlainLinear, fused_dtype, make_linear
from osd.runtime.memory import recycled
from osd.verification.noise import Noise
from osd.verification.tree import DraftBatch, TreeBuilder

_LEVELS = 8  # levels with separate costs in a cost model


@dataclass(frozen=True)
class WholeDraft:
    """Draft of one call, without the host between two levels.

    ``logits`` [B, 1 + N, Vd] follow the root and each expanded node. While ``pending``, the device may still compute.
    ``expanded`` and ``seconds`` are the expanded nodes and the time of each level, if the call measures them.
    """

    draft: DraftBatch
    logits: Tensor
    pending: bool = False
    expanded: Sequence[int] = ()
    seconds: Sequence[float] = ()


class AutoregressiveSession(Session, ABC):
    """Session that expands nodes for a growth policy, or makes whole drafts in one call if it can.

    ``LINEAR`` and ``VECTORS`` name the tensors of a version that the session uses, or the modules whose weights they
    are; a subclass sets them before ``__init__`` if they depend on its shape. Each of ``LINEAR`` becomes a layer in
    ``linear``; all dimensions of its tensor but the last are outputs. Each of ``VECTORS`` becomes a float32 tensor in
    ``vector``, which also holds the ``draft_ids`` of a draft vocabulary.

    ``load`` swaps both. Packed layers of our kernels and the vectors are replaced by the staged tensors without a copy.
    Plain layers may be recorded in CUDA graphs, so the staged tensors are copied to their constant addresses.
    """

    LINEAR: tuple[str, ...] = ()
    VECTORS: tuple[str, ...] = ()

    source: str
    """Name of the nodes in traces and counts."""
    levels: int | None = None
    """Tokens of the longest path if one call covers all of them; None without a bound."""
    block: int = 1
    """Tokens of a path from one call, if paths have no bound."""
    cache: KVCache
    """Keys and values of the drafter, if it has any."""
    graphs: GraphChains | None = None
    """CUDA graphs for whole chains, if the session computes as on a GPU."""
    head: SessionHead | None = None
    """Acceptance head of the version, if any."""
    states: Tensor
    """[M, width] states of the nodes of the last call, for the head."""

    def __init__(self, weights: dict[str, Tensor], runtime: Runtime, target_head: Tensor | None = None) -> None:
        """Lay out the ``weights`` of a version.

        ``target_head`` [target vocabulary, hidden] on the host is for kinds whose layer "head" consists of its rows for
        the draft vocabulary.
        """
        self.device = runtime.device
        self.bucketed = self.device.type == "cuda" if runtime.bucketed is None else runtime.bucketed
        self._expected, self._target_head = weights, target_head
        tensors = self.lay_out(weights)
        linear = {name: tensors.pop(name) for name in self.LINEAR}
        self.linear = {
            name: PlainLinear(value) if self.bucketed else make_linear(value, runtime.int8)
            for name, value in linear.items()
        }
        self.vector, self.head = tensors, SessionHead.of(weights, self.device)
        self.states = torch.empty(0)
        self._last: dict[int, int] = {}  # last committed token of each slot
        self._replaced: dict[str, Tensor] = {}  # the next ``stage`` frees them, off the decode thread

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Kinds of the calls in a cost model, for nodes of depth 0, 1, 2, ..."""
        first, deeper = f"the first call of {self.source}", range(1, _LEVELS)
        made = [self.levels is None and not depth % self.block for depth in deeper]
        return first, *(f"{'a further call of' if call else 'another look at'} {self.source}" for call in made)

    @property
    def support(self) -> Tensor | None:
        """[draft vocabulary] target ids, None for the whole vocabulary."""
        return self.vector.get("draft_ids")

    def lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a version in the dtypes of the session and under its names."""
        dtype, tensors = fused_dtype(self.device), dict[str, Tensor]()
        ids = draft_ids(weights["d2t"]).cpu() if "d2t" in weights else None
        for name in self.LINEAR:
            head = self._target_head if name == "head" else None
            value = _named(weights, name).flatten(0, -2) if head is None else head[ids]
            tensors[name] = value.to(self.device, dtype)
        for name in self.VECTORS:
            tensors[name] = _named(weights, name).to(self.device, torch.float32, copy=True)
        return tensors if ids is None else tensors | {"draft_ids": ids.to(self.device)}

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._last[slot] = token

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        self._last[slot] = kept.tokens[-1]

    def close(self, slot: int) -> None:
        self._last.pop(slot, None)

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights = check(weights, self._expected)
        check_maps(weights)
        self._replaced = {}
        with side_stream(self.device):
            head = {name: weights[name].to(self.device) for name in weights if name.startswith(OPTIONAL)}
            return self.staged(weights) | ({} if self.head is None else head)

    def load(self, staged: dict[str, Tensor]) -> None:
        if self.head is not None:
            self.head.load(staged)
        self.swap(split(OPTIONAL, staged)[0])

    def staged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return checked weights in the layout of ``swap``."""
        return {
            name: self.linear[name].stage(value) if name in self.linear else value
            for name, value in self.lay_out(weights).items()
        }

    def swap(self, staged: dict[str, Tensor]) -> None:
        """Switch to staged weights."""
        places = {name: layer.place for name, layer in self.linear.items()} | self.vector
        packed = {name: layer for name, layer in self.linear.items() if isinstance(layer, PackedLinear)}
        if len(packed) < len(self.linear):
            copy_all(places.values(), [staged[name] for name in places])
            return
        self._replaced = places
        for name, layer in packed.items():
            layer.take(staged[name])
        self.vector = {name: staged[name] for name in self.vector}

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        source = _Source(self, request)
        whole = None if request.penalties is not None else self._whole(request, growth, noise, source)
        if whole is None:
            draft, logits = growth.grow(source, request.sampling, noise, source.budget), source.logits
        else:
            draft, logits = whole.draft, whole.logits
        if whole is not None and whole.pending:
            trees = [Tree.chain([0] * limit, self.source) for limit in self._levels(request)]
            proposal = Proposal(trees, draft, logits=logits, pending=True)
        else:
            proposal = Proposal.of(draft, self.source, logits, self.take_exits(request.slots))
        source.report(whole)
        return proposal

    def _levels(self, request: DraftRequest) -> list[int]:
        """Return the most tokens of a path for each sequence."""
        return [limit if self.levels is None else min(limit, self.levels) for limit in request.limits]

    def _whole(self, request: DraftRequest, growth: Growth, noise: Noise, source: _Source) -> WholeDraft | None:
        """Return the draft of ``growth`` if one call can make it, else None."""
        if growth.stop is not None and (request.greedy or self.graphs is not None):
            limits = self._levels(request)
            draws = None if request.greedy else ChainDraws.of(request.sampling, noise, max(limits))
            return self.chains(request.slots, limits, growth.stop, draws)
        prices = request.prices
        if prices is None or (plan := growth.plan_for(source, request.sampling, source.budget)) is None:
            return None
        source.reads(row for row, room in enumerate(plan.room) if room)
        return self.trees(request.slots, plan, prices.step.costs.calls(self.calls[1], sum(plan.room)))

    @abstractmethod
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the logits [M, Vd] after ``nodes`` [M] of trees ``rows`` [M]; tree b belongs to ``slots[b]``."""

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        """Return chains that are made in one call; None if this session must expand the nodes one by one.

        Args:
            slots: slot of each sequence.
            limits: maximum number of tokens of each chain, 0 for no chain.
            stop: rule for the end of a chain. The first token with a probability below ``stop.below`` is the last
                token of its chain.
            draws: settings and random numbers to draw the tokens; None for the most probable tokens.
        """
        if self.graphs is None or stop.above is not None:
            return None
        return WholeDraft(*self.graphs.chains(self.take_unread(slots, limits), limits, stop.below, draws), pending=True)

    def trees(self, slots: Sequence[int], plan: GrowthPlan, calls: np.ndarray) -> WholeDraft | None:
        """Return the trees of ``plan``, grown in one call; None if nodes must be expanded one by one.

        ``calls`` are the seconds of one level, after the first, that expands 0, 1, 2, ... nodes of all sequences; more
        nodes take as long as the last entry.
        """
        return None

    def take_unread(self, slots: Sequence[int], limits: Sequence[int]) -> NewTokens:
        """Return the unread tokens of the slots with a limit above 0, and mark them as read."""
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
        """Return the unread committed tokens, and the target's states before them if the drafter reads states.

        Sessions with drafts of one call implement it. States are returned only once.
        """
        raise NotImplementedError

    def reach(self, slots: Sequence[int]) -> Reach | None:
        """Return the depth that it can draft in each of ``slots``; None for ``levels`` in all of them."""
        return None

    def take_exits(self, slots: Sequence[int]) -> Sequence[Exits]:
        """Return the rows of the target that ``expand`` ran for ``slots`` since their roots."""
        return ()

    def acceptance(self) -> Tensor:
        """Return the probabilities [M] that the target accepts the nodes of the last call; 1/2 without a head."""
        if self.head is None:
            return torch.full((len(self.states),), 0.5, device=self.states.device)
        return self.head.acceptance(self.states)


def _named(weights: dict[str, Tensor], name: str) -> Tensor:
    """Return the tensor ``name``, or the weight of the module ``name``."""
    return weights[name] if name in weights else weights[f"{name}.weight"]


class _Source:
    """Source of a growth policy over a session; keeps the unprocessed logits of every node for traces."""

    def __init__(self, session: AutoregressiveSession, request: DraftRequest) -> None:
        self._started = timestamp(request.device)
        self._session, self._request, self._prices = session, request, request.prices
        self.support, self.levels, self.block = session.support, session.levels, session.block
        self.reach, self.acceptance = session.reach(request.slots), session.acceptance
        self.logits: Tensor | None = None  # [B, 1 + nodes, draft vocabulary], entry 1 + i after node i
        self._counts: list[int] = []  # expanded nodes of each level
        self._seconds: list[float] = []
        self._missed = 0

    @cached_property
    def budget(self) -> DraftBudget:
        """Size of the drafts, and their prices."""
        limits = to_device(self._request.limits, self._request.device)
        return (
            DraftBudget(limits) if self._prices is None else DraftBudget(limits, self._prices.step, self._call_seconds)
        )

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        request = self._request
        started = timestamp(request.device)
        logits = self._session.expand(request.slots, builder, rows, nodes)
        if self._prices is not None:
            if not self._counts:
                self.reads(rows.tolist())
            self._counts.append(len(rows))
            self._seconds.append(seconds_between(started, timestamp(request.device)))
        if self.logits is None:
            shape = (len(request.slots), 1 + max(request.limits), logits.shape[-1])
            self.logits = recycled(shape, logits.dtype, logits.device)
        self.logits[rows, 1 + nodes] = logits
        if request.penalties is None:
            return logits
        return request.penalties.adjust(logits, rows, nodes, builder.tokens, builder.parents, self.support)

    def reads(self, rows: Iterable[int]) -> None:
        """Count the unread tokens of sequences ``rows`` for the next ``report``."""
        self._missed = 0 if self._prices is None else sum(self._prices.missed[row] for row in rows)

    def report(self, whole: WholeDraft | None) -> None:
        """Add the time of each level to the cost model; other time of the proposal counts for the first level."""
        if self._prices is None:
            return
        if whole is not None:
            self._counts, self._seconds = [*whole.expanded], [*whole.seconds]
        if self._counts:
            self._seconds[0] += seconds_between(self._started, timestamp(self._request.device)) - sum(self._seconds)
            name, calls, costs = self._session.source, self._session.calls, self._prices.step.costs
            costs.observe_levels(name, calls, self._counts, self._seconds, self._missed)

    def _call_seconds(self, rows: Sequence[int], depth: int) -> float:
        """Return the seconds of a call, see ``DraftBudget``; all later steps share the cost of missed tokens."""
        assert self._prices is not None  # noqa: S101  the budget has prices
        costs, kind = self._prices.step.costs, at_level(self._session.calls, depth)
        seconds = costs.call(kind, len(rows))
        if not depth:
            missed, left = self._prices.missed, self._prices.left
            seconds += sum(costs.reading(kind, missed[row]) / max(left[row] / STEP_TOKENS, 1) for row in rows)
        return seconds
