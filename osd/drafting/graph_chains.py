"""Chains in one CUDA graph, greedy or drawn: no level waits for the host."""

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


class Step(Protocol):
    """One forward of a drafter on its device, without a copy to the host."""

    def __call__(self, rows: PackedRows, wanted: Tensor, states: Tensor | None, first: bool) -> tuple[Tensor, Tensor]:
        """Return logits [n, draft vocabulary] after rows ``wanted`` [n], and the states [n, ...] for the next step.

        In the ``first`` step the rows are committed tokens, and ``states`` [R, ...] the target's before each, if the
        drafter reads any; in later steps they are those that the step before returned.
        """
        ...


@dataclass(frozen=True)
class NewTokens:
    """Tokens committed to the sequences of a draft since their last draft.

    ``places`` are, for each sequence, its slot, the places committed there before, and the number of its new tokens, 0
    where it drafts nothing. ``tokens`` are those of all sequences, and ``states`` [tokens, ...] the target's before
    each, if the drafter reads any.
    """

    places: list[tuple[int, int, int]]
    tokens: list[int]
    states: Tensor | None

    def rows(self) -> PackedRows:
        """Return them as rows on the host, each of which sees the rows before it."""
        builder, at = RowBuilder(), 0
        for slot, start, count in self.places:
            builder.tokens(slot, start, self.tokens[at : at + count])
            at += count
        return builder.build()

    @property
    def last(self) -> np.ndarray:
        """[B] the last row of each sequence, arbitrary where it has none."""
        return np.maximum(np.cumsum([count for _, _, count in self.places]) - 1, 0)

    def split(self) -> tuple[NewTokens, NewTokens]:
        """Split off the last token of each sequence."""
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
    """Draws of B chains: their settings, and ``numbers`` [B, levels] between 0 and 1."""

    sampling: SamplingBatch
    numbers: Tensor

    @classmethod
    def of(cls, sampling: SamplingBatch, noise: Noise, levels: int) -> ChainDraws:
        """Return the numbers by which growth ``chain`` draws."""
        index = torch.arange(levels, device=sampling.temperature.device)
        return cls(sampling, noise.uniform(Purpose.DRAFT, index[None]))

    def room(self, count: int) -> ChainDraws:
        """Make room for up to ``count`` sequences, with as many levels and the same steps."""
        sampling = self.sampling.moved(lambda part: part.new_ones(count))
        return ChainDraws(sampling, self.numbers.new_full((count, self.numbers.shape[1]), 0.5))

    def fill(self, other: ChainDraws) -> None:
        """Copy ``other`` to the same addresses."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(other.sampling, name)
            getattr(self.sampling, name)[: len(value)].copy_(value)
        self.numbers[: len(other.numbers)].copy_(other.numbers)

    def draw(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return the drawn columns [B] of ``logits`` [B, Vd] at a level, and their distributions [B, Vd]."""
        q = self.sampling.probabilities(logits)
        return draw(q, self.numbers[:, level]), q


