"""Prompt tokens: embeddings that the target reads behind its text, and answers with the tokens after next.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). At the i-th prompt token behind a text the target predicts the token i places later.
Prompt tokens ride behind every node of a draft during verification, so that the next draft costs no forward. A prompt
token may have several embeddings: each sees its own kind alone, and their logits are averaged.

Only these embeddings are trained, by gradients through the frozen target. Verification is lossless, where the paper has
typical acceptance.
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
from osd.drafting.growth.prompt_rows import allotted, ends, expected_accepted, kept_shares, paying
from osd.drafting.prompt_tokens.cuts import PACE, like_words, loss_behind, read_behind
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
from osd.drafting.shapes import MOST_OF_A_CALL, check_sizes
from osd.drafting.trainable import Batch, FrozenTarget, Loss, Objective, Trainable
from osd.economy.plan import StepBudget
from osd.runtime.causal_lm import check_table, decoder_layers, decoder_of, ends_of
from osd.target.model import load_model, load_part
from osd.verification.noise import Noise
from osd.verification.tree import ROOT, TreeBuilder, repeats

LoadTarget = Callable[[], nn.Module]
"""Reads the target in the dtype that it has: so is it served, and gradients of a few embeddings need no more."""


class PromptTokens(Trainable):
    """``prompts`` [tokens, copies, hidden]; the target is read where gradients are first asked for."""

    kind: ClassVar[str] = "prompt_tokens"
    steps: Tensor

    def __init__(self, target: nn.Module, tokens: int, copies: int, rows: int, load_target: LoadTarget) -> None:
        """Make new prompt tokens for ``target``, a causal language model of transformers in any dtype.

        There are ``copies`` embeddings for each of ``tokens`` levels, and at most ``rows`` rows of a sequence in a
        forward. ``load_target`` is called for training and evaluation.
        """
        super().__init__()
        check_sizes(MOST_OF_A_CALL, tokens=tokens, copies=copies)
        check_sizes(rows=rows)
        if rows < tokens * copies:
            raise DrafterError(
                f"{tokens} prompt tokens of {copies} embeddings need as many rows at least, and have {rows}"
            )
        try:
            check_table(target)
        except ValueError as error:
            raise DrafterError(f"no prompt token can stand beside the target's words: {error}") from None
        words = ends_of(target)[0].weight.detach().float()
        self._layers, self._vocabulary, self._rows = len(decoder_layers(target)), len(words), rows
        self.prompts = nn.Parameter(like_words(words, tokens, copies))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # micro-steps, which key the cuts
        self._target = FrozenTarget(load_target)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        load = partial(load_model, target_dir, "auto", "cpu")
        words = load_part(target_dir)
        return cls(words, settings.tokens, settings.copies, settings.rows, load)

    @classmethod
    def from_target(cls, target: nn.Module, tokens: int, copies: int = 1, rows: int = 32) -> Self:
        """The drafter that ``target``, a causal language model of transformers, starts with."""
        return cls(target, tokens, copies, rows, lambda: target)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        load = partial(load_model, target_dir, "auto", "cpu")
        drafter = cls(load_part(target_dir), config["tokens"], config["copies"], config["rows"], load)
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        tokens, copies, _ = self.prompts.shape
        return Needs(riders=self._rows, embeddings=tokens * copies)

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

    @property
    def levels(self) -> int:
        """See ``Trainable.levels``: one for each prompt token."""
        return len(self.prompts)

    @property
    def state_width(self) -> int:
        return width_of(self._vocabulary)

    def pace(self, name: str) -> float:
        return PACE

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``; micro-steps are keyed by ``steps``."""
        step, answers = int(self.steps), partial(self._answers, batch, levels=self.levels)
        self.steps += 1
        return loss_behind(batch, objective, step, self.levels, answers)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``Trainable.unroll``; prompt tokens read no drafted token."""
        length, levels = batch.token_ids.shape[1], min(depth, self.levels)
        cuts = torch.stack([(batch.place - 2 - level).clamp(min=0) for level in range(levels)])  # [levels, N]
        every, which = torch.unique(batch.sequence * length + cuts, return_inverse=True)
        logits = self._answers(batch, every // length, every % length, levels)
        return [logits[mine, level] for level, mine in enumerate(which)]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``: of what was said where the token was drawn."""
        return [states_of(logits, fed) for logits in self.unroll(batch, depth)]

    def _answers(self, batch: Batch, text: Tensor, cut: Tensor, levels: int) -> Tensor:
        """Logits [C, levels, vocabulary] at the first prompt tokens behind places ``cut`` [C] of rows ``text`` [C].

        One forward computes all of them; none sees those of another place.
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
        output = read_behind(target, self.prompts[:levels].to(target.dtype), seen, cuts + 1, cache)
        said = output.logits.float().unflatten(1, (width, copies, levels)).mean(2)  # [B, W, levels, vocabulary]
        return said[text, rows]

    def session(self, runtime: Runtime) -> PromptTokensSession:
        return PromptTokensSession(self.weights(), self._rows, runtime)


_SHARE_OF_PROBES = 0.005
"""Of the time, for prompt tokens that are not expected to pay."""

_WIDTH = 32
"""Numbers of a state at most."""


def width_of(vocabulary: int) -> int:
    """Return the width of the states that an acceptance head reads, for a vocabulary of that size."""
    return 1 + min(_WIDTH - 1, vocabulary)


def states_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return states [M, width] of ``tokens`` [M] that were drawn by ``logits`` [M, vocabulary].

    Prompt tokens have no layers. A state is the log-probability of the token, and behind it the largest of all
    log-probabilities, in falling order.
    """
    logp = logits.float().log_softmax(-1)
    return torch.cat([logp.gather(-1, tokens[:, None]), logp.topk(width_of(logits.shape[-1]) - 1).values], -1)


