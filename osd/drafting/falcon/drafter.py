"""Falcon: a drafter that says the next k tokens in one call.

Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive
Drafting and Custom-Designed Decoding Tree", AAAI 2025 (arXiv 2412.12639). Pair i joins the output h_i of the target's
last layer with token i + 1. A recurrent part and one decoder layer turn the k pairs of a block into the features h of
the next k places, and the target's own final norm and head read tokens from these. The layer's mask is causal over
blocks and full inside each.

No token of a block depends on another of it. The pairs of the next block are the features of the last one and the
tokens that were drawn from them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
from osd.drafting.session import Runtime
from osd.drafting.shapes import FalconShape, rotate
from osd.drafting.trainable import Batch, Loss, Objective, fed_tokens
from osd.runtime.causal_lm import text_config
from osd.target.model import layer_by_layer, load_config, load_part

_DISTILLED, _SOFT = 0.1, 0.9
"""Weight of what is said about tokens, beside features; and in it of the target's distribution, beside its choice."""

_FIRST = 0.4
"""Answers that are shown for each wrong token at first, as in the paper."""

_LAST_STEP = 1000
"""Micro-step from which on nothing is shown: a draft sees no answers either."""

_OPEN = 2.0
"""First log-odds of the gates: they let most of what is read through."""

_NEVER = -1e30  # finite, so that a row which sees nothing stays a number


@dataclass(frozen=True)
class _Text:
    """Starts of drafts: B rows with P pairs each, and W places in each where a draft begins.

    ``anchors`` [B, W] are the pairs before each draft; ``states`` [B, P, layers, hidden], ``keys`` and ``values``
    [B, P, heads, dim] are those of all pairs, made of ``tokens`` [B, P + 1] and ``features`` [B, P, hidden].
    """

    anchors: Tensor
    tokens: Tensor
    features: Tensor
    states: Tensor
    keys: Tensor
    values: Tensor


