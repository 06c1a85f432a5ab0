"""CUDA graphs: functions over fixed buffers, recorded once and launched again without the interpreter.

A decoding step on a GPU is hundreds of kernels of a few microseconds each. Launched one by one from Python they take
longer than they run. A CUDA graph launches them together, but only with the shapes and addresses of its recording:
values that change between calls have to be copied into a ``StaticBuffer`` first.
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

_WARM_UPS = 2  # runs before a recording, in which libraries choose kernels and allocate memory


class GraphRecorder:
    """Recorder of functions as CUDA graphs that share memory; on a CPU a graph calls its function again.

    A function must read its changing inputs from tensors at fixed addresses, must not read values from the device, and
    must be repeatable with the same input, because recording runs it to warm up. Its results are overwritten when any
    function of the same recorder is played again.

    ``made`` counts the graphs of all recorders: recording takes far longer than playing, which spoils measurements.
    """

    made: ClassVar[int] = 0

    def __init__(self, device: torch.device) -> None:
        """Record for ``device``."""
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """Return a function that plays ``run`` again; it has to be called for the first result too."""
        GraphRecorder.made += 1
        if self._device.type != "cuda":
            return run
        # One stream for all graphs: the libraries keep a work space for each stream.
        side = self._side = self._side or torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                run()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool, self._pool = self._pool, None  # a pool is unusable after a failed recording
        # Other threads may stage weights during the recording: only calls of this thread may break it.
        with _without_garbage_collection(), torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            result = run()
        self._pool = pool or graph.pool()

        def play() -> Result:
            graph.replay()
            return result

        return play


@contextmanager
def _without_garbage_collection() -> Generator[None]:
    """Pause garbage collection: freeing an unrelated graph during a recording makes it fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphCache(Generic[Key, Kept]):
    """Cache of the most recently used graphs by their sizes; each holds memory for its results."""

    def __init__(self, most: int = 128) -> None:
        """Keep ``most`` graphs."""
        self._most = most
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of graphs."""
        return len(self._kept)

    def get(self, key: Key, make: Callable[[], Kept]) -> Kept:
        """Return the graph of these sizes, after making it with ``make`` if it is missing."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)  # not running: making the new graph has waited for the device
        self._kept.move_to_end(key)
        return self._kept[key]


class BucketedForward:
    """Forward of a model at bucketed sizes, each a CUDA graph that is recorded at its first use.

    As in vLLM and SGLang, the rows are padded to the next recorded size, in buffers that the graph reads. Forwards
    larger than drafts run unpadded through the same code.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, scratch: int, recordable: bool) -> None:
        """Record ``decoder`` over the slots of ``cache``, whose last place must be unused.

        Args:
            decoder: the model.
            cache: its KV cache.
            scratch: most rows of a sequence in a graph.
            recordable: False for a decoder that reads values from the device.
        """
        self._decoder, self._cache, self._scratch, self._recordable = decoder, cache, scratch, recordable
        self._recorder = GraphRecorder(cache.keys.device)
        self._graphs: GraphCache[tuple[GridShape, range], _Graph] = GraphCache()

    def __len__(self) -> int:
        """Return the number of recorded sizes."""
        return len(self._graphs)

    def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
        """Run a forward at a recorded size, see ``Decoder.forward``; ``rows`` and ``wanted`` are on the host."""
        needed = GridShape.of(rows, len(wanted))
        recordable = self._recordable and rows.selection is None  # a selection has no fixed size
        shape = needed.bucket(self._cache, self._scratch) if recordable else None
        if shape is None:
            return self._decoder.forward(*laid_out(rows, wanted, self._cache), layers, states)

        decoder = self._decoder  # a recorded function must not keep its recorder alive

        def made() -> _Graph:
            buffer = RowBuffer(shape, self._cache)
            given = None if states is None else states.new_zeros(shape.rows, states.shape[-1])
            graph = _Graph(buffer, given, lambda: decoder.forward(buffer.rows, buffer.wanted, layers, given))
            graph.fill(rows, wanted, states)  # before the recording, which runs it
            return replace(graph, play=self._recorder.record(graph.play))

        graph = self._graphs.get((shape, layers), made)
        graph.fill(rows, wanted, states)
        # Copies, because the next forward overwrites these results.
        return graph.play().map(lambda part: part[: len(rows.slots)].clone(), lambda part: part[: len(wanted)].clone())

    def fill(self, rows: PackedRows, states: Tensor, layers: range) -> None:
        """Store keys and values without a graph, see ``Decoder.fill``; ``rows`` are on the host."""
        self._decoder.fill(laid_out(rows, torch.empty(0, dtype=torch.int64), self._cache)[0], states, layers)


@dataclass(frozen=True)
class _Graph:
    """Recorded forward with its input buffers."""

    buffer: RowBuffer
    states: Tensor | None
    play: Callable[[], Forward]

    def fill(self, rows: PackedRows, wanted: Tensor, states: Tensor | None) -> None:
        self.buffer.fill(rows, wanted)
        if states is not None and self.states is not None:
            self.states[: len(states)].copy_(states)
