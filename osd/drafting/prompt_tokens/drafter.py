"""Prompt tokens: trained embeddings after a text, at which the target predicts later tokens than the next one.

A prompt token here is not a token of the request's prompt.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). At the i-th prompt token after a text the target predicts the token i places later.
Prompt tokens follow the nodes of a draft during verification, so that the next draft takes no forward. A prompt token
may have several embeddings, its copies: each sees its own kind only, and their logits are averaged.

Only the embeddings are trained, by gradients through the frozen target. The paper accepts by a typicality rule; here
verification is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn

from osd.config import SparseTreeSettings
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import DrafterError, Needs
from osd.drafting.growth import Growth, Reach
from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.growth.prompt_rows import allotted, ends, expected_accepted, kept_shares, priced
from osd.drafting.prompt_tokens.cuts import PACE, loss_at_cuts, new_prompts, read_at_cuts
from osd.drafting.session import (
    ANONYMOUS,
    Capabilities,
    CommittedTokens,
    DraftRequest,
    Origin,
    Proposal,
    Runtime,
    TargetRows,
    Tree,
)
from osd.drafting.shapes import MOST_OF_A_CALL, check_sizes
from osd.drafting.trainable import Batch, FrozenTarget, Loss, Trainable, TrainingObjective
from osd.economy.plan import StepBudget
from osd.runtime.causal_lm import decoder_layers, decoder_of, ends_of
from osd.target.model import load_model, load_part
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, TreeBuilder, repeats

LoadTarget = Callable[[], nn.Module]
"""Function that reads the target in its stored dtype, which suffices for gradients of a few embeddings."""


class PromptTokens(Trainable):
    """Embeddings ``prompts`` [tokens, copies, hidden]; training reads the target on first use."""

    kind: ClassVar[str] = "prompt_tokens"
    steps: Tensor

    def __init__(self, target: nn.Module, tokens: int, copies: int, rows: int, load_target: LoadTarget) -> None:
        """Make new prompt tokens for ``target``, a causal language model of transformers in any dtype.

        There are ``copies`` embeddings for each of ``tokens`` levels, and a sequence has at most ``rows`` riders in a
        forward. ``load_target`` is called for training and evaluation.
        """
        super().__init__()
        check_sizes(MOST_OF_A_CALL, tokens=tokens, copies=copies)
        check_sizes(rows=rows)
        if rows < tokens * copies:
            least = tokens * copies
            raise DrafterError(f"rows is {rows}, but must be at least {least} for {tokens} tokens of {copies} copies")
        self._layers, self._vocabulary, self._rows = len(decoder_layers(target)), len(ends_of(target)[0].weight), rows
        self.prompts = nn.Parameter(new_prompts(target, tokens, copies))
        self.needs, self.levels = Needs(riders=rows, embeddings=tokens * copies), tokens
        self.state_width = width_of(self._vocabulary)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # micro-steps, which key the cuts
        self._target = FrozenTarget(load_target)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        load = partial(load_model, target_dir, "auto", "cpu")
        words = load_part(target_dir)
        return cls(words, settings.tokens, settings.copies, settings.rows, load)

    @classmethod
    def from_target(cls, target: nn.Module, tokens: int, copies: int = 1, rows: int = 32) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers."""
        return cls(target, tokens, copies, rows, lambda: target)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        load = partial(load_model, target_dir, "auto", "cpu")
        drafter = cls(load_part(target_dir), config["tokens"], config["copies"], config["rows"], load)
        return drafter.check_config(config)

    def fields(self) -> dict[str, Any]:
        tokens, copies, hidden = self.prompts.shape
        return {
            "tokens": tokens,
            "copies": copies,
            "rows": self._rows,
            "hidden": hidden,
            "layers": self._layers,
            "target_vocabulary": self._vocabulary,
        }

    def pace(self, name: str) -> float:
        return PACE

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return the loss of the prompt tokens after random cuts of the texts; ``steps`` keys the cuts."""
        step, levels = int(self.steps), len(self.prompts)
        self.steps += 1
        return loss_at_cuts(batch, objective, step, levels, partial(self._answers, batch, levels=levels))

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return the logits of each prompt token, see ``Trainable.unroll``; they read no drafted token."""
        length, levels = batch.token_ids.shape[1], min(depth, len(self.prompts))
        cuts = torch.stack([(batch.place - 2 - level).clamp(min=0) for level in range(levels)])  # [levels, N]
        every, which = torch.unique(batch.sequence * length + cuts, return_inverse=True)
        logits = self._answers(batch, every // length, every % length, levels)
        return [logits[index, level] for level, index in enumerate(which)]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """Return ``states_of`` the logits that each token of ``fed`` [N] was drawn from, at each depth."""
        return [states_of(logits, fed) for logits in self.unroll(batch, depth)]

    def _answers(self, batch: Batch, text: Tensor, cut: Tensor, levels: int) -> Tensor:
        """Return the logits [C, levels, vocabulary] at the prompt tokens after places ``cut`` [C] of rows ``text`` [C].

        One forward computes them; the prompt tokens of a cut do not see those of other cuts.
        """
        rows, count = repeats(text), len(batch.token_ids)
        width = int(rows.max()) + 1
        ids = batch.token_ids[:, : int(cut.max()) + 1]
        cuts = cut.new_zeros(count, width).index_put((text, rows), cut)
        copies = self.prompts.shape[1]
        seen = torch.arange(ids.shape[1], device=ids.device) <= cuts[..., None]
        target = self._target.on(ids.device)
        cache = transformers.DynamicCache()
        with torch.no_grad():
            decoder_of(target)(input_ids=ids, past_key_values=cache, use_cache=True)
        output = read_at_cuts(target, self.prompts[:levels].to(target.dtype), seen, cuts + 1, cache)
        logits = output.logits.float().unflatten(1, (width, copies, levels)).mean(2)  # [B, W, levels, vocabulary]
        return logits[text, rows]

    def session(self, runtime: Runtime) -> PromptTokensSession:
        return PromptTokensSession(self.weights(), self._rows, runtime)


_SHARE_OF_PROBES = 0.005
"""Share of the time for prompt tokens whose expected value is below their price."""

_WIDTH = 32
"""Most numbers of a state."""


def width_of(vocabulary: int) -> int:
    """Return the width of the states of an acceptance head, for a ``vocabulary`` of that size."""
    return 1 + min(_WIDTH - 1, vocabulary)


def states_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return states [M, width] of ``tokens`` [M] that were drawn from ``logits`` [M, vocabulary].

    Prompt tokens have no layers, so a state is the log-probability of the token, followed by the largest of all
    log-probabilities in descending order.
    """
    logp = logits.float().log_softmax(-1)
    return torch.cat([logp.gather(-1, tokens[:, None]), logp.topk(width_of(logits.shape[-1]) - 1).values], -1)


class PromptTokensSession(AutoregressiveSession):
    """Session of prompt tokens: a draft has as many levels as there were prompt tokens after the last accepted node.

    Without prompt tokens in the previous step, the draft is empty.
    """

    source = "prompt_tokens"

    def __init__(self, weights: dict[str, Tensor], rows: int, runtime: Runtime) -> None:
        """Draft with ``weights`` and at most ``rows`` riders per sequence."""
        super().__init__(weights, runtime)
        self._tokens, self._copies, _ = weights["prompts"].shape
        self.levels, self._rows = self._tokens, rows
        self._logits: dict[int, Tensor] = {}  # by slot: [levels, vocabulary] of the last answers
        self._lengths: dict[int, int] = {}
        self._context = runtime.context
        self._debt = 0.0
        self._renew()

    def _renew(self) -> None:
        """Reset the acceptance statistics for other weights."""
        ranks = SparseTreeSettings().ranks
        self._table = AcceptanceTable([ranks[min(level, len(ranks) - 1)] for level in range(self._tokens)])

    def reach(self, slots: Sequence[int]) -> Reach:
        return Reach([len(self._logits.get(slot, ())) for slot in slots], self._copies)

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self._lengths[slot] = 1

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        self._logits.pop(slot, None)
        self._lengths[slot] += len(kept.tokens)
        if kept.rows is not None:
            logits = self._answers(kept.rows)
            if len(logits):
                self._logits[slot] = logits
            if kept.rows.tree.tokens:
                self._table.observe(kept.rows.tree.parents, kept.rows.path)

    def close(self, slot: int) -> None:
        self._logits.pop(slot, None)
        self._lengths.pop(slot, None)

    def _answers(self, rows: TargetRows) -> Tensor:
        """Return mean logits [levels, vocabulary] over the copies of the prompt tokens after the last accepted node."""
        assert rows.logits is not None  # noqa: S101  the engine passes logits to drafters with riders
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
        """Add prompt tokens behind the root and the nodes of a proposal of any drafter.

        ``added`` are the expected accepted tokens per step that a draft of 0, 1, 2, ... tokens of this drafter adds to
        those of another drafter; None if no other drafter takes part.
        """
        table, trees = self._table.by_depth(), proposal.trees
        shares = [tree.chances or kept_shares(tree.parents, table) for tree in trees]
        drafts = zip(request.slots, request.limits, trees, strict=True)
        rooms = [self._room(slot, tree, growth) if limit else 0 for slot, limit, tree in drafts]
        parts = zip(trees, shares, rooms, strict=True)
        places = [ends(tree.parents, chances) if room else [] for tree, chances, room in parts]
        if request.prices is None:
            gains = expected_accepted(table, growth.max_nodes)
            counts = [allotted(chances, gains, room) for chances, room in zip(places, rooms, strict=True)]
        else:
            step = request.prices.step.after(sum(map(len, shares)))
            if added is None:
                gains = expected_accepted(table, growth.max_nodes, step.price(self._tokens))
            else:
                gains = list(added[: 1 + self._tokens])
            counts = priced(places, gains, rooms, self._copies, step)
            self._probe(step, counts, rooms, places)
        if not any(map(any, counts)):
            return proposal
        trees = [self._with_riders(tree, riders) for tree, riders in zip(trees, counts, strict=True)]
        return replace(proposal, trees=trees, embedded=self.vector["prompts"])

    def _room(self, slot: int, tree: Tree, growth: Growth) -> int:
        """Return the most prompt tokens of a sequence within the target's context, 0 if the slot is not open.

        Next to recall, most slots may not be open.
        """
        if slot not in self._lengths or self._lengths[slot] + len(tree.tokens) + self._tokens > self._context:
            return 0
        wanted = growth.rider_rows(len(self._logits.get(slot, ())))
        return (self._rows if wanted is None else min(self._rows, wanted)) // self._copies

    def _probe(
        self, step: StepBudget, counts: list[list[int]], rooms: Sequence[int], places: Sequence[Sequence[float]]
    ) -> None:
        """Add riders now and then although none are worth their price, to learn about their value."""
        self._debt = max(0.0, self._debt - _SHARE_OF_PROBES * float(step.seconds[step.rows]))
        if self._debt > 0 or any(map(any, counts)) or not any(rooms):
            return
        chosen = max(range(len(rooms)), key=rooms.__getitem__)
        likely = max(range(len(places[chosen])), key=places[chosen].__getitem__)
        counts[chosen][likely] = min(self._tokens, rooms[chosen])
        rows = step.after(counts[chosen][likely] * self._copies).rows
        self._debt = float(step.seconds[rows] - step.seconds[step.rows])

    def _with_riders(self, tree: Tree, counts: Sequence[int]) -> Tree:
        """Return the tree with ``counts`` prompt tokens, each with its copies, after the root and each node."""
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
        """Return the logits [M, Vd] after ``nodes`` [M], which are known since the last verification."""
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)])
        known = [(self._logits[slots[row]], depth) for row, depth in zip(rows.tolist(), depths.tolist(), strict=True)]
        logits = torch.stack([levels[depth] for levels, depth in known])
        self.states = logits.new_empty(len(nodes), 0)
        if self.head is not None:
            source = torch.stack([levels[max(depth - 1, 0)] for levels, depth in known])
            states = states_of(source, builder.tokens[rows, nodes.clamp(min=0)].clamp(min=0))
            self.states = torch.where((nodes < 0)[:, None], 0.0, states)  # a root's token was not drawn
        return logits

    def lay_out(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the prompts [copies * levels, hidden] of a version in float32, copy by copy."""
        prompts = weights["prompts"].transpose(0, 1).flatten(0, 1)
        return {"prompts": prompts.to(self.device, torch.float32, copy=True)}

    def swap(self, staged: dict[str, Tensor]) -> None:
        """Switch to staged prompts; the next draft still uses logits of the previous version."""
        super().swap(staged)
        self._renew()