class Falcon(TargetHeadDrafter):
    """Recurrent part and decoder layer; the target's embedding, final norm and head are shared, not stored."""

    kind: ClassVar[str] = "falcon"
    steps: Tensor

    def __init__(self, target: nn.Module, block: int, vocabulary: int) -> None:
        """Make the module for ``target``, a causal language model of transformers, with blocks of ``block`` tokens."""
        super().__init__(target, vocabulary)
        config = text_config(target)
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        sizes = {"block": block, "layers": config.num_hidden_layers, "intermediate": wide}
        self.shape = shape = FalconShape.like(target, vocabulary, **sizes)
        h, wide = shape.hidden, shape.head_dim
        self.embedding_norm = nn.RMSNorm(h, shape.eps)
        self.feature_norm = nn.RMSNorm(h, shape.eps)
        self.recurrent = nn.ModuleList([nn.Linear(2 * h, 2 * h)] + [nn.Linear(h, 2 * h) for _ in range(LAYERS - 1)])
        self.attention_norm = nn.RMSNorm(h, shape.eps)
        self.q_proj = nn.Linear(h, shape.heads * wide, bias=False)
        self.k_proj = nn.Linear(h, shape.kv_heads * wide, bias=False)
        self.v_proj = nn.Linear(h, shape.kv_heads * wide, bias=False)
        self.o_proj = nn.Linear(shape.heads * wide, h, bias=False)
        self.mlp_norm = nn.RMSNorm(h, shape.eps)
        self.gate_proj = nn.Linear(h, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(h, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, h, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # micro-steps: where glancing stands

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        part = load_part(target_dir, layers=(load_config(target_dir).num_hidden_layers - 1,))
        with layer_by_layer(target_dir) as whole:
            return cls.from_target(part, settings.block, settings.vocabulary, whole)

    @classmethod
    @torch.no_grad()
    def from_target(cls, target: nn.Module, block: int, vocabulary: int, whole: nn.Module | None = None) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers in float32.

        Its last layer is enough; then the ``whole`` target is run once. Features pass through the recurrent part and
        leave it at their size in the target. The layer behind it, a copy of the target's last one where the shapes
        agree, thus starts on the inputs that it was trained on.
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
        drafter = cls(load_part(target_dir), config["block"], config["vocabulary"])
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        return Needs(taps=self.usual_taps(self.shape.layers))

    def fields(self) -> dict[str, Any]:
        return asdict(self.shape)

    @property
    def state_width(self) -> int:
        """See ``Trainable.state_width``; a state is the feature that the token was drawn from."""
        return self.shape.hidden

    def inputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """What the recurrent part reads of (token, feature) pairs: [..., 2 * hidden]."""
        embedded = self.embedding_norm(F.embedding(tokens, self.embedding_on(tokens.device)).float())
        return torch.cat([embedded, self.feature_norm(features)], -1)

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``: of features, and a tenth of the objective and the target's best token.

        Every step is deterministic: ``steps`` is its key.
        """
        size, step = self.shape.block, int(self.steps)
        depth, drafted = -(-objective.depth // size) * size, objective.drafted(batch)
        self.steps += 1
        text = self.text(batch, depth)
        shown = self._shown(batch, text, step)
        found = self._at_places(batch, text, self.blocks(text, depth // size, drafted, shown), depth)
        normed = [self.final_norm(features) for features in found]
        levels = [self.said(one) for one in normed]
        unlearnt = [self._answered(batch, text, shown, d) for d in range(depth)]
        loss = objective.loss(batch, levels, self.draft_ids, unlearnt)
        value = _DISTILLED * _SOFT * loss.value
        goal = self.final_norm(self.hidden(batch)[batch.sequence, batch.place - 1])
        for d in range(depth):
            off = unlearnt[d]
            if drafted is not None and d:  # the target was not asked for features after other tokens
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
        """Features [N, hidden] from which ``place`` is read at each of ``depth`` steps."""
        text, blocks = self.text(batch, depth), -(-depth // self.shape.block)
        return self._at_places(batch, text, self.blocks(text, blocks, drafted), depth)

    def text(self, batch: Batch, depth: int) -> _Text:
        """All pairs, and the anchors of drafts whose first ``depth`` tokens have one of the places."""
        tokens, features = batch.token_ids, self.hidden(batch)[:, :-1]
        count, pairs = features.shape[:2]
        first = torch.full((count,), pairs, device=tokens.device)
        first = first.scatter_reduce(0, batch.sequence, batch.place - depth, "amin").clamp(min=1)
        width = int((batch.place - 1 - first[batch.sequence]).max().clamp(min=0)) + 1
        anchors = (first[:, None] + torch.arange(width, device=tokens.device)).clamp(max=pairs)
        states = self._recur(tokens[:, 1:], features, features.new_zeros(count, LAYERS, self.shape.hidden))
        keys, values = self._keys_values(states[..., -1, :], torch.arange(pairs, device=tokens.device))
        return _Text(anchors, tokens, features, states, keys, values)

    def _recur(self, tokens: Tensor, features: Tensor, before: Tensor) -> Tensor:
        return recur(self.inputs(tokens, features), before, list(self.recurrent))

    def _keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., heads, dim] of states [..., hidden], each repeated for its query heads."""
        normed, groups = self.attention_norm(x), self.shape.heads // self.shape.kv_heads
        k, v = (layer(normed).unflatten(-1, (-1, self.shape.head_dim)) for layer in (self.k_proj, self.v_proj))
        return rotate(k, *self.shape.rotation(positions)).repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)

    def blocks(self, text: _Text, blocks: int, drafted: Tensor | None, shown: Tensor | None = None) -> list[Tensor]:
        """Features [B, W, k, hidden] that each of so many ``blocks`` of the draft at each anchor gives.

        Later blocks read the tokens ``drafted`` [B, L]. ``shown`` [B, W] answers begin the first block, whose pairs
        are then k places further on than the place where they stand.
        """
        size, anchors = self.shape.block, text.anchors
        tokens = text.tokens if drafted is None else drafted
        within = torch.arange(size, device=anchors.device)
        place = (anchors[..., None] - size + within).clamp(min=0)  # [B, W, k]
        x, limit, own = _gathered(text.states, place)[..., -1, :], anchors, []
        if shown is not None:
            answered = shown > 0
            pair = (place + size * (within < shown[..., None])).clamp(max=text.features.shape[1] - 1)
            before = self._before(text, anchors - size)
            other = self._recur(_gathered(text.tokens, pair + 1), _gathered(text.features, pair), before)[..., -1, :]
            x = torch.where(answered[..., None, None], other, x)
            limit = torch.where(answered, anchors - size, anchors)
            own = [(*self._keys_values(x, place), answered)]
        found = [self._layer(text, x, place, limit, own)]
        own, states = [], self._before(text, anchors)
        for block in range(1, blocks):
            place = anchors[..., None] + (block - 1) * size + within
            read = _gathered(tokens, (place + 1).clamp(max=tokens.shape[1] - 1))
            after = self._recur(read, found[-1], states)
            x, states = after[..., -1, :], after[..., -1, :, :]
            own = [*own, (*self._keys_values(x, place), torch.ones_like(anchors, dtype=torch.bool))]
            found.append(self._layer(text, x, place, anchors, own))
        return found

    @staticmethod
    def _before(text: _Text, anchors: Tensor) -> Tensor:
        """[B, W, layers, hidden] the recurrent states after so many pairs."""
        states = _gathered(text.states, (anchors - 1).clamp(min=0))
        return torch.where((anchors > 0)[..., None, None], states, 0.0)

    def _layer(
        self, text: _Text, x: Tensor, place: Tensor, limit: Tensor, own: list[tuple[Tensor, Tensor, Tensor]]
    ) -> Tensor:
        """What the decoder layer makes of states ``x`` [B, W, k, hidden] at ``place`` [B, W, k].

        They see the pairs before ``limit`` [B, W], and the keys and values ``own`` [B, W, k, heads, dim] where these
        count [B, W].
        """
        q = self.q_proj(self.attention_norm(x)).unflatten(-1, (-1, self.shape.head_dim))
        q = rotate(q, *self.shape.rotation(place)) * self.shape.head_dim**-0.5
        unseen = torch.arange(text.keys.shape[1], device=limit.device) >= limit[..., None]  # [B, W, P]
        scores = [torch.einsum("bwqhd,bphd->bhwqp", q, text.keys).masked_fill(unseen[:, None, :, None], _NEVER)]
        for keys, _, counts in own:
            mine = torch.einsum("bwqhd,bwphd->bhwqp", q, keys)
            scores.append(mine.masked_fill(~counts[:, None, :, None, None], _NEVER))
        weight = torch.cat(scores, -1).softmax(-1)
        parts = weight.split([one.shape[-1] for one in scores], -1)
        mixed = torch.einsum("bhwqp,bphd->bwqhd", parts[0], text.values)
        for part, (_, values, _) in zip(parts[1:], own, strict=True):
            mixed = mixed + torch.einsum("bhwqp,bwphd->bwqhd", part, values)
        x = x + self.o_proj(mixed.flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))

    def _at_places(self, batch: Batch, text: _Text, blocks: list[Tensor], depth: int) -> list[Tensor]:
        """Features [N, hidden] from which ``place`` is read at each of ``depth`` steps."""
        size = self.shape.block
        return [blocks[d // size][batch.sequence, _column(batch, text, d), d % size] for d in range(depth)]

    @torch.no_grad()
    def _shown(self, batch: Batch, text: _Text, step: int) -> Tensor | None:
        """[B, W] how many answers each first block is shown, after a pass that is shown none; None in the end."""
        ratio, size = glance_ratio(step), self.shape.block
        if not ratio:
            return None
        said = self.said(self.final_norm(self.blocks(text, 1, None)[0])).argmax(-1)  # [B, W, k]
        place = text.anchors[..., None] + 1 + torch.arange(size, device=text.anchors.device)
        true = _gathered(text.tokens, place.clamp(max=text.tokens.shape[1] - 1))
        usable = (text.anchors >= size) & (text.anchors + size < batch.lengths[:, None])
        return glances(self.draft_ids[said] != true, usable, ratio, step)

    def _answered(self, batch: Batch, text: _Text, shown: Tensor | None, d: int) -> Tensor:
        """[N] where the token of step ``d`` is an answer that was shown, or follows a block in which one was."""
        if shown is None:
            return torch.zeros_like(batch.place, dtype=torch.bool)
        mine = shown[batch.sequence, _column(batch, text, d)]
        return mine > (d if d < self.shape.block else 0)

    def session(self, runtime: Runtime) -> FalconSession:
        self.share(runtime.target)
        ends = (self.embedding_on(runtime.device), self.final_norm, self.target_head)
        return FalconSession(self.shape, self.weights(), ends, runtime)


def _column(batch: Batch, text: _Text, d: int) -> Tensor:
    """[N] which anchor of its row the draft has whose token ``d``, counted from 0, is at ``place``."""
    first = text.anchors[batch.sequence, 0]
    return (batch.place - 1 - d - first).clamp(0, text.anchors.shape[1] - 1)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """Of ``x`` [B, P, ...] the entries ``index`` [B, ...] along P."""
    rows = torch.arange(len(x), device=x.device).view(-1, *[1] * (index.dim() - 1))
    return x[rows, index]


def glance_ratio(step: int) -> float:
    """Answers that are shown for each wrong token in a micro-step, the first of which is 0; it falls linearly to 0."""
    return _FIRST * max(0.0, 1 - step / _LAST_STEP)


def glances(wrong: Tensor, usable: Tensor, ratio: float, step: int) -> Tensor:
    """Number of first answers that each block of k is shown, [B, W] int64 from 0 to k - 1.

    The paper's coupled sequential glancing distillation: where a first pass is wrong often, the second sees some of the
    answers, token and feature, at the begin of blocks and learns the rest of these. The ``step`` is the key of the
    draws, so that training continues from a version as if it had not stopped.

    Args:
        wrong: [B, W, k] tokens that the first pass had wrong.
        usable: [B, W] the blocks that count.
        ratio: shown answers for each wrong token.
        step: the micro-step.
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
