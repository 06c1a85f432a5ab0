"""The processes of a divided target, as the first of them sees the others."""

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
from osd.target.tensor_parallel.follower import Plan
from osd.target.tensor_parallel.messages import End, Message, encode

_START_SECONDS = 600.0
_GRACE_SECONDS = 5.0
"""In which a process that fails says why, and one that is told to end ends."""


class Ranks:
    """Starts the further processes of a ``plan``, tells them what to do and notices when one ends.

    Once anything has failed the processes are out of step: ``together`` and ``check`` raise from then on.
    """

    def __init__(self, plan: Plan) -> None:
        """Start them, and return when all have joined.

        Raises:
            TargetLostError: one of them ended instead.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are on this machine, and nobody else is to reach them
        self._folder = Path(tempfile.mkdtemp(prefix="osd-ranks-"))
        self._size, self._failure = plan.size, ""
        self._waiting: list[Message] = []
        self._links: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        plan = msgspec.structs.replace(plan, store=str(self._folder / "store"))
        for rank in range(1, plan.size):
            self._start(plan, rank)
        try:
            self.await_word()
            plan.join(0)
        except BaseException:
            self.close()
            raise

    def _start(self, plan: Plan, rank: int) -> None:
        # A process of multiprocessing could not be had from one that is a daemon of its own.
        mine, theirs = Pipe()
        command = [sys.executable, "-m", follower.__name__, str(rank), str(theirs.fileno())]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._processes[rank] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": paths}
        )
        theirs.close()
        self._links[rank] = mine
        mine.send_bytes(msgspec.msgpack.encode(plan))

    def await_word(self) -> None:
        """Wait until each of the others has said that it is there, or that its part is read.

        Raises:
            TargetLostError: one said something else, or nothing.
        """
        for rank, link in self._links.items():
            try:
                word = link.recv_bytes() if link.poll(_START_SECONDS) else f"it took {_START_SECONDS:.0f} s".encode()
            except (EOFError, OSError):
                word = self._ending(rank).encode()
            if word:
                raise self._lost(f"rank {rank} of target.tensor_parallel {self._size} ended: {word.decode()}")

    def note(self, message: Message) -> None:
        """Have the others do something before whatever they are told next."""
        self._waiting.append(message)

    @contextmanager
    def together(self, message: Message, *follows: Tensor | None) -> Generator[None]:
        """Tell the others to do what runs within; the tensors of the device ``follows`` go after the message.

        Raises:
            TargetLostError: it failed, here or there.
        """
        if self._failure:
            raise TargetLostError(self._failure)
        told, self._waiting = encode([*self._waiting, message]), []
        try:
            for link in self._links.values():
                link.send_bytes(told)
            for tensor in follows:
                if tensor is not None:
                    dist.broadcast(tensor.contiguous(), 0)
            yield
        except Exception as error:
            raise self._lost(self._reason() or f"rank 0 of {self._size}: {type(error).__name__}: {error}") from error

    def check(self) -> None:
        """Raise TargetLostError where one of the others is gone; never waits."""
        if not self._failure and (reason := self._reason(0.0)):
            self._lost(reason)
        if self._failure:
            raise TargetLostError(self._failure)

    def close(self) -> None:
        """End all of them; may be called twice."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send_bytes(encode([End()]))
        if dist.is_initialized() and self._processes:
            dist.destroy_process_group()
        for link in self._links.values():
            link.close()  # whoever waits for a message ends
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
        """What one of the others said or died of, whoever did so first; "" where all are well after some seconds."""
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
