"""A further process of a divided target: it does to its part what the first process does to its own."""

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
from osd.target.tensor_parallel.messages import Change, Device, End, Fill, Forward, Message, Rows, decode
from osd.target.tensor_parallel.sharding import load_shard

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
"""What carries tensors between processes, by the device that they are on."""

_TIMEOUT = timedelta(minutes=5)
"""Of one exchange: processes that wait for work wait elsewhere."""


class Plan(msgspec.Struct, frozen=True):
    """What each of ``size`` processes makes of the model in ``directory``.

    They find each other by the file ``store``, which the first of them chooses.
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
        """A GPU for each process."""
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)

    def join(self, rank: int) -> None:
        """Be one of the group; returns when all are."""
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


class Follower:
    """Carries out messages on a part of the model."""

    def __init__(self, plan: Plan, rank: int) -> None:
        """Read the part of process ``rank``."""
        part = load_shard(Path(plan.directory), plan.dtype, plan.device_of(rank), rank, plan.size)
        self._model = SlotModel(
            part,
            slots=plan.slots,
            context=plan.context,
            scratch=plan.scratch,
            bucketed=plan.bucketed,
            embeddings=plan.embeddings,
        )

    def obey(self, message: Message) -> None:
        """Do what a message says, all but ``End``."""
        match message:
            case Forward():
                unread, embedded, states = self._received(message.rows, message.states)
                layers = range(message.start, message.stop)
                self._model.forward(message.rows.rows(unread, embedded), message.wanted.tensor(), layers, states)
            case Fill():
                unread, embedded, states = self._received(message.rows, message.states)
                assert states is not None  # noqa: S101  they have just come
                self._model.fill(message.rows.rows(unread, embedded), states, range(message.start, message.stop))
            case Change():
                getattr(self._model.cache, message.method)(*message.given)
            case End():
                pass

    def _received(self, rows: Rows, states: Device | None) -> tuple[Tensor | None, ...]:
        """What follows a message, in its order."""
        found: list[Tensor | None] = []
        for one in (rows.unread, rows.embedded, states):
            tensor = None if one is None else one.empty(self._model.device)
            if tensor is not None:
                dist.broadcast(tensor, 0)
            found.append(tensor)
        return tuple(found)


def follow(rank: int, link: Connection) -> None:
    """Be process ``rank`` until the first one says that it is over, or ends.

    ``link`` brings the plan, then messages. An empty word goes back when the process is there, and another when its
    part is read. If it fails its error goes back, in one line.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which says when it is over
    progress.disable_progress_bar()
    try:
        plan = msgspec.msgpack.decode(link.recv_bytes(), type=Plan)
        several_cores(plan.threads)
        link.send_bytes(b"")
        plan.join(rank)
        follower = Follower(plan, rank)
        link.send_bytes(b"")
        while True:
            for message in decode(link.recv_bytes()):
                if isinstance(message, End):
                    dist.destroy_process_group()
                    return
                follower.obey(message)
    except EOFError:
        return
    except Exception as error:
        link.send_bytes(" ".join(f"{type(error).__name__}: {error}".split())[:300].encode())
        raise SystemExit(1) from None


if __name__ == "__main__":
    follow(int(sys.argv[1]), Connection(int(sys.argv[2])))
