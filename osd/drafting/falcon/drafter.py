"""Falcon: a drafter that predicts the next k tokens in one call.

Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive
Drafting and Custom-Designed Decoding Tree", AAAI 2025 (arXiv 2412.12639). Pair i joins the output h_i of the target's
last layer with token i + 1. A recurrent part and one decoder layer turn the k pairs of a block into the features h of
the next k places. The target's own final norm and head compute logits from these. The layer's mask is causal over
blocks and full inside each block.

The tokens of a block are independent of each other. The pairs of the next block consist of this block's features and
the tokens drawn from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import Needs
from osd.drafting.draft_vocabulary import TargetHeadDrafter
from osd.drafting.eagle.initial import LAST_LAYER, of_layer, size_of_hidden
from osd.drafting.falcon.recurrence import LAYERS, recur
from osd.drafting.falcon.session import FalconSession
from osd.drafting.layer import NEVER, LayerDrafter, windows
from osd.drafting.session import Runtime
from osd.drafting.shapes import FalconShape
from osd.drafting.trainable import Batch, Loss, TrainingObjective, fed_tokens
from osd.runtime.causal_lm import text_config
from osd.target.model import layer_by_layer, load_config, load_part

_DISTILLED, _SOFT = 0.1, 0.9
"""Weight of the losses over tokens relative to features, and the share of the target's distribution in it."""

_FIRST = 0.4
"""First ratio of shown answers to wrong tokens, as in the paper."""

_LAST_STEP = 1000
"""First micro-step without shown answers, which drafts do not have."""

_OPEN = 2.0
"""First log-odds of the gates, at which most of the input passes."""


@dataclass(frozen=True)
class _DraftStarts:
    """Drafts at W places in each of B rows with P pairs.

    ``anchors`` [B, W] are the numbers of pairs before each draft. ``tokens`` [B, P + 1] and ``features`` [B, P, hidden]
    form the pairs, which have recurrent ``states`` [B, P, layers, hidden], and ``keys`` and ``values`` [B, P, heads,
    dim].
    """

    anchors: Tensor
    tokens: Tensor
    features: Tensor
    states: Tensor
    keys: Tensor
    values: Tensor