class PromptTokensSession(AutoregressiveSession):
    """Session of prompt tokens: a draft is as deep as the prompt tokens behind the last kept node.

    Without prompt tokens in the step before nothing is drafted.
    """

    source = "prompt_tokens"

    def __init__(self, weights: dict[str, Tensor], rows: int, runtime: Runtime) -> None:
        """Draft with ``weights`` and at most ``rows`` riders of a sequence."""
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
        """[levels, vocabulary] the target's mean logits at the copies of the prompt tokens on the last kept node."""
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
        """Append prompt tokens behind the nodes; see ``Riders``."""
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
        """Return the most prompt tokens of a sequence, with their copies, within the target's places.

        Sequences that were never opened, as most may be beside recall, have none.
        """
        if slot not in self._lengths or self._lengths[slot] + len(tree.tokens) + self._tokens > self._context:
            return 0
        wanted = growth.rider_rows(len(self._said.get(slot, ())))
        return (self._rows if wanted is None else min(self._rows, wanted)) // self._copies

    def _probe(
        self, step: StepBudget, counts: list[list[int]], rooms: Sequence[int], places: Sequence[Sequence[float]]
    ) -> None:
        """Let some ride now and then where none pay: riders that are never sent teach nothing."""
        self._debt = max(0.0, self._debt - _SHARE_OF_PROBES * float(step.seconds[step.rows]))
        if self._debt > 0 or any(map(any, counts)) or not any(rooms):
            return
        chosen = max(range(len(rooms)), key=rooms.__getitem__)
        likely = max(range(len(places[chosen])), key=places[chosen].__getitem__)
        counts[chosen][likely] = min(self._tokens, rooms[chosen])
        rows = step.after(counts[chosen][likely] * self._copies).rows
        self._debt = float(step.seconds[rows] - step.seconds[step.rows])

    def _with_riders(self, tree: Tree, counts: Sequence[int]) -> Tree:
        """Return the tree with so many prompt tokens, each with its copies, behind the root and each node."""
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