class GraphChains:
    """Drafts by CUDA graphs of all levels, one for each bucket of sizes and number of levels."""

    def __init__(self, step: Step, cache: KVCache, scratch: int, support: Tensor | None, recordable: bool) -> None:
        """Draft with ``step`` over slots of ``cache``, whose last place must be free.

        A sequence has at most ``scratch`` rows in a graph, and as many places behind the committed ones. ``support``
        [Vd] are the target ids of the draft vocabulary, at an address that stays; None for all. A step that is not
        ``recordable`` runs the same without CUDA graphs.
        """
        self._step, self._cache, self._scratch, self._support = step, cache, scratch, support
        self._recorder, self._recordable = GraphRecorder(cache.keys.device), recordable
        self._graphs: GraphCache[tuple[Any, ...], tuple[ChainGraph, Callable[[], list[Tensor]]]] = GraphCache()

    def chains(
        self, new: NewTokens, limits: Sequence[int], floor: float, drawing: ChainDraws | None = None
    ) -> tuple[DraftBatch, Tensor]:
        """Return chains and their logits; see ``AutoregressiveSession.chains``. The host does not wait for them.

        They are the most probable tokens, or drawn by a ``drawing`` of as many sequences and ``max(limits)`` levels.
        """
        count, levels = len(limits), max(limits)
        shape = self._shape(new, levels)
        if shape is None:  # a prompt: all of it but the last tokens only leaves keys and values behind
            early, new = new.split()
            self._take_in(early)
            shape = self._shape(new, levels)
        assert shape is not None  # noqa: S101  one token of each sequence always fits
        padded = power_of_two(count)

        def made() -> tuple[ChainGraph, Callable[[], list[Tensor]]]:
            room = None if drawing is None else drawing.room(padded)
            graph = ChainGraph(self._step, self._cache, self._support, shape, padded, levels, room)
            graph.fill(new, limits, floor, drawing)  # before it is recorded: recording runs it
            return graph, self._recorder.record(graph.run) if self._recordable else graph.run

        key = (shape, padded, levels, None if drawing is None else drawing.sampling.steps)
        graph, play = self._graphs.get(key, made)
        graph.fill(new, limits, floor, drawing)
        # Copies: the next draft writes where this one wrote.
        tokens, sizes, logits, *drawn = (part[:count].clone() for part in play())
        return DraftBatch.chains(tokens, sizes, self._support, *drawn), logits

    def _shape(self, new: NewTokens, levels: int) -> GridShape | None:
        # The levels after the first go on behind what is committed now.
        return GridShape.of(new.rows(), 0, further=levels).bucket(self._cache, self._scratch)

    def _take_in(self, new: NewTokens) -> None:
        rows, wanted = laid_out(new.rows(), torch.empty(0, dtype=torch.int64), self._cache)
        self._step(rows, wanted, new.states, True)


class ChainGraph:
    """Buffers and computation of one CUDA graph."""

    def __init__(
        self,
        step: Step,
        cache: KVCache,
        support: Tensor | None,
        shape: GridShape,
        count: int,
        levels: int,
        drawing: ChainDraws | None = None,
    ) -> None:
        """Make buffers for ``count`` sequences; ``drawing`` are those of draws."""
        self._drawing = drawing
        self._step, self._cache, self._support, self._shape, self._levels = step, cache, support, shape, levels
        more: list[str] = ["last", "limits", "of", "base"]
        self._buffer = RowBuffer(shape, cache, dict.fromkeys(more, count))
        self._floor = torch.zeros((), device=cache.keys.device)
        self._states: Tensor | None = None

    def fill(self, new: NewTokens, limits: Sequence[int], floor: float, drawing: ChainDraws | None = None) -> None:
        """Copy the input of ``run`` to the buffers."""
        if self._drawing is not None and drawing is not None:
            self._drawing.fill(drawing)
        slots, starts, counts = np.array(new.places, np.int64).T
        more = {"last": new.last, "limits": np.array(limits), "of": slots, "base": starts + counts}
        self._buffer.fill(new.rows(), torch.empty(0, dtype=torch.int64), more)
        self._floor.fill_(floor)
        if new.states is not None:
            if self._states is None:
                self._states = new.states.new_zeros(self._shape.rows, new.states.shape[-1])
            self._states[: len(new.states)].copy_(new.states)

    def run(self) -> list[Tensor]:
        """Draft with what is in the buffers.

        Returns:
            Tokens [B, levels], sizes [B] and logits [B, levels, draft vocabulary]. Where tokens are drawn, also their
            columns [B, levels] and distributions [B, levels, draft vocabulary].
        """
        parts = self._buffer.integers
        limits, base = parts["limits"], parts["base"]
        every = torch.arange(len(limits), device=limits.device)
        logits, states = self._step(self._buffer.rows, parts["last"], self._states, True)
        going, sizes = limits > 0, torch.zeros_like(limits)
        tokens, heard = [], []
        drawn: tuple[list[Tensor], list[Tensor]] = ([], [])
        for level in range(self._levels):
            if level:
                rows = self._buffer.next_rows(tokens[-1], parts["of"], base + level - 1, limits > 0)
                logits, states = self._step(rows, every, states, False)
            if self._drawing is None:
                best = logits.argmax(-1)
            else:
                best, q = self._drawing.draw(logits, level)
                drawn[0].append(best)
                drawn[1].append(q)
            tokens.append(best if self._support is None else self._support[best])
            heard.append(logits)
            sizes = sizes + going
            sure = (logits.gather(-1, best[:, None]).squeeze(-1) - logits.logsumexp(-1)).exp() >= self._floor
            going = going & sure & (limits > level + 1)
        return [torch.stack(tokens, 1), sizes, *(torch.stack(parts, 1) for parts in (heard, *drawn) if parts)]
