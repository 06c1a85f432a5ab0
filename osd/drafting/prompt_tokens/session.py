"""The session of prompt tokens: what the target answered behind the kept node is the next draft, without a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from osd.config import SparseTreeSettings
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.growth import Growth, Reach
from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.growth.prompt_rows import allotted, ends, expected_accepted, kept_shares, paying
from osd.drafting.session import (
    ANONYMOUS,
    Capabilities,
    DraftRequest,
    Kept,
    Origin,
    Proposal,
    Runtime,
    TargetRows,
    Tree,
)
from osd.economy.plan import StepBudget
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, TreeBuilder

_SHARE_OF_PROBES = 0.005
"""Of the time, for prompt tokens that are not expected to pay."""

_WIDTH = 32
"""Numbers of a state at most."""


def width_of(vocabulary: int) -> int:
    """Return the width of the states that an acceptance head reads, for a vocabulary of that size."""
    return 1 + min(_WIDTH - 1, vocabulary)


def states_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return states [M, width] of ``tokens`` [M] that were drawn by ``logits`` [M, vocabulary].

    Prompt tokens have no layers: a state says how sure the target was where one stood. It is the log-probability of the
    token, and behind it the largest of all log-probabilities, in falling order.
    """
    logp = logits.float().log_softmax(-1)
    return torch.cat([logp.gather(-1, tokens[:, None]), logp.topk(width_of(logits.shape[-1]) - 1).values], -1)


