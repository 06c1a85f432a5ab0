"""Base class of trained drafters, and the types that they share with the distiller."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from osd.drafting.acceptance_head import CONFIG, AcceptanceHead
from osd.drafting.base import OPTIONAL, Drafter, DrafterError, check
from osd.runtime.causal_lm import decoder_of
from osd.runtime.taps import tapped
from osd.target.model import load_model


class Batch(Protocol):
    """Training sequences, and N places in them to predict.

    The sequences are ``token_ids`` [B, L] of ``lengths`` [B], with the target's states ``hidden`` [B, L, taps * hidden]
    or None. Place n is in row ``sequence`` [N] at index ``place`` [N]. ``completes`` [B] marks text completions, whose
    prompts are plain text instead of chats.
    """

    token_ids: Tensor
    lengths: Tensor
    hidden: Tensor | None
    sequence: Tensor
    place: Tensor
    completes: Tensor

    def select(self, positions: Tensor) -> Self:
        """Return the same sequences with the places ``positions``, [M] indices or [N] bool."""
        ...


@dataclass(frozen=True)
class Loss:
    """Loss of a micro-batch, a scalar, and the number of ``positions`` with a weight in it.

    ``value`` has no gradient if there is nothing to learn from. ``kept`` is the expected acceptance of the positions
    at each depth, NaN for a depth without positions.
    """

    value: Tensor
    positions: int
    kept: Sequence[float] = ()


@dataclass(frozen=True)
class SampledVocabulary:
    """Draft ids ``places`` [C] that a loss needs, and numbers ``raised`` [C] to add to their logits."""

    places: Tensor
    raised: Tensor


class TrainingObjective(Protocol):
    """Objective of the distiller; see ``osd.learning.objective``."""

    @property
    def depth(self) -> int:
        """Number of steps to unroll."""
        ...

    def drafted(self, batch: Batch) -> Tensor | None:
        """Return drafted target ids [B, L]; unrolled steps after the first read them in place of ``batch.token_ids``.

        None if these steps read ``batch.token_ids`` too.
        """
        ...

    def share(self, depth: int) -> float:
        """Return the weight of the loss at a ``depth``; the first one has weight 1."""
        ...

    def sampled(self, batch: Batch, draft_ids: Tensor) -> SampledVocabulary | None:
        """Return the part of the ``draft_ids`` [vocabulary] that the loss needs, None for all of them."""
        ...

    def block_starts(self, batch: Batch, most: int) -> Tensor:
        """Return the sorted places [B, W] of the tokens before at most ``most`` blocks to learn.

        A sequence with fewer than W blocks repeats its last place, after which no block exists.
        """
        ...

    def loss(
        self,
        batch: Batch,
        levels: Sequence[Tensor],
        draft_ids: Tensor | None,
        left_out: Sequence[Tensor] | None = None,
    ) -> Loss:
        """Return the loss of the logits [N, draft vocabulary] of all steps; see ``mean`` for ``left_out``."""
        ...

    def mean(self, batch: Batch, depth: int, values: Tensor, left_out: Tensor | None = None) -> Tensor:
        """Return the loss of ``values`` [N] of one step, without ``left_out`` [N] and non-existent positions."""
        ...

    def surprise(self, batch: Batch, logits: Tensor, draft_ids: Tensor | None) -> Tensor:
        """Return minus the log-probabilities [N] of the target's most probable tokens, 0 if they cannot be drafted."""
        ...


LoadLayers = Callable[[int], nn.Module]
"""Function that reads at least the given number of the target's first layers in float32."""


def first_layers_of(target_dir: Path) -> LoadLayers:
    """Return the function that reads the first layers of the target in ``target_dir``."""
    return partial(load_model, target_dir, "float32", "cpu")