class Falcon(LayerDrafter[FalconShape], TargetHeadDrafter):
    """Recurrent part and decoder layer; the target's embedding, final norm and head are shared, not stored."""

    kind: ClassVar[str] = "falcon"
    steps: Tensor

    def __init__(self, target: nn.Module, block: int, vocabulary: int) -> None:
        """Make the module for ``target``, a causal language model of transformers, with ``block`` tokens per call."""
        super().__init__(target, vocabulary)
        config = text_config(target)
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        sizes = {"block": block, "layers": config.num_hidden_layers, "intermediate": wide}
        self.shape = shape = FalconShape.like(target, vocabulary, **sizes)
        self.needs, h = Needs(taps=self.usual_taps(shape.layers)), shape.hidden
        self.embedding_norm = nn.RMSNorm(h, shape.eps)
        self.feature_norm = nn.RMSNorm(h, shape.eps)
        self.recurrent = nn.ModuleList([nn.Linear(2 * h, 2 * h)] + [nn.Linear(h, 2 * h) for _ in range(LAYERS - 1)])
        self.attention_norm = nn.RMSNorm(h, shape.eps)
        self.add_attention(h)
        self.add_mlp(shape.intermediate)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # micro-steps, for the schedule of glancing

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        part = load_part(target_dir, layers=(load_config(target_dir).num_hidden_layers - 1,))
        with layer_by_layer(target_dir) as whole:
            return cls.from_target(part, settings.block, settings.vocabulary, whole)

    @classmethod
    @torch.no_grad()
    def from_target(cls, target: nn.Module, block: int, vocabulary: int, whole: nn.Module | None = None) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers in float32.

        If ``target`` has its last layer only, the ``whole`` target is needed too and runs once. Features pass through
        the recurrent part at their size in the target. The decoder layer is a copy of the target's last one if the
        shapes agree, and so starts with the inputs that it was trained on.
        """
        drafter = cls(target, block, vocabulary)
        weights, last, hidden = dict(drafter.named_parameters()), drafter.shape.layers - 1, drafter.shape.hidden
        for number, scale in enumerate((1.0, size_of_hidden(whole or target, last))):
            gate, candidate = weights[f"recurrent.{number}.weight"].chunk(2)
            gate.mul_(0.1)
            candidate.mul_(0.1)
            candidate[:, -hidden:] += torch.eye(hidden)
            candidate.mul_(scale)
            gate, candidate = weights[f"recurrent.{number}.bias"].chunk(2)
            gate.fill_(_OPEN)
            candidate.zero_()
        for name, value in of_layer(target.state_dict(), last, LAST_LAYER).items():
            weight = weights[name.replace("feature_norm", "attention_norm")]
            if value.shape == weight.shape:
                weight.copy_(value)
        return drafter

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        return cls(load_part(target_dir), config["block"], config["vocabulary"]).check_config(config)

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return the inputs [..., 2 * hidden] of the recurrent part: normed embeddings, then normed features.

        The embedding of each of the ``tokens`` [...] is joined with the feature at the same index of ``features`` [...,
        hidden].
        """
        embedded = self.embedding_norm(F.embedding(tokens, self.embedding_on(tokens.device)).float())
        return torch.cat([embedded, self.feature_norm(features)], -1)

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return a loss of features plus a tenth of the objective's and of a loss of the target's best token.

        Every step is deterministic, keyed by ``steps``.
        """
        size, step = self.shape.block, int(self.steps)
        depth, drafted = -(-objective.depth // size) * size, objective.drafted(batch)
        self.steps += 1
        starts = self.starts(batch, depth)
        shown = self._shown(batch, starts, step)
        outputs = self._at_places(batch, starts, self.blocks(starts, depth // size, drafted, shown), depth)
        normed = [self.final_norm(features) for features in outputs]
        levels = [self.logits_of(features) for features in normed]
        left_out = [self._answered(batch, starts, shown, d) for d in range(depth)]
        loss = objective.loss(batch, levels, self.draft_ids, left_out)
        value = _DISTILLED * _SOFT * loss.value
        goal = self.final_norm(self.hidden(batch)[batch.sequence, batch.place - 1])
        for d in range(depth):
            off = left_out[d]
            if drafted is not None and d:  # the target has no features after drafted tokens
                before = (batch.sequence, batch.place - 1)
                off = off | (drafted[before] != batch.token_ids[before])
            feature = F.smooth_l1_loss(normed[d], goal, reduction="none").mean(-1)
            hard = objective.surprise(batch, levels[d], self.draft_ids)
            value = value + objective.mean(batch, d, feature + _DISTILLED * (1 - _SOFT) * hard, off)
        return Loss(value, loss.positions, loss.kept)

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        return [self.final_norm(features) for features in self._outputs(batch, depth, drafted)]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        return self._outputs(batch, depth, fed_tokens(batch, fed))

    def _outputs(self, batch: Batch, depth: int, drafted: Tensor | None) -> list[Tensor]:
        """Return the features [N, hidden] that predict ``place`` in each of ``depth`` steps."""
        starts, blocks = self.starts(batch, depth), -(-depth // self.shape.block)
        return self._at_places(batch, starts, self.blocks(starts, blocks, drafted), depth)

    def starts(self, batch: Batch, depth: int) -> _DraftStarts:
        """Return all pairs, and the anchors of drafts with one of the places in their first ``depth`` tokens."""
        tokens, features = batch.token_ids, self.hidden(batch)[:, :-1]
        count, pairs = features.shape[:2]
        anchors = windows(batch.sequence, batch.place - depth, batch.place - 1, (1, pairs), count)
        states = self._recur(tokens[:, 1:], features, features.new_zeros(count, LAYERS, self.shape.hidden))
        positions = torch.arange(pairs, device=tokens.device)
        keys, values = self.keys_values(self.attention_norm(states[..., -1, :]), positions)
        return _DraftStarts(anchors, tokens, features, states, keys, values)

    def _recur(self, tokens: Tensor, features: Tensor, before: Tensor) -> Tensor:
        return recur(self.inputs(tokens, features), before, list(self.recurrent))

    def blocks(
        self, starts: _DraftStarts, blocks: int, drafted: Tensor | None, shown: Tensor | None = None
    ) -> list[Tensor]:
        """Return the features [B, W, k, hidden] of each of ``blocks`` blocks of the drafts.

        Later blocks read the tokens ``drafted`` [B, L]. The first ``shown`` [B, W] pairs of a first block are answers:
        the pairs k places later.
        """
        size, anchors = self.shape.block, starts.anchors
        tokens = starts.tokens if drafted is None else drafted
        within = torch.arange(size, device=anchors.device)
        place = (anchors[..., None] - size + within).clamp(min=0)  # [B, W, k]
        x, limit, chain = _gathered(starts.states, place)[..., -1, :], anchors, []
        if shown is not None:
            answered = shown > 0
            pair = (place + size * (within < shown[..., None])).clamp(max=starts.features.shape[1] - 1)
            read, before = _gathered(starts.tokens, pair + 1), self._before(starts, anchors - size)
            after = self._recur(read, _gathered(starts.features, pair), before)
            x = torch.where(answered[..., None, None], after[..., -1, :], x)
            limit = torch.where(answered, anchors - size, anchors)
            chain = [(*self.keys_values(self.attention_norm(x), place), answered)]
        outputs = [self._layer(starts, x, place, limit, chain)]
        chain, states = [], self._before(starts, anchors)
        for block in range(1, blocks):
            place = anchors[..., None] + (block - 1) * size + within
            read = _gathered(tokens, (place + 1).clamp(max=tokens.shape[1] - 1))
            after = self._recur(read, outputs[-1], states)
            x, states = after[..., -1, :], after[..., -1, :, :]
            every = torch.ones_like(anchors, dtype=torch.bool)
            chain = [*chain, (*self.keys_values(self.attention_norm(x), place), every)]
            outputs.append(self._layer(starts, x, place, anchors, chain))
        return outputs

    @staticmethod
    def _before(starts: _DraftStarts, anchors: Tensor) -> Tensor:
        """Return the recurrent states [B, W, layers, hidden] after ``anchors`` [B, W] pairs."""
        states = _gathered(starts.states, (anchors - 1).clamp(min=0))
        return torch.where((anchors > 0)[..., None, None], states, 0.0)

    def _layer(
        self, starts: _DraftStarts, x: Tensor, place: Tensor, limit: Tensor, chain: list[tuple[Tensor, Tensor, Tensor]]
    ) -> Tensor:
        """Return the outputs of the decoder layer for states ``x`` [B, W, k, hidden] at ``place`` [B, W, k].

        They see the pairs before ``limit`` [B, W], and each block of ``chain``: keys and values [B, W, k, heads, dim],
        and whether a draft has the block [B, W].
        """
        q = self.queries(self.attention_norm(x), place) * self.shape.head_dim**-0.5
        unseen = torch.arange(starts.keys.shape[1], device=limit.device) >= limit[..., None]  # [B, W, P]
        scores = [torch.einsum("bwqhd,bphd->bhwqp", q, starts.keys).masked_fill(unseen[:, None, :, None], NEVER)]
        for keys, _, exists in chain:
            block = torch.einsum("bwqhd,bwphd->bhwqp", q, keys)
            scores.append(block.masked_fill(~exists[:, None, :, None, None], NEVER))
        weight = torch.cat(scores, -1).softmax(-1)
        parts = weight.split([score.shape[-1] for score in scores], -1)
        mixed = torch.einsum("bhwqp,bphd->bwqhd", parts[0], starts.values)
        for part, (_, values, _) in zip(parts[1:], chain, strict=True):
            mixed = mixed + torch.einsum("bhwqp,bwphd->bwqhd", part, values)
        return self.mlp(x + self.o_proj(mixed.flatten(-2)))

    def _at_places(self, batch: Batch, starts: _DraftStarts, blocks: list[Tensor], depth: int) -> list[Tensor]:
        """Return the features [N, hidden] of ``blocks`` that predict ``place`` in each of ``depth`` steps."""
        size = self.shape.block
        return [blocks[d // size][batch.sequence, _column(batch, starts, d), d % size] for d in range(depth)]

    @torch.no_grad()
    def _shown(self, batch: Batch, starts: _DraftStarts, step: int) -> Tensor | None:
        """Return the number of shown answers [B, W] of each first block; None after the last step with answers.

        A first pass without answers decides on it.
        """
        ratio, size = glance_ratio(step), self.shape.block
        if not ratio:
            return None
        best = self.logits_of(self.final_norm(self.blocks(starts, 1, None)[0])).argmax(-1)  # [B, W, k]
        place = starts.anchors[..., None] + 1 + torch.arange(size, device=starts.anchors.device)
        true = _gathered(starts.tokens, place.clamp(max=starts.tokens.shape[1] - 1))
        usable = (starts.anchors >= size) & (starts.anchors + size < batch.lengths[:, None])
        return glances(self.draft_ids[best] != true, usable, ratio, step)

    def _answered(self, batch: Batch, starts: _DraftStarts, shown: Tensor | None, d: int) -> Tensor:
        """Return whether [N] the token of step ``d`` is a shown answer, or follows a block with shown answers."""
        if shown is None:
            return torch.zeros_like(batch.place, dtype=torch.bool)
        return shown[batch.sequence, _column(batch, starts, d)] > (d if d < self.shape.block else 0)

    def session(self, runtime: Runtime) -> FalconSession:
        self.share(runtime.target)
        ends = (self.embedding_on(runtime.device), self.final_norm, self.target_head)
        return FalconSession(self.shape, self.weights(), ends, runtime)


def _column(batch: Batch, starts: _DraftStarts, d: int) -> Tensor:
    """Return the index [N] of the draft in its row whose token ``d``, counted from 0, is at ``place``."""
    first = starts.anchors[batch.sequence, 0]
    return (batch.place - 1 - d - first).clamp(0, starts.anchors.shape[1] - 1)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the entries ``index`` [B, ...] of ``x`` [B, P, ...] along P."""
    rows = torch.arange(len(x), device=x.device).view(-1, *[1] * (index.dim() - 1))
    return x[rows, index]


