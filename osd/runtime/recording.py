"""Functions over buffers that never move, recorded once and launched again without the interpreter.

A decode step on a GPU is hundreds of kernels of a few microseconds; launched one by one from Python they take longer
than they run. A CUDA graph launches them together, but only with the shapes and addresses that it was recorded with:
what changes from call to call has to be copied into a ``StaticBuffer`` first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Result = TypeVar("Result")
Kept = TypeVar("Kept")
Key = TypeVar("Key", bound=Hashable)

_WARM_UPS = 2  # before a function is recorded: libraries choose kernels and take memory when they are first called


class Recorder:
    """Records functions as CUDA graphs that share memory; elsewhere a recording calls its function again.

    A function must read all that changes from tensors whose addresses stay, must never ask the device for a value, and
    must do no harm when it runs several times with the same input: recording runs it to warm up. What it returns is
    overwritten when any function of the same recorder is played again.

    Attributes:
        made: recordings of all recorders so far. One takes far longer than playing it, which spoils measurements.
    """

    made: ClassVar[int] = 0

    def __init__(self, device: torch.device) -> None:
        """Record for ``device``."""
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """What plays ``run`` again; it has to be called for the first result, too."""
        Recorder.made += 1
        if self._device.type != "cuda":
            return run
        # One stream for all recordings: the libraries keep a work space for every stream that they have seen.
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


class Recordings(Generic[Key, Kept]):
    """The recordings that were used last, by their sizes: each holds memory for its results."""

    def __init__(self, most: int = 128) -> None:
        """Keep ``most`` of them."""
        self._most = most
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._kept)

    def get(self, key: Key, make: Callable[[], Kept]) -> Kept:
        """The recording of these sizes, which ``make`` makes where there is none."""
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)  # not played any more: making the new one has waited for the device
        self._kept.move_to_end(key)
        return self._kept[key]


class StaticBuffer:
    """Integers and flags of one call at addresses that stay, filled from the host with one copy that nobody awaits."""

    def __init__(self, integers: Mapping[str, int], flags: int, device: torch.device) -> None:
        """Make room for [count] int64 by name, and for ``flags`` bytes."""
        self._device = device
        self._sizes = dict(integers)
        self._words = sum(integers.values())
        self._bytes = torch.zeros(8 * self._words + flags, dtype=torch.uint8, device=device)
        words = self._bytes[: 8 * self._words].view(torch.int64)
        self._views = dict(zip(integers, words.split([*integers.values()]), strict=True))
        self.flags = self._bytes[8 * self._words :].view(torch.bool)

    def __getitem__(self, name: str) -> Tensor:
        """The integers of a name."""
        return self._views[name]

    def fill(self, integers: Mapping[str, tuple[np.ndarray, int]], flags: np.ndarray | None = None) -> None:
        """Copy every name's values, padded with a number of its own, and the flags, padded with 0."""
        # PyTorch keeps pinned memory from being used again until the copies from it are done.
        host = torch.empty(self._bytes.shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        raw = host.numpy()
        words, at = raw[: 8 * self._words].view(np.int64), 0
        for name, size in self._sizes.items():
            values, padding = integers[name]
            words[at : at + len(values)] = values
            words[at + len(values) : at + size] = padding
            at += size
        rest = raw[8 * self._words :]
        rest[:] = 0
        if flags is not None:
            rest[: flags.size] = flags.reshape(-1)
        self._bytes.copy_(host, non_blocking=True)