class PromptTokensSession(AutoregressiveSession):
    """Drafts for the sequences of ``slots``; see ``osd.drafting.session.Session``.

    A draft is as deep as prompt tokens stood behind the node that was kept. Where no round went before, or one without
    prompt tokens, nothing is drafted, and they are sent along for the next round.
    """

    source = "prompt_tokens"

    def __init__(self, weights: dict[str, Tensor], rows: int, runtime: Runtime) -> None:
        """Draft with ``weights``, and send at most ``rows`` rows of a sequence along."""
        super().__init__(weights, runtime)
        self._tokens, self._copies, _ = weights["prompts"].shape
        self.levels, self._rows = self._tokens, rows
        self._said: dict[int, Tensor] = {}  # by slot: [levels, vocabulary] answers behind the last committed token
        self._lengths: dict[int, int] = {}
        self._context = runtime.context
        self._debt = 0.0
        self._renew()

    def _renew(self) -> None:
        """Expect other weights from now on."""
        ranks = SparseTreeSettings().ranks
        self._table = AcceptanceTable([ranks[min(level, len(ranks) - 1)] for level in range(self._tokens)])

    def reach(self, slots: Sequence[int]) -> Reach:
        return Reach([len(self._said.get(slot, ())) for slot in slots], self._copies)

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._lengths[slot] = 1

    def commit(self, slot: int, kept: Kept) -> None:
        self._said.pop(slot, None)
        self._lengths[slot] += len(kept.tokens)
        if kept.rows is not None:
            answers = self._answers(kept.rows)
            if len(answers):
                self._said[slot] = answers
            if kept.rows.tree.tokens:
                self._table.observe(kept.rows.tree.parents, kept.rows.path)

    def close(self, slot: int) -> None:
        self._said.pop(slot, None)
        self._lengths.pop(slot, None)

    def _answers(self, rows: TargetRows) -> Tensor:
        """[levels, vocabulary] the mean of what the target said at the copies of the prompt tokens on the kept node."""
        assert rows.logits is not None  # noqa: S101  the engine gives it to drafters with riders
        tree, nodes = rows.tree, len(rows.tree.tokens)
        last = rows.path[-1] if rows.path else ROOT
        copies: list[list[int]] = []
        for rider, parent in enumerate(tree.rider_parents):
            if parent == last:
                copies.append([rider])
            elif copies and parent == nodes + copies[-1][-1]:
                copies[-1].append(rider)
        chosen = torch.tensor(copies, dtype=torch.int64, device=rows.logits.device) + 1 + nodes
        return rows.logits[chosen].mean(0) if copies else rows.logits[:0]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(riders=self)

    def propose(self, request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
        return self.ride(request, growth, super().propose(request, growth, noise))

    def ride(
        self, request: DraftRequest, growth: Growth, proposal: Proposal, added: Sequence[float] | None = None
    ) -> Proposal:
        """See ``Riders.ride``."""
        table, trees = self._table.by_depth(), proposal.trees
        shares = [tree.chances or kept_shares(tree.parents, table) for tree in trees]
        given = zip(request.slots, request.limits, trees, strict=True)
        rooms = [self._room(slot, tree, growth) if limit else 0 for slot, limit, tree in given]
        both = zip(trees, shares, rooms, strict=True)
        places = [ends(tree.parents, mine) if room else [] for tree, mine, room in both]
        if request.prices is None:
            gains = expected_accepted(table, growth.max_nodes)
            counts = [allotted(mine, gains, room) for mine, room in zip(places, rooms, strict=True)]
        else:
            step = request.prices.step.after(sum(map(len, shares)))
            if added is None:
                gains = expected_accepted(table, growth.max_nodes, step.price(self._tokens))
            else:
                gains = list(added[: 1 + self._tokens])
            counts = paying(places, gains, rooms, self._copies, step)
            self._probe(step, counts, rooms, places)
        if not any(map(any, counts)):
            return proposal
        ridden = [self._with_riders(tree, mine) for tree, mine in zip(trees, counts, strict=True)]
        return replace(proposal, trees=ridden, embedded=self.vector["prompts"])

    def _room(self, slot: int, tree: Tree, growth: Growth) -> int:
        """Prompt tokens that a sequence may have, each with all its copies: none behind the target's last place.

        None either for a sequence that was never opened, as beside recall most may be.
        """
        if slot not in self._lengths or self._lengths[slot] + len(tree.tokens) + self._tokens > self._context:
            return 0
        wanted = growth.rider_rows(len(self._said.get(slot, ())))
        return (self._rows if wanted is None else min(self._rows, wanted)) // self._copies

    def _probe(
        self, step: StepBudget, counts: list[list[int]], rooms: Sequence[int], places: Sequence[Sequence[float]]
    ) -> None:
        """Send some along now and then where none pay: nothing is learnt of those that are not sent."""
        self._debt = max(0.0, self._debt - _SHARE_OF_PROBES * float(step.seconds[step.rows]))
        if self._debt > 0 or any(map(any, counts)) or not any(rooms):
            return
        chosen = max(range(len(rooms)), key=rooms.__getitem__)
        likely = max(range(len(places[chosen])), key=places[chosen].__getitem__)
        counts[chosen][likely] = min(self._tokens, rooms[chosen])
        rows = step.after(counts[chosen][likely] * self._copies).rows
        self._debt = float(step.seconds[rows] - step.seconds[step.rows])

    def _with_riders(self, tree: Tree, counts: Sequence[int]) -> Tree:
        """The tree with so many prompt tokens, each with its copies, behind the root and behind each node."""
        tokens: list[int] = []
        parents: list[int] = []
        for node, count in enumerate(counts, ROOT):
            for copy in range(self._copies):
                first = len(tree.tokens) + len(tokens)
                parents += [node, *range(first, first + count - 1)][:count]
                tokens += [-1 - (copy * self._tokens + level) for level in range(count)]
        return replace(tree, rider_tokens=tokens, rider_parents=parents)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """See ``AutoregressiveSession.expand``: a look at what was said."""
        said = [self._said[slots[row]] for row in rows.tolist()]
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)])
        logits = torch.stack([mine[depth] for mine, depth in zip(said, depths.tolist(), strict=True)])
        self.states = logits.new_empty(len(nodes), 0)
        if self.head is not None:
            drawn_by = torch.stack([mine[max(depth - 1, 0)] for mine, depth in zip(said, depths.tolist(), strict=True)])
            states = states_of(drawn_by, builder.tokens[rows, nodes.clamp(min=0)].clamp(min=0))
            self.states = torch.where((nodes < 0)[:, None], 0.0, states)  # a root's token was not drawn
        return logits

    def lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``AutoregressiveSession.lay_out``: [copies * levels, hidden], one copy after the other."""
        prompts = weights["prompts"].transpose(0, 1).flatten(0, 1)
        return {"prompts": prompts.to(self.device, torch.float32, copy=True)}

    def swap(self, staged: dict[str, Tensor]) -> None:
        """See ``AutoregressiveSession.swap``; answers to the version before are still drafted from."""
        super().swap(staged)
        self._renew()
