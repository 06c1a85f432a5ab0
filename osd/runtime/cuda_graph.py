"""CUDA graphs: functions over buffers that never move, recorded once and launched again without the interpreter.

A decode step on a GPU is hundreds of kernels of a few microseconds; launched one by one from Python they take longer
than they run. A CUDA graph launches them together, but only with the shapes and addresses that it was recorded with:
what changes from call to call has to be copied into a ``StaticBuffer`` first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from osd.runtime.batch import GridShape, PackedRows, RowBuffer, laid_out
from osd.runtime.kv_cache import KVCache

Result = TypeVar("Result")
Kept = TypeVar("Kept")
Key = TypeVar("Key", bound=Hashable)

_WARM_UPS = 2  # before a function is recorded: libraries choose kernels and take memory when they are first called


class GraphRecorder:
    """Records functions as CUDA graphs that share memory; on a CPU a graph calls its function again.

    A function must read all that changes from tensors whose addresses stay, must never ask the device for a value, and
    must do no harm when it runs several times with the same input: recording runs it to warm up. What it returns is
    overwritten when any function of the same recorder is played again.

    Attributes:
        made: graphs of all recorders so far. One takes far longer than playing it, which spoils measurements.
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
        # Other threads may stage weights meanwhile: only what this one calls can break the recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = run()
        self._pool = self._pool or graph.pool()

        def play() -> Result:
            graph.replay()
            return result

        return play


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


Compute = Callable[[PackedRows, Tensor], tuple[Tensor, Tensor | None]]
"""Logits [n, vocab] of the wanted rows [n], and tapped hidden states [R, taps * hidden] or None."""


class BucketedForward:
    """A model's forward at bucketed sizes, each a CUDA graph that is recorded when it is first needed.

    As vLLM and SGLang do it: the rows are padded to the next size that was recorded, in buffers that the graph reads.
    What is larger than drafts are runs as it comes, through the same code.
    """

    def __init__(self, compute: Compute, cache: KVCache, scratch: int, recordable: bool) -> None:
        """Record ``compute`` over the slots of ``cache``.

        Args:
            compute: must not ask the device for any value where ``recordable``.
            cache: its last place must be nobody's.
            scratch: rows of a sequence in a graph at most.
            recordable: False runs every forward as it comes.
        """
        self._compute, self._cache, self._scratch, self._recordable = compute, cache, scratch, recordable
        self._recorder = GraphRecorder(cache.keys.device)
        self._graphs: GraphCache[GridShape, tuple[RowBuffer, Callable[[], tuple[Tensor, Tensor | None]]]] = GraphCache()

    def forward(self, rows: PackedRows, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take rows and ``wanted`` [n] on the host to logits [n, vocab] and hidden states [R, ...] on the device."""
        needed = GridShape.of(rows, len(wanted))
        shape = needed.bucket(self._cache, self._scratch) if self._recordable else None
        if shape is None:
            return self._compute(*laid_out(rows, wanted, self._cache))

        def made() -> tuple[RowBuffer, Callable[[], tuple[Tensor, Tensor | None]]]:
            buffer = RowBuffer(shape, self._cache)
            buffer.fill(rows, wanted)  # before it is recorded: recording runs it
            return buffer, self._recorder.record(lambda: self._compute(buffer.rows, buffer.wanted))

        buffer, play = self._graphs.get(shape, made)
        buffer.fill(rows, wanted)
        logits, hidden = play()
        # Copies: the next forward writes where this one wrote, and states are kept for longer.
        return logits[: len(wanted)].clone(), None if hidden is None else hidden[: len(rows.token_ids)].clone()
