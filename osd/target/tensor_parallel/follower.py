"""Further process of a tensor-parallel target, which repeats on its shard each call of the first process."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging as progress

from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel
from osd.target.tensor_parallel.messages import (
    CacheCall,
    DeviceTensor,
    EndRequest,
    FillRequest,
    ForwardRequest,
    Message,
    RowsMessage,
    decode,
)
from osd.target.tensor_parallel.sharding import load_shard

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
"""Communication backend of ``torch.distributed`` by device type."""

_TIMEOUT = timedelta(minutes=5)
"""Limit of one collective operation; waiting for work does not count."""


class ShardingPlan(msgspec.Struct, frozen=True):
    """Setup that all processes of a tensor-parallel target share; see ``SlotModel`` for the sizes.

    Attributes:
        directory: of the model.
        size: number of processes.
        threads: CPU threads of each process.
        store: file through which the processes find each other; the first process chooses it.
    """

    directory: str
    dtype: str
    device: str
    size: int
    slots: int
    context: int
    scratch: int
    embeddings: int = 0
    threads: int = 1
    bucketed: bool | None = None
    store: str = ""

    def device_of(self, rank: int) -> torch.device:
        """Return the device of a process: on CUDA the GPU with the number ``rank``."""
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)

    def join(self, rank: int) -> None:
        """Join the process group as ``rank``; return when all processes have joined."""
        device = self.device_of(rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=Path(self.store).as_uri(),
            rank=rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )


class ShardWorker:
    """Executor of the first process's messages on one shard."""

    def __init__(self, plan: ShardingPlan, rank: int) -> None:
        """Load the shard of process ``rank``."""
        part = load_shard(Path(plan.directory), plan.dtype, plan.device_of(rank), rank, plan.size)
        self._model = SlotModel(
            part,
            slots=plan.slots,
            context=plan.context,
            scratch=plan.scratch,
            bucketed=plan.bucketed,
            embeddings=plan.embeddings,
        )

    def execute(self, message: Message) -> None:
        """Execute a message; ``EndRequest`` has no effect here."""
        match message:
            case ForwardRequest():
                unread, embedded, states = self._received(message.rows, message.states)
                layers = range(message.start, message.stop)
                self._model.forward(message.rows.rows(unread, embedded), message.wanted.tensor(), layers, states)
            case FillRequest():
                unread, embedded, states = self._received(message.rows, message.states)
                assert states is not None  # noqa: S101  a FillRequest always has states
                self._model.fill(message.rows.rows(unread, embedded), states, range(message.start, message.stop))
            case CacheCall():
                getattr(self._model.cache, message.method)(*message.given)
            case EndRequest():
                pass

    def _received(self, rows: RowsMessage, states: DeviceTensor | None) -> tuple[Tensor | None, ...]:
        """Receive the tensors that follow a message, in its order."""
        received: list[Tensor | None] = []
        for description in (rows.unread, rows.embedded, states):
            tensor = None if description is None else description.empty(self._model.device)
            if tensor is not None:
                dist.broadcast(tensor, 0)
            received.append(tensor)
        return tuple(received)


def follow(rank: int, link: Connection) -> None:
    """Run process ``rank`` until the first process sends ``EndRequest`` or ends itself.

    ``link`` delivers the plan, then messages. The process answers with an empty message when it has started, and again
    when its shard is loaded. On a failure it answers with the error in one line and exits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C, then ends this one
    progress.disable_progress_bar()
    try:
        plan = msgspec.msgpack.decode(link.recv_bytes(), type=ShardingPlan)
        several_cores(plan.threads)
        link.send_bytes(b"")
        plan.join(rank)
        follower = ShardWorker(plan, rank)
        link.send_bytes(b"")
        while True:
            for message in decode(link.recv_bytes()):
                if isinstance(message, EndRequest):
                    dist.destroy_process_group()
                    return
                follower.execute(message)
    except EOFError:
        return
    except Exception as error:
        link.send_bytes(" ".join(f"{type(error).__name__}: {error}".split())[:300].encode())
        raise SystemExit(1) from None


if __name__ == "__main__":
    follow(int(sys.argv[1]), Connection(int(sys.argv[2])))
