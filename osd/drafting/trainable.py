"""Drafters that the distiller can improve."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from osd.drafting.acceptance_head import CONFIG, AcceptanceHead
from osd.drafting.base import OPTIONAL, Drafter, DrafterError, check
from osd.runtime.causal_lm import decoder_of
from osd.runtime.taps import tapped


class Batch(Protocol):
    """Sequences that a drafter is unrolled on.

    ``token_ids`` [B, L] and ``lengths`` [B]; ``hidden`` [B, L, taps * hidden] or None; the N places to predict as
    ``sequence`` [N], the row, and ``place`` [N], the index in that row. ``completes`` [B] marks text completions, whose
    prompt is text and no chat.
    """

    token_ids: Tensor
    lengths: Tensor
    hidden: Tensor | None
    sequence: Tensor
    place: Tensor
    completes: Tensor

    def select(self, positions: Tensor) -> Self:
        """Return the same sequences with some of the N places, [M] or [N] bool."""
        ...


@dataclass(frozen=True)
class Loss:
    """Loss of a micro-batch, a scalar, and the number of positions with a weight in it.

    ``value`` has no gradient where there is nothing to learn from. ``kept`` is the expected acceptance of the positions
    at each depth, NaN where there were none.
    """

    value: Tensor
    positions: int
    kept: Sequence[float] = ()


@dataclass(frozen=True)
class Sampled:
    """Places [C] of a draft vocabulary that a loss needs, and the numbers ``raised`` [C] to add to their logits."""

    places: Tensor
    raised: Tensor


class Objective(Protocol):
    """Function that the distiller minimises; see ``osd.learning.objective``."""

    @property
    def depth(self) -> int:
        """Steps to unroll."""
        ...

    def drafted(self, batch: Batch) -> Tensor | None:
        """[B, L] the tokens that later steps read, None for the batch's own."""
        ...

    def share(self, depth: int) -> float:
        """Weight of the loss of a ``depth``, 1 of the first."""
        ...

    def sampled(self, batch: Batch, draft_ids: Tensor) -> Sampled | None:
        """Return the part of the ``draft_ids`` [vocabulary] that suffices for the loss, None for all of them."""
        ...

    def loss(
        self,
        batch: Batch,
        levels: Sequence[Tensor],
        draft_ids: Tensor | None,
        left_out: Sequence[Tensor] | None = None,
    ) -> Loss:
        """Return the loss of the logits [N, draft vocabulary] of all unrolled steps; see ``mean`` for ``left_out``."""
        ...

    def mean(self, batch: Batch, depth: int, values: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the loss of ``values`` [N] of one step, without positions that are ``left_out`` or do not exist."""
        ...

    def surprise(self, batch: Batch, logits: Tensor, draft_ids: Tensor | None) -> Tensor:
        """[N] minus the log-probability of the target's most probable token, where it can be drafted."""
        ...


class FrozenTarget:
    """The target in transformers, for drafters that train on its computation; ``load`` reads it on first use.

    It is no submodule of the drafter: it is neither saved nor trained.
    """

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        self._load = load
        self._model: Any = None

    def on(self, device: torch.device) -> Any:
        """Return the model on ``device``."""
        if self._model is None:
            model: Any = self._load().requires_grad_(False)
            model.set_attn_implementation("sdpa")
            self._model = model.to(device).eval()
        return self._model

    @torch.no_grad()
    def states(self, layers: Sequence[int], **inputs: Tensor) -> list[Tensor]:
        """Return the output [B, L, hidden] of each of ``layers``; ``inputs`` are its decoder's, with ``input_ids``."""
        model = self.on(inputs["input_ids"].device)
        with tapped(model, layers) as outputs:
            decoder_of(model)(**inputs, use_cache=False)
        return [outputs[layer] for layer in layers]


class Trainable(Drafter, nn.Module):
    """Drafter whose weights are trained.

    With an ``acceptance`` head, a version has the drafter's own tensors and, under a prefix, the head's. A version
    without the head's tensors can be loaded too: the head then starts at 1/2 again.
    """

    acceptance: AcceptanceHead | None

    def __init__(self) -> None:
        super().__init__()
        self.acceptance = None

    def add_head(self) -> Self:
        """Add a new acceptance head, and return the drafter."""
        if not self.state_width:
            raise DrafterError(f"a {self.kind} drafter gives no states to judge tokens by")
        self.acceptance = AcceptanceHead(self.state_width)
        return self

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.fields()} | ({} if self.acceptance is None else {CONFIG: True})

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``config`` that only its kind has."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of its weights and batches."""
        return next(self.parameters()).device

    @property
    def draft_ids(self) -> Tensor | None:
        """[draft vocabulary] the target ids that it may draft, None for all of them."""
        return None

    @property
    def state_width(self) -> int:
        """Width of its states, 0 where it gives none."""
        return 0

    @property
    def levels(self) -> int | None:
        """Most tokens ahead that it predicts, each by weights of its own; None without a bound."""
        return None

    def hidden(self, batch: Batch) -> Tensor:
        """[B, L, taps * hidden] the target's states in ``batch``; raises DrafterError where it has none."""
        if batch.hidden is None:
            raise DrafterError(f"{self.kind} learns from hidden states, and the trace has none")
        return batch.hidden

    def pace(self, name: str) -> float:
        """Factor of ``trainer.learning_rate`` for the trained tensor ``name``."""
        return 1.0

    def trained(self) -> dict[str, Tensor]:
        """Return the tensors that the loss trains, by name; an acceptance head has a loss of its own."""
        named = self.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad and not name.startswith(OPTIONAL)}

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """Return the loss that the distiller minimises."""
        levels = self.unroll(batch, self.levels or objective.depth, objective.drafted(batch))
        return objective.loss(batch, levels, self.draft_ids)

    @abstractmethod
    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return the logits [N, draft vocabulary] of each of ``depth`` steps on its own outputs, as a draft would run.

        There are no more of them than its ``levels``. Entry d predicts ``place`` from every token before it, and from
        the target's hidden states up to ``place - 2 - d`` only. Rows with ``place < d + 2`` mean nothing.

        ``drafted`` [B, L] are the tokens that later steps read as the draft before ``place``; one that differs from the
        batch's is context for no other position. None stands for the batch's own.
        """

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """Return the states [N, state_width] after the tokens ``fed`` [N], as if each was drafted at its ``place``.

        Entry d - 1 of ``depth`` is the state of the d-th token of a draft. Tokens before it are those of the batch, or
        those fed at their places. Rows with ``place < d + 1`` mean nothing.
        """
        raise DrafterError(f"a {self.kind} drafter gives no states")

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Draft the most frequent tokens, by ``counts`` [target vocabulary], if there is a draft vocabulary."""

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.state_dict().items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.load_state_dict(check(weights, self.weights()), strict=False)


def fed_tokens(batch: Batch, fed: Tensor) -> Tensor:
    """[B, L] the batch's tokens with ``fed`` [N] at their places."""
    return batch.token_ids.index_put((batch.sequence, batch.place), fed)
