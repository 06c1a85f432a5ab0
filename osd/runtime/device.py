"""Devices of a model: timestamps, copies without waiting, and the CPU cores of a thread.

OpenMP keeps a team for each thread that ever used several cores. When the teams together outnumber the cores, their
threads sleep between two parallel regions instead of spinning, and a forward takes twice as long. So one thread of a
process, the engine's or the trainer's, computes on several cores, and each other thread on one. Threads that start
later inherit this; earlier threads call ``one_core``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from osd.runtime.machine import usable_cores

Timestamp = float | torch.cuda.Event


def pick_device(name: str) -> torch.device:
    """Return the device of a name; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def timestamp(device: torch.device) -> Timestamp:
    """Return a timestamp for ``seconds_between``; on a GPU it is taken when all work queued so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(first: Timestamp, last: Timestamp) -> float:
    """Return the seconds from one timestamp to a later one; wait until a GPU has reached it."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    assert isinstance(first, float)  # noqa: S101  timestamps of one device have one type
    assert isinstance(last, float)  # noqa: S101
    return last - first


def to_device(values: Sequence[float] | NDArray[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return ``values`` [n] as a tensor on ``device``, without waiting for the copy."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def to_lists(tensors: Sequence[Tensor]) -> list[Any]:
    """Return ``tolist`` of each integer tensor, with a single copy from their common device."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]


class Arriving:
    """Copies of tensors on their way to the host, waited for only when they are read."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy ``tensors``, all of one device; on a CPU they are used as they are."""
        self._copies, self._arrived = [*tensors], None
        device = tensors[0].device
        if device.type == "cuda":
            self._copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> list[Tensor]:
        """Return the tensors on the host; work queued on the device since then is not waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


@contextmanager
def side_stream(device: torch.device) -> Generator[None]:
    """Run the block on a side stream of a GPU, concurrently with other threads, and synchronise on exit."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def copy_all(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy ``values`` into the tensors ``places``, whose addresses stay, with one call.

    After each call the thread has to get the interpreter's lock again, which takes long next to a busy thread.
    """
    values = list(values)
    torch._foreach_copy_(list(places), values)  # type: ignore[attr-defined] # untyped, because it is PyTorch's own for optimisers
    for value in values:
        if value.is_cuda:  # made on another stream, which must not reuse its memory too early
            value.record_stream(torch.cuda.current_stream(value.device))


def one_core() -> None:
    """Let the calling thread, and threads that start after it, compute on one core."""
    _compute_on(1)


def yield_to_others() -> None:
    """Let threads that answer clients run before the calling thread, which computes nearly all of the time.

    On Linux niceness belongs to the thread; elsewhere it would slow the whole process.
    """
    if sys.platform == "linux":
        os.nice(5)


def cores(count: int) -> int:
    """Return the number of cores for a setting of ``count`` threads.

    It is ``count`` itself, without an upper limit. For 0 it is the number of cores that this process may use.
    """
    return count or usable_cores()


def several_cores(count: int) -> None:
    """Let the calling thread compute on ``count`` cores, 0 for all, and each thread that starts later on one.

    PyTorch gives the last setting of any thread to each thread that it sees for the first time.
    """
    _compute_on(cores(count))
    setter = threading.Thread(target=one_core)
    setter.start()
    setter.join()


def _compute_on(count: int) -> None:
    # A thread that PyTorch sees for the first time would lose this setting, so make PyTorch see it first.
    torch.get_num_threads()
    torch.set_num_threads(count)