def glance_ratio(step: int) -> float:
    """Return the ratio of shown answers to wrong tokens in a micro-step, counted from 0; it falls linearly to 0."""
    return _FIRST * max(0.0, 1 - step / _LAST_STEP)


def glances(wrong: Tensor, usable: Tensor, ratio: float, step: int) -> Tensor:
    """Return the number of shown answers of each block of k tokens, [B, W] int64 from 0 to k - 1.

    This is the paper's coupled sequential glancing distillation. A second pass reads the first answers of some blocks,
    each a true token and the target's feature, and learns the rest of these blocks.

    All usable blocks of the micro-batch share one budget: ``ratio`` times the number of their wrong tokens. Blocks in
    random order draw 1 to k - 1 answers each, independent of their own wrong tokens. The first block that would exceed
    the budget, and all blocks after it, get 0.

    Args:
        wrong: [B, W, k] whether the first pass predicted a wrong token.
        usable: [B, W] whether a block may get answers.
        ratio: shown answers for each wrong token.
        step: micro-step, which keys the draws, so that training continues from a version without a difference.
    """
    shown = torch.zeros_like(usable, dtype=torch.int64)
    chosen = usable.nonzero()
    budget = int(ratio * int(wrong[usable].sum()))
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(len(chosen), generator=generator)
    counts = torch.randint(1, wrong.shape[-1], (len(chosen),), generator=generator)
    counts[counts.cumsum(0) > budget] = 0
    rows, columns = chosen[order.to(chosen.device)].T
    shown[rows, columns] = counts.to(shown.device)
    return shown