class FrozenTarget:
    """Target in transformers, for drafters that train through its forward; ``load`` reads it on first use.

    It is not a submodule of the drafter, so it is neither saved nor trained.
    """

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        self._load = load
        self._model: Any = None

    def on(self, device: torch.device) -> Any:
        """Return the frozen model; the first call reads it and moves it to ``device``."""
        if self._model is None:
            model: Any = self._load().requires_grad_(False)
            model.set_attn_implementation("sdpa")
            self._model = model.to(device).eval()
        return self._model

    @torch.no_grad()
    def states(self, layers: Sequence[int], **inputs: Tensor) -> list[Tensor]:
        """Return the output [B, L, hidden] of each of ``layers``; ``inputs`` are the decoder's, with ``input_ids``."""
        model = self.on(inputs["input_ids"].device)
        with tapped(model, layers) as outputs:
            decoder_of(model)(**inputs, use_cache=False)
        return [outputs[layer] for layer in layers]


class Trainable(Drafter, nn.Module):
    """Drafter whose weights are trained.

    With an ``acceptance`` head, a version also has the tensors of the head under a prefix. A version without them can
    be loaded too: the head then starts at probability 1/2 again.
    """

    acceptance: AcceptanceHead | None
    state_width: int = 0
    """Width of the states that a head reads, 0 if the drafter has none."""
    levels: int | None = None
    """Most tokens ahead that it predicts, each with separate weights; None without a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.acceptance = None

    def add_head(self) -> Self:
        """Add a new acceptance head and return the drafter."""
        if not self.state_width:
            raise DrafterError(f"a {self.kind} drafter has no states for an acceptance head")
        self.acceptance = AcceptanceHead(self.state_width)
        return self

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.fields()} | ({} if self.acceptance is None else {CONFIG: True})

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``config`` that are specific to the kind."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the weights and batches."""
        return next(self.parameters()).device

    @property
    def draft_ids(self) -> Tensor | None:
        """[draft vocabulary] target ids that it may draft, None for all of them."""
        return None

    def hidden(self, batch: Batch) -> Tensor:
        """Return the target's states [B, L, taps * hidden] in ``batch``; raise DrafterError if it has none."""
        if batch.hidden is None:
            raise DrafterError(f"{self.kind} learns from hidden states, and the trace has none")
        return batch.hidden

    def pace(self, name: str) -> float:
        """Return the factor of ``trainer.learning_rate`` for the trained tensor ``name``."""
        return 1.0

    def trained(self) -> dict[str, Tensor]:
        """Return the tensors that the loss trains, by name; an acceptance head has a separate loss."""
        named = self.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad and not name.startswith(OPTIONAL)}

    def loss(self, batch: Batch, objective: TrainingObjective) -> Loss:
        """Return the loss that the distiller minimises."""
        levels = self.unroll(batch, self.levels or objective.depth, objective.drafted(batch))
        return objective.loss(batch, levels, self.draft_ids)

    @abstractmethod
    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """Return the logits [N, draft vocabulary] of the steps of a draft, for the N places of a batch.

        Entry d = 0, 1, ... predicts the token at ``batch.place`` from every token before it, and from the target's
        hidden states up to ``batch.place - 2 - d`` only. Rows with ``batch.place < d + 2`` are arbitrary.

        Args:
            batch: sequences and places; ``Batch`` explains N, B and L.
            depth: number of steps, and of entries; at most ``levels`` entries are returned.
            drafted: [B, L] tokens that later steps read as the draft before a place; None for the tokens of the batch.
                If a drafted token differs from the batch's token, only the draft with this token reads it.
        """

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """Return the states [N, state_width] after the tokens ``fed`` [N], as if each was drafted at its ``place``.

        Entry d - 1 of ``depth`` is the state of the d-th token of a draft. The tokens before it are those of the batch
        or the fed ones at their places. Rows with ``place < d + 1`` are arbitrary.
        """
        raise DrafterError(f"a {self.kind} drafter has no states")

    def adapt_vocabulary(self, counts: Tensor) -> None:
        """Make the most frequent tokens the draft vocabulary, by ``counts`` [target vocabulary], if there is one."""

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.state_dict().items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.load_state_dict(check(weights, self.weights()), strict=False)


def fed_tokens(batch: Batch, fed: Tensor) -> Tensor:
    """Return the batch's tokens [B, L] with ``fed`` [N] at their places."""
    return batch.token_ids.index_put((batch.sequence, batch.place), fed)
