"""Chains in one CUDA graph: no level of a draft waits for the host, whatever the drafter is and however it draws."""

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
        """Logits [n, draft vocabulary] after the rows ``wanted`` [n], and the states [n, ...] that a next step reads.

        In the ``first`` step the rows are committed tokens and ``states`` [R, ...] the target's before each, if the
        drafter reads any; in later ones what the step before returned.
        """
        ...


@dataclass(frozen=True)
class NewTokens:
    """The committed tokens of the sequences of a draft since their last one.

    ``places`` hold of each its slot, the places committed there before, and how many tokens follow, none where it
    drafts nothing; ``tokens`` of all of them, one after the other, and the ``states`` [tokens, ...] of the target
    before each, if the drafter reads any.
    """

    places: list[tuple[int, int, int]]
    tokens: list[int]
    states: Tensor | None

    def rows(self) -> PackedRows:
        """As rows on the host, each of which sees what comes before it."""
        builder, at = RowBuilder(), 0
        for slot, start, count in self.places:
            builder.tokens(slot, start, self.tokens[at : at + count])
            at += count
        return builder.build()

    @property
    def last(self) -> np.ndarray:
        """[B] the last row of each sequence, any where it has none."""
        return np.maximum(np.cumsum([count for _, _, count in self.places]) - 1, 0)

    def split(self) -> tuple[NewTokens, NewTokens]:
        """All but the last token of each sequence, and these."""
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
    """What tokens of B sequences are drawn by: their settings, and numbers [B, levels] between 0 and 1, one a level."""

    sampling: SamplingBatch
    numbers: Tensor

    @classmethod
    def of(cls, sampling: SamplingBatch, noise: Noise, levels: int) -> ChainDraws:
        """The numbers by which growth ``chain`` draws so many levels."""
        index = torch.arange(levels, device=sampling.temperature.device)
        return cls(sampling, noise.uniform(Purpose.DRAFT, index[None]))

    def room(self, count: int) -> ChainDraws:
        """Room for what ``fill`` takes in of up to ``count`` sequences, with as many levels and the same steps."""
        sampling = self.sampling.moved(lambda part: part.new_ones(count))
        return ChainDraws(sampling, self.numbers.new_full((count, self.numbers.shape[1]), 0.5))

    def fill(self, other: ChainDraws) -> None:
        """Take in what ``other`` draws by; the addresses stay."""
        ours, theirs = self.sampling, other.sampling
        pairs = [
            (ours.temperature, theirs.temperature), (ours.top_k, theirs.top_k), (ours.top_p, theirs.top_p),
            (ours.min_p, theirs.min_p), (self.numbers, other.numbers),
        ]  # fmt: skip
        for mine, value in pairs:
            mine[: len(value)].copy_(value)

    def draw(self, logits: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """The columns [B] that are drawn of ``logits`` [B, Vd] at a level, and what they are drawn from [B, Vd]."""
        q = self.sampling.probabilities(logits)
        return draw(q, self.numbers[:, level]), q


class GraphChains:
    """Drafts of B sequences by CUDA graphs of all their levels, one for each bucket of sizes and number of levels."""

    def __init__(self, step: Step, cache: KVCache, scratch: int, support: Tensor | None, recordable: bool) -> None:
        """Draft with ``step`` over slots of ``cache``, the last place of which must be nobody's.

        A sequence has ``scratch`` rows in a graph at most, and as many places behind the committed ones. ``support``
        [Vd] are the target ids of the draft vocabulary, at an address that stays; None for all. What is not
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
    """The buffers of one CUDA graph, and what it records."""

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
        """Have buffers for ``count`` sequences, those in ``drawing`` among them where tokens are drawn."""
        self._drawing = drawing
        self._step, self._cache, self._support, self._shape, self._levels = step, cache, support, shape, levels
        more: list[str] = ["last", "limits", "of", "base"]
        self._buffer = RowBuffer(shape, cache, dict.fromkeys(more, count))
        self._floor = torch.zeros((), device=cache.keys.device)
        self._states: Tensor | None = None

    def fill(self, new: NewTokens, limits: Sequence[int], floor: float, drawing: ChainDraws | None = None) -> None:
        """Take in what ``run`` reads."""
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
