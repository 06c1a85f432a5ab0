"""Where a model computes: its device, marks in time, copies that hold nobody up, and the cores of a thread.

OpenMP keeps a team for every thread that ever used several cores, and when the teams together outnumber
the cores its threads sleep between two parallel regions instead of waiting awake: a forward then takes
twice as long. So one thread of a process, the engine's or the trainer's, computes on several cores, and
every other one on one: those that come after it do so by themselves, those before say ``one_core``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


def pick_device(name: str) -> torch.device:
    """Resolve "auto" to the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def mark(device: torch.device) -> Mark:
    """Now, as ``between`` reads it: on a GPU, when it has done what it was asked for so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(first: Mark, last: Mark) -> float:
    """Seconds from one mark to a later one; waits until a GPU has come to it."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    assert isinstance(first, float)  # noqa: S101  marks of one device are of one kind
    assert isinstance(last, float)  # noqa: S101
    return last - first


def sent(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values`` [n] on ``device``; the host does not wait for the copy."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def lists(tensors: Sequence[Tensor]) -> list[Any]:
    """What ``tolist`` gives of each of some tensors of integers, with one copy from the device that has them all."""
    if not tensors or tensors[0].device.type == "cpu":
        return [one.tolist() for one in tensors]
    here = torch.cat([one.flatten() for one in tensors]).cpu()
    parts = here.split([one.numel() for one in tensors])
    return [part.view(one.shape).tolist() for part, one in zip(parts, tensors, strict=True)]


class Arriving:
    """Copies of tensors on their way to the host; nobody waits for them before they are asked for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy ``tensors``, all of one device; on a CPU they are there."""
        self._copies, self._arrived = [*tensors], None
        device = tensors[0].device
        if device.type == "cuda":
            self._copies = [
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
                for one in tensors
            ]
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def here(self) -> list[Tensor]:
        """The tensors on the host. What the device was asked for since is not waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies


@contextmanager
def aside(device: torch.device) -> Generator[None]:
    """Run on a side stream of a GPU, beside what other threads do there, and synchronise on exit."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def copied(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy ``values`` to ``places``, their addresses staying, with one call.

    After each call the interpreter's lock must be had again, which takes long beside a busy thread.
    """
    values = list(values)
    torch._foreach_copy_(list(places), values)  # type: ignore[attr-defined] # PyTorch has it for its own optimisers, without a type
    for value in values:
        if value.is_cuda:  # made on another stream, which must not use its memory again too early
            value.record_stream(torch.cuda.current_stream(value.device))


def one_core() -> None:
    """Let the calling thread compute on one core, and those that start after it."""
    _compute_on(1)


def cores(count: int) -> int:
    """How many cores a setting of ``count`` threads means, 0 for all of the machine."""
    return count or os.cpu_count() or 1


def several_cores(count: int) -> None:
    """Let the calling thread compute on ``count`` cores, 0 for all of the machine, and each that starts later on one.

    What any thread says is what every thread begins with that PyTorch has not seen yet.
    """
    _compute_on(cores(count))
    other = threading.Thread(target=one_core)
    other.start()
    other.join()


def _compute_on(count: int) -> None:
    # A thread that PyTorch has not seen would forget this, and begin with what was said last when it first computes.
    torch.get_num_threads()
    torch.set_num_threads(count)
