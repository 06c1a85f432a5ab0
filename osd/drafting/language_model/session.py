"""Session of a small language model: its layers over separate KV slots, and several tokens per call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from weakref import proxy

import numpy as np
import torch
from torch import Tensor, nn

from osd.drafting.autoregressive import AutoregressiveSession, WholeDraft
from osd.drafting.base import DrafterError, prefixed, split
from osd.drafting.graph_chains import ChainDraws, GraphChains
from osd.drafting.growth import Stop
from osd.drafting.language_model.lookahead import PREFIX
from osd.drafting.language_model.translation import TRANSLATION, Reader, Translation, check_translation
from osd.drafting.rows import BlockOutput, Node, TreeRows, path_to
from osd.drafting.session import ANONYMOUS, CommittedTokens, Origin, Runtime
from osd.runtime.batch import PackedRows
from osd.runtime.causal_lm import text_config
from osd.runtime.decoder import recordable
from osd.runtime.device import to_device
from osd.runtime.kv_cache import KVCache
from osd.runtime.model import SlotModel
from osd.verification.tree import DraftBatch, TreeBuilder

_DTYPE = torch.bfloat16  # of the session's weights
_PROMPTS = PREFIX + "prompts"


class PromptRows(TreeRows):
    """Rows of committed tokens and paths of trees, each followed by ``size - 1`` prompt tokens.

    The prompt tokens have the ids from ``first`` on. They go to places without nodes, so only their own call sees them.
    """

    def __init__(
        self, builder: TreeBuilder, cache: KVCache, size: int, first: int, own_ids: np.ndarray | None = None
    ) -> None:
        super().__init__(builder, cache, size=size, own_ids=own_ids)
        self._prompts = [first + number for number in range(size - 1)]
        self._free = Counter(dict(enumerate(builder.sizes.tolist())))  # by tree, the first place without a node

    def text(self, slot: int, tokens: Sequence[int]) -> None:
        """Append committed tokens; the outputs of the call after them are wanted."""
        start = self._cache.length[slot]
        end = self._cache.length[slot] = start + len(tokens)
        row = self._rows.tokens(slot, start, [*tokens, *self._prompts])
        self._wanted += range(row + end - start - 1, row + end - start - 1 + self._size)

    def call(self, slot: int, tree: int, node: Node, read: set[Node]) -> None:
        """Append the nodes on the path to ``node`` that are not ``read``; the outputs after it are wanted."""
        if self._size == 1:  # its parent was expanded before
            self.node(slot, tree, node)
            return
        for member in path_to(self.parents[tree], node):
            if member not in read:
                self.add(slot, tree, member)
                read.add(member)
        self._wanted.append(len(self._rows) - 1)
        path = self.sees(tree, node)
        for token in self._prompts:
            place = self._free[tree]
            self._free[tree] += 1
            path |= 1 << place
            self._wanted.append(self._rows.node(slot, self._cache.length[slot], place, token, path))


class LanguageModelSession(AutoregressiveSession):
    """Session of a small language model over KV slots.

    On a GPU, or with ``Runtime.bucketed``, chains are one CUDA graph. With prompt tokens, the root and every block-th
    node of a path take a call, which reads the unread part of the path and the prompt tokens after it. Its output
    covers the next ``block`` levels for any tokens drawn there.

    A translated sequence may be longer than the target's, and prompt tokens need positions after a text. When the
    places of a slot are full, the session drops the older half of the text and reads the rest again.
    """

    source = "language_model"

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        names: dict[str, list[str]],
        runtime: Runtime,
        translation: Translation | None = None,
    ) -> None:
        """Draft with a copy of ``model``; ``names`` lists all names of each of its tensors."""
        super().__init__(weights, runtime)
        prompts = weights.get(_PROMPTS)
        self._names, inputs = names, 0 if prompts is None else len(prompts)
        self.block = 1 + inputs
        self._reader = None if translation is None else Reader(translation, runtime.device)
        self.model = SlotModel(
            deepcopy(model).to(runtime.device, _DTYPE),
            slots=runtime.slots,
            context=runtime.context if translation is None and not inputs else _context(model, runtime, inputs),
            scratch=runtime.scratch * self.block,
            taps=() if self.head is None else (-1,),
            weights="int8" if runtime.int8 and not self.bucketed else "full",
            bucketed=runtime.bucketed,
            embeddings=inputs,
        )
        self.cache = self.model.cache
        if prompts is not None:
            self.model.embed(prompts)
        elif self.bucketed:
            plays = recordable(self.model.config)
            step = partial(type(self).graph_step, proxy(self))  # no reference cycle, which would delay freeing memory
            self.graphs = GraphChains(step, self.cache, runtime.scratch, self.support, plays)
        self._texts: dict[int, list[int]] = {}  # in the model's tokens; those after the cache's length are unread
        self._blocks: dict[int, dict[Node, BlockOutput]] = {}  # of the current draft, by slot and node before it
        self._read: dict[int, set[Node]] = {}  # by slot, nodes that were read in the current draft

    @property
    def support(self) -> Tensor | None:
        return None if self._reader is None else self._reader.support

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        self.cache.length[slot] = 0
        self._texts[slot] = []
        self._append(slot, [token])

    def commit(self, slot: int, kept: CommittedTokens) -> None:
        self._append(slot, kept.tokens)

    def close(self, slot: int) -> None:
        for states in (self._texts, self._blocks, self._read):
            states.pop(slot, None)

    def _append(self, slot: int, tokens: list[int]) -> None:
        self._texts[slot] += tokens if self._reader is None else self._reader.translate(tokens)

    def unread(self, slot: int) -> tuple[list[int], list[Tensor]]:
        text, context = self._texts[slot], self.model.context
        if len(text) > context:
            del text[: len(text) - (context + 1) // 2]
            self.cache.length[slot] = 0
        return text[self.cache.length[slot] :], []

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        packed = self._rows(builder)
        expanded = [(slots[row], row, node) for row, node in zip(rows.tolist(), nodes.tolist(), strict=True)]
        calls: list[tuple[int, Node]] = []
        for slot, row, node in expanded:
            if node < 0:
                self._blocks[slot], self._read[slot] = {}, set()
                packed.text(slot, self.unread(slot)[0])
            elif packed.begins(row, node):
                packed.call(slot, row, node, self._read[slot])
            else:
                continue
            calls.append((slot, node))
        if calls:
            logits, states = self._call(packed)
            if self.block == 1:
                self.states = states[:, 0]
                return logits[:, 0]
            for (slot, node), *output in zip(calls, logits, states, strict=True):
                self._blocks[slot][node] = BlockOutput(*output)
        outputs, self.states = packed.outputs(expanded, self._blocks)
        return torch.stack(outputs)

    @torch.inference_mode()
    def chains(
        self, slots: Sequence[int], limits: Sequence[int], stop: Stop, draws: ChainDraws | None = None
    ) -> WholeDraft | None:
        """Return chains of whole blocks, whose tokens take no further call, see ``AutoregressiveSession.chains``."""
        levels = max(limits)
        if self.block == 1:
            return super().chains(slots, limits, stop, draws)
        if levels > self.block or stop.above is not None:
            return None
        packed = self._rows(TreeBuilder(len(slots), 0, None))
        drafting = [index for index, limit in enumerate(limits) if limit]
        for index in drafting:
            packed.text(slots[index], self.unread(slots[index])[0])
        outputs, _ = self._call(packed)
        logits = outputs[:, :levels]
        if len(drafting) < len(slots):
            logits = outputs.new_zeros(len(slots), levels, outputs.shape[-1])
            logits[drafting] = outputs[:, :levels]
        best = logits.argmax(-1)
        drafted = best if self.support is None else self.support[best]
        draft = DraftBatch.chains(drafted, to_device(limits, self.device), self.support)
        return WholeDraft(draft, logits, pending=self.bucketed)

    def _rows(self, builder: TreeBuilder) -> PromptRows:
        own_ids = None if self._reader is None else self._reader.host_ids
        return PromptRows(builder, self.cache, self.block, self.model.vocabulary, own_ids)

    def _call(self, packed: PromptRows) -> tuple[Tensor, Tensor]:
        """Return the logits [calls, block, draft vocabulary], and the states [calls, block, width] for a head."""
        wanted = packed.wanted
        forward = self.model.forward(packed.rows(), wanted)
        logits = forward.logits if self._reader is None else forward.logits[:, self._reader.columns]
        states = logits[:, :0] if forward.hidden is None else forward.hidden[wanted.to(self.device)]
        return logits.unflatten(0, (-1, self.block)), states.unflatten(0, (-1, self.block))

    def graph_step(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """Return the logits of one level of chains, twice, see ``osd.drafting.graph_chains.GraphStep``."""
        reader = self._reader
        if reader is not None and not first:  # the tokens of the last step have ids of the target
            rows = replace(rows, token_ids=reader.own_ids[rows.token_ids])
        logits = self.model.compute(rows, wanted).logits
        logits = logits if reader is None else logits[:, reader.columns]
        return logits, logits

    def staged(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights, translation = split(TRANSLATION, weights)
        if translation:
            check_translation(translation, self.model.vocab_size)
        prompts = {name: weights[name].to(self.device, copy=True) for name in weights if name == _PROMPTS}
        # Linear layers have their own layout, so a tied weight is staged twice.
        aliases = {alias: weights[name] for name, every in self._names.items() for alias in every}
        staged = {alias: self.model.stage(alias, value) for alias, value in aliases.items()}
        return staged | prefixed(TRANSLATION, translation) | prompts

    def swap(self, staged: dict[str, Tensor]) -> None:
        staged, translation = split(TRANSLATION, staged)
        if (prompts := staged.pop(_PROMPTS, None)) is not None:
            self.model.embed(prompts)
        self.model.load(staged)
        if self._reader is not None:
            self._reader.load(translation)


def _context(model: nn.Module, runtime: Runtime, inputs: int) -> int:
    """Return the most tokens of a sequence, less the positions for a draft and its ``inputs`` prompt tokens."""
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if positions is None:
        return runtime.context
    most = runtime.scratch + inputs
    if positions <= most:
        raise DrafterError(f"drafter.source has {positions} positions, but must have more than the {most} of a draft")
    return min(runtime.context, positions - most)
