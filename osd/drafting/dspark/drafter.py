"""DSpark: a drafter that computes the states of a whole block in one call, and draws its tokens left to right.

"DSpark", arXiv 2607.05147; its network is the one of DFlash (arXiv 2602.06036). A block starts at the last committed
token. Its other places hold the embedding of a mask, a frozen row of the target's embedding. The target's states of
three layers are fused into one context vector per token. All layers of the drafter read the context vectors before the
block, and the places of the block up to their own. The mask is causal, so the first places of a block do not depend on
the number of places.

Place k gives the same part U_k of the logits for every draft. A Markov head adds a bias of low rank by the token x
before: the logits are U_k + W2 W1[x]. So a token depends on the one before it without a further call, and each node of
a draft tree has children of its own. The last norm and the rows U of the head are the target's.

The state for an acceptance head joins the state of the place that a token was drawn at with W1 of this token. It reads
no later token. A draft that ends by it therefore keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from osd.drafting.base import DrafterError, Needs
from osd.drafting.draft_vocabulary import TargetHeadDrafter
from osd.drafting.dspark import initial
from osd.drafting.dspark.layer import BlockLayer
from osd.drafting.dspark.session import DSparkSession
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.layer import windows
from osd.drafting.session import Runtime
from osd.drafting.shapes import DSparkShape
from osd.drafting.trainable import Batch, Loss, TrainingObjective
from osd.runtime.causal_lm import text_config
from osd.target.model import layer_by_layer, load_config, load_part

_MOST_STARTS = 64
"""Most blocks of a micro-step; each takes a row for every place."""


class DSpark(TargetHeadDrafter):
    """Layers over a block, and a Markov head; the target's embedding, final norm and head are shared, not stored."""

    kind: ClassVar[str] = "dspark"

    def __init__(self, target: nn.Module, block: int, layers: int, rank: int, vocabulary: int) -> None:
        """Make the module for ``target``, a causal language model of transformers.

        Raises:
            DrafterError: a size is impossible, or the target is too small for three taps.
        """
        super().__init__(target, vocabulary)
        config = text_config(target)
        if not (taps := self.usual_taps(config.num_hidden_layers)):
            count = config.num_hidden_layers
            raise DrafterError(f"drafter.kind dspark needs a target of at least 3 layers, this one has {count}")
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        sizes = {"block": block, "layers": layers, "rank": rank, "intermediate": wide}
        self.shape = shape = DSparkShape.like(target, vocabulary, taps=taps, mask=mask_id(self.embedding), **sizes)
        self.needs, self.levels, self.state_width = Needs(taps=taps), block, shape.hidden + rank
        self.fc = nn.Linear(len(taps) * shape.hidden, shape.hidden, bias=False)
        self.context_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(layers))
        self.markov_in = nn.Embedding(shape.target_vocabulary, rank)
        self.markov_out = nn.Linear(rank, shape.vocabulary, bias=False)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, cache: Path) -> Self:
        count = load_config(target_dir).num_hidden_layers
        part = load_part(target_dir, layers=range(count - settings.layers, count))
        with layer_by_layer(target_dir) as whole:
            return cls.from_target(part, settings.block, settings.layers, settings.rank, settings.vocabulary, whole)

    @classmethod
    def from_target(
        cls, target: nn.Module, block: int, layers: int, rank: int, vocabulary: int, whole: nn.Module | None = None
    ) -> Self:
        """Make the first drafter of ``target``, a causal language model of transformers in float32.

        If ``target`` has its last layers only, the ``whole`` target is needed too and runs once.

        Raises:
            DrafterError: a size is impossible, or the target is too small for three taps.
        """
        drafter = cls(target, block, layers, rank, vocabulary)
        initial.fill(dict(drafter.named_parameters()), drafter.shape, target, whole or target)
        return drafter

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        sizes = [config[name] for name in ("block", "layers", "rank", "vocabulary")]
        return cls(load_part(target_dir), *sizes).check_config(config)

    @staticmethod
    def usual_taps(layers: int) -> tuple[int, ...]:
        return Eagle.usual_taps(layers)  # so that the traces of either kind train the other one

    def fields(self) -> dict[str, Any]:
        fields = asdict(self.shape)
        del fields["rope_scaling"]  # only imported drafters have one
        return fields | {"taps": list(self.shape.taps)}

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Make the most frequent tokens the draft vocabulary, by ``counts`` [target vocabulary].

        Ids that stay keep their rows of the Markov head. The rows of new ids are 0.
        """
        ids = self.most_frequent(counts)
        weight = self.markov_out.weight
        with torch.no_grad():
            here = ids.to(weight.device)
            rows, kept = torch.zeros_like(weight), self.t2d[here]
            rows[kept] = weight[torch.searchsorted(self.draft_ids, here[kept])]
            weight.copy_(rows)
        self.set_vocabulary(ids)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        rows = self._output_rows()
        return [F.linear(states, rows) for states in self.before_head(batch, depth, drafted)]

    def before_head(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return the states [N, hidden + rank] of each of ``depth`` places, which the rows of both heads read."""
        size = min(depth, self.shape.block)
        states, _ = self._states(batch, self._all_starts(batch, size), size)
        return self._with_token_before(batch, states, drafted)

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        states, _ = self._states(batch, self._all_starts(batch, depth), depth)
        return [torch.cat([state, self.markov_in(fed)], -1) for state in states]

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return the loss over the blocks that ``objective`` chooses; all places of a block count."""
        starts = objective.block_starts(batch, _MOST_STARTS)
        states, left_out = self._states(batch, starts, self.shape.block)
        ids, rows, raised = self.draft_ids, self._output_rows(), None
        if (sampled := objective.sampled(batch, ids)) is not None:
            ids, rows, raised = ids[sampled.places], rows[sampled.places], sampled.raised
        levels = [F.linear(each, rows) for each in self._with_token_before(batch, states, objective.drafted(batch))]
        if raised is not None:
            levels = [logits.float() + raised for logits in levels]
        return objective.loss(batch, levels, ids, left_out)

    def block_states(self, batch: Batch, starts: Tensor, size: int) -> Tensor:
        """Return the normalised states [B, W, size, hidden] of the first ``size`` places of blocks.

        ``starts`` [B, W] are the places of the last committed tokens.
        """
        tokens = starts.new_full((*starts.shape, size), self.shape.mask)
        tokens[..., 0] = batch.token_ids.gather(1, starts)
        x = F.embedding(tokens, self.embedding_on(tokens.device)).float()
        context = self.context_norm(self.fc(self.hidden(batch)).float())  # [B, L, hidden]
        for layer in self.layers:
            x = layer(x, context, starts)
        return self.final_norm(x)

    def _all_starts(self, batch: Batch, depth: int) -> Tensor:
        """Return the starts [B, W] of all blocks that have a place of the batch among their first ``depth`` tokens."""
        count, length = batch.token_ids.shape
        return windows(batch.sequence, batch.place - depth, batch.place - 1, (0, length - 1), count)

    def _states(self, batch: Batch, starts: Tensor, size: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states that predict ``place`` in blocks with the sorted ``starts`` [B, W].

        Returns:
            For each place k of ``size``, the states [N, hidden] at place k of the blocks that start k + 1 tokens before
            ``place``, and whether [N] there is no such block; its states are arbitrary then.
        """
        blocks, own = self.block_states(batch, starts, size), starts[batch.sequence]  # [N, W]
        every, last = torch.arange(len(own), device=own.device), own.shape[1] - 1
        states: list[Tensor] = []
        missing: list[Tensor] = []
        for k in range(size):
            start = batch.place - 1 - k
            column = torch.searchsorted(own, start[:, None]).squeeze(-1).clamp(max=last)
            states.append(blocks[batch.sequence, column, k])
            missing.append(own[every, column] != start)
        return states, missing

    def _with_token_before(self, batch: Batch, states: Sequence[Tensor], drafted: Tensor | None) -> list[Tensor]:
        """Join the ``states`` [N, hidden] of each place with W1 of the token before it.

        The token before the first place is committed. The others are those of ``drafted`` [B, L], by default of the
        batch.
        """
        before = batch.sequence, batch.place - 1
        committed = self.markov_in(batch.token_ids[before])
        later = committed if drafted is None else self.markov_in(drafted[before])
        return [torch.cat([state, later if k else committed], -1) for k, state in enumerate(states)]

    def _output_rows(self) -> Tensor:
        """Return the rows [vocabulary, hidden + rank] of the target's head and of the Markov head."""
        return torch.cat([self.head_rows, self.markov_out.weight], -1)

    def session(self, runtime: Runtime) -> DSparkSession:
        self.share(runtime.target)
        ends = (self.embedding_on(runtime.device), self.final_norm, self.target_head)
        return DSparkSession(self.shape, self.weights(), ends, runtime)


def mask_id(embedding: Tensor) -> int:
    """Return the id of the mask: the highest one whose row of ``embedding`` [vocabulary, hidden] is not 0.

    The highest ids are rare in text. A row of zeros would give all places of a block the same queries.
    """
    return next((token for token in range(len(embedding) - 1, 0, -1) if embedding[token].any()), 0)
