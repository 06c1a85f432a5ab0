"""CUDA graphs: functions over buffers that never move, recorded once and launched again without the interpreter.

A decode step on a GPU is hundreds of kernels of a few microseconds; launched one by one from Python they take longer
than they run. A CUDA graph launches them together, but only with the shapes and addresses that it was recorded with:
what changes from call to call has to be copied into a ``StaticBuffer`` first.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from osd.runtime.batch import GridShape, PackedRows, RowBuffer, laid_out
from osd.runtime.decoder import Decoder, Forward
from osd.runtime.kv_cache import KVCache

Result = TypeVar("Result")
Kept = TypeVar("Kept")
Key = TypeVar("Key", bound=Hashable)

_WARM_UPS = 2  # before a function is recorded: libraries choose kernels and take memory when they are first called


class GraphRecorder:
    """Records functions as CUDA graphs that share memory; on a CPU a graph calls its function again.

    A function must read all that changes from tensors whose addresses stay, must never ask the device for a value, and
    must do no harm when it runs several times with the same input: recording runs it to warm up. What it returns is
    overwritten when any function of the same recorder is played again. ``made`` counts the graphs of all recorders: one
    takes far longer than playing it, which spoils measurements.
    """

    made: ClassVar[int] = 0

    def __init__(self, device: torch.device) -> None:
        """Record for ``device``."""
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """What plays ``run`` again; it has to be called for the first result, too."""
        GraphRecorder.made += 1
        if self._device.type != "cuda":
            return run
        # One stream for all graphs: the libraries keep a work space for every stream that they have seen.
        side = self._side = self._side or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool, self._pool = self._pool, None  # one in which a recording failed takes no further one
        # Other threads may stage weights meanwhile: only what this one calls can break the recording.
        with _nothing_collected(), torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            result = run()
        self._pool = pool or graph.pool()

        def play() -> Result:
            graph.replay()
            return result

        return play


@contextmanager
def _nothing_collected() -> Generator[None]:
    """Collect no garbage: among it may be graphs of others, and a recording fails where one is freed meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphCache(Generic[Key, Kept]):
    """The graphs that were used last, by their sizes: each holds memory for its results."""

    def __init__(self, most: int = 128) -> None:
        """Keep ``most`` of them."""
        self._most = most
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._kept)

    def get(self, key: Key, make: Callable[[], Kept]) -> Kept:
        """The graph of these sizes, which ``make`` makes where there is none."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)  # not played any more: making the new one has waited for the device
        self._kept.move_to_end(key)
        return self._kept[key]


class BucketedForward:
    """A model's forward at bucketed sizes, each a CUDA graph that is recorded when it is first needed.

    As vLLM and SGLang do it: the rows are padded to the next size that was recorded, in buffers that the graph reads.
    What is larger than drafts are runs as it comes, through the same code.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, scratch: int, recordable: bool) -> None:
        """Record ``decoder`` over the slots of ``cache``, the last place of which must be nobody's.

        A graph has at most ``scratch`` rows of a sequence. A decoder that asks the device for values is not
        ``recordable``.
        """
        self._decoder, self._cache, self._scratch, self._recordable = decoder, cache, scratch, recordable
        self._recorder = GraphRecorder(cache.keys.device)
        self._graphs: GraphCache[tuple[GridShape, range], _Graph] = GraphCache()

    def __len__(self) -> int:
        """How many sizes are recorded."""
        return len(self._graphs)

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """See ``Decoder.forward``; ``rows`` and ``wanted`` are on the host, all else on the device."""
        needed = GridShape.of(rows, len(wanted))
        recordable = self._recordable and rows.selection is None  # what is chosen is no fixed size
        shape = needed.bucket(self._cache, self._scratch) if recordable else None
        if shape is None:
            return self._decoder.forward(*laid_out(rows, wanted, self._cache), layers, states)

        decoder = self._decoder  # what is recorded must not keep its recorder alive

        def made() -> _Graph:
            buffer = RowBuffer(shape, self._cache)
            given = None if states is None else states.new_zeros(shape.rows, states.shape[-1])
            graph = _Graph(buffer, given, lambda: decoder.forward(buffer.rows, buffer.wanted, layers, given))
            graph.fill(rows, wanted, states)  # before it is recorded: recording runs it
            return replace(graph, play=self._recorder.record(graph.play))

        graph = self._graphs.get((shape, layers), made)
        graph.fill(rows, wanted, states)
        # Copies: the next forward writes where this one wrote, and states are kept for longer.
        return graph.play().map(lambda part: part[: len(rows.slots)].clone(), lambda part: part[: len(wanted)].clone())

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """See ``Decoder.fill``; ``rows`` are on the host."""
        self._decoder.fill(laid_out(rows, torch.empty(0, dtype=torch.int64), self._cache)[0], states, layers)


@dataclass(frozen=True)
class _Graph:
    """A recorded forward and what it reads."""

    buffer: RowBuffer
    states: Tensor | None
    play: Callable[[], Forward]

    def fill(self, rows: PackedRows, wanted: Tensor, states: Tensor | None) -> None:
        self.buffer.fill(rows, wanted)
        if states is not None and self.states is not None:
            self.states[: len(states)].copy_(states)
