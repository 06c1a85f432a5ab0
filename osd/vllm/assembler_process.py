"""Assembler process of a vLLM worker, and the ring that takes step records to it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import msgspec

from osd.vllm.assembly import TraceOrigin
from osd.vllm.ring import Ring
from osd.vllm.steps import StepRecord, encode

log = logging.getLogger(__name__)

BAD_SETTINGS = 2
"""Exit code of an assembler that cannot run with its settings, so another start is useless."""

_LOWEST_PRIORITY = 19
_POLL_SECONDS = 0.1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds until the next start; each end doubles the pause
_HEALTHY_SECONDS = 60.0  # a process that ran for this time ends with the first pause
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Assignment(msgspec.Struct, frozen=True):
    """Argument of an assembler process, as JSON.

    Attributes:
        ring: the name of the ring with step records.
        parent: the process id of the worker.
        member: the name of the worker in traces and purges.
        origin: the common fields of its traces.
    """

    ring: str
    parent: int
    member: str
    origin: TraceOrigin


class AssemblerProcess:
    """Assembler of traces in a process of the lowest priority, which a thread starts again when it ends.

    No method waits for the process. A record that finds the ring full is dropped and counted. The ring is deleted when
    no process needs it any more. Every thread may call all methods.
    """

    def __init__(self, origin: TraceOrigin) -> None:
        """Create the ring and start the process.

        Raises:
            osd.vllm.ring.RingError: there is not enough shared memory.
        """
        ring = Ring.create()
        self._ring: Ring | None = ring
        self._last = ring.counters()  # after the ring is deleted
        self._lock = threading.Lock()  # of the ring
        member = f"vllm-{socket.gethostname()}-{os.getpid()}"
        self._assignment = Assignment(ring.name, os.getpid(), member, origin)
        self._restarts = 0
        self._closed = threading.Event()
        atexit.register(self.close)
        threading.Thread(target=self._watch, name="osd-assembler", daemon=True).start()

    def put(self, record: StepRecord) -> bool:
        """Send a record to the assembler; return False when it is dropped."""
        parts = encode(record)
        with self._lock:
            return self._ring is not None and self._ring.put(parts, len(record.begun))

    def counters(self) -> dict[str, int]:
        """Return the counters of the ring, and the number of ``restarts`` of the process."""
        with self._lock:
            counters = self._last if self._ring is None else self._ring.counters()
        return {**counters, "restarts": self._restarts}

    @property
    def has_ended(self) -> bool:
        """Whether the process ended for good, so that the ring is deleted."""
        return self._ring is None

    def end(self) -> None:
        """Let the process write the traces of the records that it has, and end; then the ring is deleted."""
        self._closed.set()

    def close(self) -> None:
        """End the process in the same way, and delete the ring at once."""
        atexit.unregister(self.close)
        self.end()
        self._delete_ring()

    def _delete_ring(self) -> None:
        with self._lock:
            if self._ring is not None:
                self._last = self._ring.counters()
                self._ring.close()
                self._ring = None

    def _watch(self) -> None:
        try:
            self._keep_running()
        finally:
            self._delete_ring()

    def _keep_running(self) -> None:
        pause = _FIRST_PAUSE
        while not self._closed.is_set():
            started = time.monotonic()
            code = self._run()
            if self._closed.is_set():
                return
            if code == BAD_SETTINGS:
                return log.error("the assembler cannot run with its settings: no traces are captured")
            pause = _FIRST_PAUSE if time.monotonic() - started > _HEALTHY_SECONDS else pause
            log.warning("the assembler of traces ended with code %s; it starts again in %g s", code, pause)
            self._closed.wait(pause)
            pause, self._restarts = min(2 * pause, _LONGEST_PAUSE), self._restarts + 1

    def _run(self) -> int | None:
        """Run the process until its end and return its exit code; return None when it cannot be started."""
        argument = msgspec.json.encode(self._assignment).decode()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "osd.vllm.assembler", argument],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C in the terminal does not reach it; it ends with this process
            )
        except OSError as error:
            log.warning("the assembler of traces cannot be started: %s", error)
            return None
        os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
        with suppress(OSError):  # on a CPU, vLLM binds this worker to the cores that decode
            os.sched_setaffinity(process.pid, os.sched_getaffinity(os.getppid()))
        while process.poll() is None:
            if self._closed.wait(_POLL_SECONDS):
                process.terminate()
                process.wait()
        return process.returncode
