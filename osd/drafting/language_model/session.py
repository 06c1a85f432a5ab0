"""A small language model's session: its layers over KV slots of their own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from weakref import proxy

import torch
from torch import Tensor, nn

from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import DrafterError, prefixed, split
from osd.drafting.graph_chains import GraphChains
from osd.drafting.language_model.translation import TRANSLATION, Reader, Translation, check_translation
from osd.drafting.rows import TreeRows
from osd.drafting.session import ANONYMOUS, Kept, Origin, Runtime
from osd.runtime.batch import PackedRows
from osd.runtime.causal_lm import text_config
from osd.runtime.decoder import recordable
from osd.runtime.model import SlotModel
from osd.verification.tree import TreeBuilder

_DTYPE = torch.bfloat16  # of the weights that draft


class LanguageModelSession(AutoregressiveSession):
    """A small language model over KV slots; see ``osd.drafting.session.Session``.

    On a GPU, or where ``Runtime.bucketed`` says so, chains are one CUDA graph.

    With a ``translation`` the model reads a sequence in tokens of its own, which may be more than the target has: it
    has as many places as that, or as it has positions, and where they are full the older half is dropped and the rest
    read again from the first place on. So it is with ``inputs`` that need positions behind a text.
    """

    source = "language_model"

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        names: dict[str, list[str]],
        runtime: Runtime,
        translation: Translation | None = None,
        inputs: int = 0,
    ) -> None:
        """Draft with a copy of ``model``; ``weights`` are a version's, and ``names`` all those of each in the model.

        Behind each place that it is asked about it may read so many ``inputs`` that are no tokens.

        Raises:
            DrafterError: with a translation, the model has too few positions for any text beside a draft.
        """
        super().__init__(weights, runtime)
        self._names = names
        self._reader = None if translation is None else Reader(translation, runtime.device)
        self.model = SlotModel(
            deepcopy(model).to(runtime.device, _DTYPE),
            slots=runtime.slots,
            context=runtime.context if translation is None and not inputs else _context(model, runtime, inputs),
            scratch=runtime.scratch * (1 + inputs),
            taps=() if self.head is None else (-1,),
            weights="int8" if runtime.int8 and not self.bucketed else "full",
            bucketed=runtime.bucketed,
            embeddings=inputs,
        )
        self.cache = self.model.cache
        if self.bucketed:
            plays = recordable(self.model.config)
            step = partial(type(self).graph_step, proxy(self))  # else its memory would wait for the garbage collector
            self.graphs = GraphChains(step, self.cache, runtime.scratch, self.support, plays)
        self._texts: dict[int, list[int]] = {}  # the model's own tokens; those behind the cache's length are unread

    @property
    def support(self) -> Tensor | None:
        return None if self._reader is None else self._reader.support

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.cache.length[slot] = 0
        self._texts[slot] = []
        self._append(slot, [token])

    def commit(self, slot: int, kept: Kept) -> None:
        self._append(slot, kept.tokens)

    def close(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def _append(self, slot: int, tokens: list[int]) -> None:
        self._texts[slot] += tokens if self._reader is None else self._reader.own(tokens)

    def unread(self, slot: int) -> tuple[list[int], list[Tensor]]:
        """See ``AutoregressiveSession.unread``: tokens from the place of the cache's length on, and no states."""
        text, context = self._texts[slot], self.model.context
        if len(text) > context:
            del text[: len(text) - (context + 1) // 2]
            self.cache.length[slot] = 0
        return text[self.cache.length[slot] :], []

    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        reader = self._reader
        packed = TreeRows(builder, self.cache, None if reader is None else reader.host_ids, (rows, nodes))
        for row, node in zip(*packed.asked, strict=True):
            slot = slots[row]
            if node < 0:
                packed.commit(slot, self.unread(slot)[0])
            else:
                packed.node(slot, row, node)
        forward = self.model.forward(packed.rows(), packed.last)
        self.states = forward.logits if forward.hidden is None else forward.hidden[packed.last]
        return forward.logits if reader is None else forward.logits[:, reader.columns]

    def graph_step(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """See ``osd.drafting.graph_chains.Step``; it reads tokens only."""
        reader = self._reader
        if reader is not None and not first:  # what the last step drew are ids of the target
            rows = replace(rows, token_ids=reader.own_ids[rows.token_ids])
        logits = self.model.compute(rows, wanted).logits
        logits = logits if reader is None else logits[:, reader.columns]
        return logits, logits

    def staged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights, translation = split(TRANSLATION, weights)
        if translation:
            check_translation(translation, self.model.vocab_size)
        # Where the linear layers have a layout of their own, a tied weight is there twice.
        aliases = {alias: weights[name] for name, every in self._names.items() for alias in every}
        staged = {alias: self.model.stage(alias, value) for alias, value in aliases.items()}
        return staged | prefixed(TRANSLATION, translation)

    def swap(self, staged: dict[str, Tensor]) -> None:
        staged, translation = split(TRANSLATION, staged)
        self.model.load(staged)
        if self._reader is not None:
            self._reader.load(translation)


def _context(model: nn.Module, runtime: Runtime, inputs: int) -> int:
    """Tokens of its own that a model reads of a sequence at most, so that a draft and its inputs have positions too."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if positions is None:
        return runtime.context
    most = runtime.scratch + inputs
    if positions <= most:
        raise DrafterError(f"drafter.source has {positions} positions, must be more than the {most} of a draft")
    return min(runtime.context, positions - most)
