"""What the engine needs of a device beside its tensors: marks in time, and ways there that hold nobody up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Mark = float | torch.cuda.Event


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


def sent(values: Sequence[int], device: torch.device) -> Tensor:
    """``values`` [n] as int64 on ``device``; the host does not wait for the copy."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """What the calling thread asks of a GPU goes beside what other threads do there, and is done in the end."""
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
    torch._foreach_copy_(list(places), values)  # type: ignore[attr-defined]
    for value in values:
        if value.is_cuda:  # made on another stream, which must not use its memory again too early
            value.record_stream(torch.cuda.current_stream(value.device))
