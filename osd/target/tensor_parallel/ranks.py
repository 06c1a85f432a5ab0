"""Processes of a tensor-parallel target, as the first process controls them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch import Tensor

from osd.runtime.model import TargetLostError
from osd.target.tensor_parallel import follower
from osd.target.tensor_parallel.follower import ShardingPlan
from osd.target.tensor_parallel.messages import EndRequest, Message, encode

_START_SECONDS = 600.0
_GRACE_SECONDS = 5.0
"""Time in which a failing process reports its error, and a stopped process exits."""


class Ranks:
    """Controller that starts the further processes of a ``plan``, sends them messages and notices when one ends.

    After a failure the processes are out of step: ``together`` and ``check`` then always raise.
    """

    def __init__(self, plan: ShardingPlan) -> None:
        """Start the processes and return when all have joined.

        Raises:
            TargetLostError: a process ended.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
        self._folder = Path(tempfile.mkdtemp(prefix="osd-ranks-"))
        self._size, self._failure = plan.size, ""
        self._waiting: list[Message] = []
        self._links: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        plan = msgspec.structs.replace(plan, store=str(self._folder / "store"))
        for rank in range(1, plan.size):
            self._start(plan, rank)
        try:
            self.await_replies()
            plan.join(0)
        except BaseException:
            self.close()
            raise

    def _start(self, plan: ShardingPlan, rank: int) -> None:
        # multiprocessing.Process cannot be used here: a daemonic process must not start children.
        near, far = Pipe()
        command = [sys.executable, "-m", follower.__name__, str(rank), str(far.fileno())]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._processes[rank] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[far.fileno()], env=os.environ | {"PYTHONPATH": paths}
        )
        far.close()
        self._links[rank] = near
        near.send_bytes(msgspec.msgpack.encode(plan))

    def await_replies(self) -> None:
        """Wait for an empty message of each process: it has started, or has loaded its shard.

        Raises:
            TargetLostError: a process reported an error, ended, or did not answer in time.
        """
        for rank, link in self._links.items():
            try:
                failure = link.recv_bytes() if link.poll(_START_SECONDS) else f"it took {_START_SECONDS:.0f} s".encode()
            except (EOFError, OSError):
                failure = self._ending(rank).encode()
            if failure:
                raise self._lost(f"rank {rank} of target.tensor_parallel {self._size} ended: {failure.decode()}")

    def note(self, message: Message) -> None:
        """Queue a message that the other processes execute before their next one."""
        self._waiting.append(message)

    @contextmanager
    def together(self, message: Message, *follows: Tensor | None) -> Generator[None]:
        """Send ``message`` and then the device tensors ``follows`` to the other processes, and run the block.

        Raises:
            TargetLostError: the call failed in one of the processes.
        """
        if self._failure:
            raise TargetLostError(self._failure)
        batch, self._waiting = encode([*self._waiting, message]), []
        try:
            for link in self._links.values():
                link.send_bytes(batch)
            for tensor in follows:
                if tensor is not None:
                    dist.broadcast(tensor.contiguous(), 0)
            yield
        except Exception as error:
            raise self._lost(self._reason() or f"rank 0 of {self._size}: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Raise TargetLostError if a process is gone; never wait."""
        if not self._failure and (reason := self._reason(0.0)):
            self._lost(reason)
        if self._failure:
            raise TargetLostError(self._failure)

    def close(self) -> None:
        """End all processes; a second call has no effect."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send_bytes(encode([EndRequest()]))
        if dist.is_initialized() and self._processes:
            dist.destroy_process_group()
        for link in self._links.values():
            link.close()  # a process that waits for a message then ends
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            process.kill()
            process.wait()
        self._links, self._processes = {}, {}
        shutil.rmtree(self._folder, ignore_errors=True)

    def _lost(self, failure: str) -> TargetLostError:
        self._failure = self._failure or failure
        return TargetLostError(self._failure)

    def _reason(self, seconds: float = _GRACE_SECONDS) -> str:
        """Return the error or exit of the first process to fail, "" if none fails within ``seconds``."""
        by_link = {link: rank for rank, link in self._links.items()}
        for link in wait([*by_link], seconds):
            rank = by_link[link]  # type: ignore[index]  # only links are waited for
            try:
                why = link.recv_bytes().decode()  # type: ignore[union-attr]
            except (EOFError, OSError):
                why = self._ending(rank)
            return f"rank {rank} of target.tensor_parallel {self._size} ended: {why}"
        return ""

    def _ending(self, rank: int) -> str:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        return f"its process ended with code {process.returncode}"
