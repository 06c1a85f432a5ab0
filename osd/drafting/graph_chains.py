"""Greedy and drawn chains in CUDA graphs that compute all levels without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from osd.runtime.batch import GridShape, PackedRows, RowBuffer, RowBuilder, laid_out, power_of_two
from osd.runtime.cuda_graph import GraphCache, GraphRecorder
from osd.runtime.kv_cache import KVCache
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch, draw
from osd.verification.tree import DraftBatch


class GraphStep(Protocol):
    """Forward of a drafter on its device, without a copy to the host."""

    def __call__(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """Return logits [n, draft vocabulary] after rows ``wanted`` [n], and the states [n, ...] for the next step.

        In the ``first`` step the rows are committed tokens, and ``states`` [R, ...] are the target's before each token
        if the drafter reads states. In later steps ``states`` are the result of the previous step.
        """
        ...


@dataclass(frozen=True)
class NewTokens:
    """Tokens committed to the sequences of a draft since their last draft.

    ``places`` holds, for each sequence, its slot, its earlier committed places, and its number of new tokens, 0 without
    a draft. ``tokens`` are those of all sequences, and ``states`` [tokens, ...] are the target's before each of them if
    the drafter reads states.
    """

    places: list[tuple[int, int, int]]
    tokens: list[int]
    states: Tensor | None

    def rows(self) -> PackedRows:
        """Return the tokens as rows on the host; each sees the rows before it."""
        builder, at = RowBuilder(), 0
        for slot, start, count in self.places:
            builder.tokens(slot, start, self.tokens[at : at + count])
            at += count
        return builder.build()

    @property
    def last(self) -> np.ndarray:
        """[B] last row of each sequence, arbitrary for a sequence without rows."""
        return np.maximum(np.cumsum([count for _, _, count in self.places]) - 1, 0)

    def split(self) -> tuple[NewTokens, NewTokens]:
        """Return all but the last token of each sequence, and the last tokens."""
        early = [(slot, start, max(count - 1, 0)) for slot, start, count in self.places]
        late = [(slot, start + max(count - 1, 0), min(count, 1)) for slot, start, count in self.places]
        ends = {int(row) for row, (_, _, count) in zip(self.last, self.places, strict=True) if count}
        parts = []
        for places, chosen in ((early, False), (late, True)):
            rows = [row for row in range(len(self.tokens)) if (row in ends) is chosen]
            states = None if self.states is None else self.states[torch.tensor(rows, device=self.states.device)]
            parts.append(NewTokens(places, [self.tokens[row] for row in rows], states))
        return parts[0], parts[1]


@dataclass(frozen=True)
class ChainDraws:
    """Draws of B chains: their settings, and random ``numbers`` [B, levels] between 0 and 1."""

    sampling: SamplingBatch
    numbers: Tensor

    @classmethod
    def of(cls, sampling: SamplingBatch, noise: Noise, levels: int) -> ChainDraws:
        """Return the draws of growth ``chain`` under ``noise``."""
        index = torch.arange(levels, device=sampling.temperature.device)
        return cls(sampling, noise.uniform(Purpose.DRAFT, index[None]))

    def room(self, count: int) -> ChainDraws:
        """Return buffers for the draws of up to ``count`` sequences; ``fill`` replaces their placeholder values.

        They have the same number of levels as these draws, and the same ``SamplingSteps``.
        """
        sampling = self.sampling.moved(lambda part: part.new_ones(count))
        return ChainDraws(sampling, self.numbers.new_full((count, self.numbers.shape[1]), 0.5))

    def fill(self, other: ChainDraws) -> None:
        """Copy ``other`` into these buffers."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(other.sampling, name)
            getattr(self.sampling, name)[: len(value)].copy_(value)
        self.numbers[: len(other.numbers)].copy_(other.numbers)

    def draw(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return the drawn columns [B] of ``logits`` [B, Vd] at a level, and their distributions [B, Vd]."""
        q = self.sampling.probabilities(logits)
        return draw(q, self.numbers[:, level]), q


class GraphChains:
    """CUDA graphs that draft all levels, one for each bucket of sizes and number of levels."""

    def __init__(self, step: GraphStep, cache: KVCache, scratch: int, support: Tensor | None, recordable: bool) -> None:
        """Draft with ``step`` over slots of ``cache``, whose last place must be free.

        A sequence has at most ``scratch`` rows in a graph, and as many places after its committed ones. ``support``
        [Vd] are the target ids of the draft vocabulary at a constant address, None for all. A step that is not
        ``recordable`` runs without CUDA graphs.
        """
        self._step, self._cache, self._scratch, self._support = step, cache, scratch, support
        self._recorder, self._recordable = GraphRecorder(cache.keys.device), recordable
        self._graphs: GraphCache[tuple[Any, ...], tuple[ChainGraph, Callable[[], list[Tensor]]]] = GraphCache()

    def chains(
        self, new: NewTokens, limits: Sequence[int], floor: float, drawing: ChainDraws | None = None
    ) -> tuple[DraftBatch, Tensor]:
        """Return chains and their logits without waiting for the device; see ``AutoregressiveSession.chains``.

        Tokens are drawn with ``drawing`` for the same sequences and ``max(limits)`` levels; None for greedy chains.
        """
        count, levels = len(limits), max(limits)
        shape = self._shape(new, levels)
        if shape is None:  # a prompt: only its last tokens need outputs
            early, new = new.split()
            self._take_in(early)
            shape = self._shape(new, levels)
        assert shape is not None  # noqa: S101  one token of each sequence always fits
        padded = power_of_two(count)

        def made() -> tuple[ChainGraph, Callable[[], list[Tensor]]]:
            room = None if drawing is None else drawing.room(padded)
            graph = ChainGraph(self._step, self._cache, self._support, shape, padded, levels, room)
            graph.fill(new, limits, floor, drawing)  # recording runs the graph once
            return graph, self._recorder.record(graph.run) if self._recordable else graph.run

        key = (shape, padded, levels, None if drawing is None else drawing.sampling.steps)
        graph, play = self._graphs.get(key, made)
        graph.fill(new, limits, floor, drawing)
        # The next draft writes into the same buffers.
        tokens, sizes, logits, *drawn = (part[:count].clone() for part in play())
        return DraftBatch.chains(tokens, sizes, self._support, *drawn), logits

    def _shape(self, new: NewTokens, levels: int) -> GridShape | None:
        # Later levels follow the tokens that are committed now.
        return GridShape.of(new.rows(), 0, further=levels).bucket(self._cache, self._scratch)

    def _take_in(self, new: NewTokens) -> None:
        rows, wanted = laid_out(new.rows(), torch.empty(0, dtype=torch.int64), self._cache)
        self._step(rows, wanted, new.states, True)


@dataclass
class ChainGraph:
    """Buffers and computation of one CUDA graph for ``count`` sequences; ``drawing`` holds the buffers of draws."""

    step: GraphStep
    cache: KVCache
    support: Tensor | None
    shape: GridShape
    count: int
    levels: int
    drawing: ChainDraws | None = None

    def __post_init__(self) -> None:
        """Make the buffers."""
        more: list[str] = ["last", "limits", "of", "base"]
        self._buffer = RowBuffer(self.shape, self.cache, dict.fromkeys(more, self.count))
        self._floor = torch.zeros((), device=self.cache.keys.device)
        self._states: Tensor | None = None

    def fill(self, new: NewTokens, limits: Sequence[int], floor: float, drawing: ChainDraws | None = None) -> None:
        """Copy the input of ``run`` into the buffers."""
        if self.drawing is not None and drawing is not None:
            self.drawing.fill(drawing)
        slots, starts, counts = np.array(new.places, np.int64).T
        more = {"last": new.last, "limits": np.array(limits), "of": slots, "base": starts + counts}
        self._buffer.fill(new.rows(), torch.empty(0, dtype=torch.int64), more)
        self._floor.fill_(floor)
        if new.states is not None:
            if self._states is None:
                self._states = new.states.new_zeros(self.shape.rows, new.states.shape[-1])
            self._states[: len(new.states)].copy_(new.states)

    def run(self) -> list[Tensor]:
        """Draft with the contents of the buffers.

        Returns:
            Tokens [B, levels], sizes [B] and logits [B, levels, draft vocabulary]; for drawn tokens also their columns
            [B, levels] and distributions [B, levels, draft vocabulary].
        """
        parts = self._buffer.integers
        limits, base = parts["limits"], parts["base"]
        every = torch.arange(len(limits), device=limits.device)
        logits, states = self.step(self._buffer.rows, parts["last"], self._states, True)
        going, sizes = limits > 0, torch.zeros_like(limits)
        tokens, logits_by_level = [], []
        drawn: tuple[list[Tensor], list[Tensor]] = ([], [])
        for level in range(self.levels):
            if level:
                rows = self._buffer.next_rows(tokens[-1], parts["of"], base + level - 1, limits > 0)
                logits, states = self.step(rows, every, states, False)
            if self.drawing is None:
                best = logits.argmax(-1)
            else:
                best, q = self.drawing.draw(logits, level)
                drawn[0].append(best)
                drawn[1].append(q)
            tokens.append(best if self.support is None else self.support[best])
            logits_by_level.append(logits)
            sizes = sizes + going
            sure = (logits.gather(-1, best[:, None]).squeeze(-1) - logits.logsumexp(-1)).exp() >= self._floor
            going = going & sure & (limits > level + 1)
        return [torch.stack(tokens, 1), sizes, *(torch.stack(parts, 1) for parts in (logits_by_level, *drawn) if parts)]
