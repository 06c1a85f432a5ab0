"""Process that builds traces from the step records of a vLLM worker, and writes them to Redis.

``osd.vllm.assembler_process`` starts it in vLLM's environment. The settings are those of the service, from the
environment (``OSD_...``).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing

import msgspec

from osd import logs
from osd.capture.purge import Member, PurgeFollower, Purges, RemovedData
from osd.capture.retention import belongs
from osd.capture.trace import Trace
from osd.capture.writer import TraceWriter
from osd.config import ConfigError, Settings, load_settings
from osd.vllm.assembler_process import BAD_SETTINGS, Assignment
from osd.vllm.assembly import TraceAssembly
from osd.vllm.ring import Frame, Ring, RingError, remove
from osd.vllm.settings import REDIS_URL
from osd.vllm.steps import StepError, decode

_IDLE_SECONDS = 0.02
_LOOK_SECONDS = 1.0
_PURGE_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
_DRAIN_SECONDS = 5.0
_CLOSE_SECONDS = 10.0
_PACE_SECONDS = 0.002


class Assembler:
    """Consumer of a ring of step records.

    A request that is purged while it decodes is dropped, and its later records are refused. Its purge is answered
    when no earlier trace waits for Redis, so that the purge removes all of its traces.
    """

    def __init__(self, assignment: Assignment, settings: Settings, redis_url: str) -> None:
        """Open the ring and the connections.

        Raises:
            osd.vllm.ring.RingError: there is no ring.
            ValueError: ``redis_url`` is not a URL of Redis.
        """
        # The worker applies the budget when it admits a request, before any work.
        capture = settings.capture.model_copy(update={"bytes_per_second": None, "service_bytes_per_second": None})
        self._ring, self._parent = Ring.attach(assignment.ring), assignment.parent
        self._writer = TraceWriter(redis_url, capture, assignment.member)
        self._max_queue = capture.max_queue
        self._assembly = TraceAssembly(assignment.origin, capture.segment, self._ring.count, self._is_purged)
        self._lock = threading.Lock()  # of the assembly and the fields below
        self._purged: dict[str, int] = {}  # purged requests, and the number of dropped open requests of each
        self._offered = 0
        self._number: int | None = None  # of the last frame
        self._published: dict[str, int] = {}
        self._ring.count("lost_assembler", self._unfinished())
        member = Member("replica", assignment.member)
        self._follower = PurgeFollower(Purges(redis_url), member, self._forget)
        self._ended = threading.Event()
        self._purger = threading.Thread(target=self._follow_purges, name="purges", daemon=True)
        self._purger.start()

    def run(self, is_stopped: Callable[[], bool]) -> None:
        """Build and write traces until ``is_stopped`` returns True or the worker is gone, and the ring is empty."""
        look_at = 0.0
        deadline = None
        while True:
            frame, now = self._ring.get(), time.monotonic()
            if frame is not None:
                self._take(frame, now)
            if deadline is None and (is_stopped() or self._is_orphan):
                deadline = now + _DRAIN_SECONDS
            if deadline is not None and (frame is None or now > deadline):
                return
            if now >= look_at:
                look_at = now + _LOOK_SECONDS
                with self._lock:
                    self._offer(self._assembly.expire(now))
            self._publish()
            if frame is None:
                time.sleep(_IDLE_SECONDS)

    def close(self) -> None:
        """Write the traces of all requests, and close the connections."""
        with self._lock:
            self._offer(self._assembly.end_all())
        self._writer.close(_CLOSE_SECONDS)
        self._publish()
        self._ended.set()
        self._purger.join()
        self._follower.close()
        name = self._ring.name
        self._ring.close()
        if self._is_orphan:
            remove(name)

    @property
    def _is_orphan(self) -> bool:
        return os.getppid() != self._parent

    def _take(self, frame: Frame, now: float) -> None:
        is_next = self._number is None or frame.number == self._number + 1
        self._number = frame.number
        with self._lock:
            if not is_next:
                self._ring.count("holes")
                self._offer(self._assembly.end_all())
            try:
                self._offer(self._assembly.add(decode(frame.data), now))
            except StepError:
                self._ring.count("refused")
                self._offer(self._assembly.end_all())

    def _offer(self, traces: Iterable[Trace]) -> None:
        """Give traces to the writer; wait for space in its queue while the ring has enough space for later steps."""
        for trace in traces:
            while self._offered - self._settled() >= self._max_queue and self._ring.used < self._ring.capacity // 2:
                time.sleep(_PACE_SECONDS)
            self._writer.offer(trace)
            self._offered += 1

    def _settled(self) -> int:
        """Return the number of traces that were written or dropped."""
        return self._writer.counters()["written"] + sum(self._writer.losses().values())

    def _unfinished(self) -> int:
        """Return the number of open requests and of traces that wait for Redis, of all assemblers of the ring.

        Before the first frame they are those of an assembler that was killed.
        """
        counters = self._ring.counters()
        lost = sum(count for name, count in counters.items() if name.startswith("lost_"))
        return counters["requests"] - counters["closed"] + counters["traces"] - counters["written"] - lost

    def _publish(self) -> None:
        """Add the counts of the writer since the last call to the counters in the ring."""
        lost = {f"lost_{reason}": count for reason, count in self._writer.losses().items()}
        counts = {"written": self._writer.counters()["written"], **lost}
        for name, count in counts.items():
            self._ring.count(name, count - self._published.get(name, 0))
        self._published = counts

    def _follow_purges(self) -> None:
        while True:
            self._follower.alive()
            self._follower.update()
            with self._lock:
                self._purged = {name: count for name, count in self._purged.items() if name in self._follower.requests}
            if self._ended.wait(_PURGE_SECONDS):
                return

    def _is_purged(self, request_id: str) -> bool:
        return any(belongs(request_id, purged) for purged in self._purged)

    def _forget(self, request: str, at: float) -> RemovedData:
        """Drop the open requests of a purged one, and wait until earlier traces are written or dropped.

        Raises:
            OSError: traces still wait for Redis.
        """
        with self._lock:
            dropped = self._assembly.purge(lambda request_id: belongs(request_id, request))
            self._purged[request] = self._purged.get(request, 0) + dropped
            offered = self._offered
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._settled() < offered:
            if time.monotonic() > deadline:
                raise OSError("earlier traces wait for Redis")
            time.sleep(_PACE_SECONDS)
        return RemovedData(records=self._purged[request])


def main() -> int:
    """Run the assembler of the assignment in the first argument; return the exit code."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.set())
    assignment = msgspec.json.decode(sys.argv[1], type=Assignment)
    try:
        settings = load_settings()
        if settings.redis_url is None:
            raise ConfigError(f"{REDIS_URL} must be set, because traces are written to Redis")
        listener = logs.set_up(settings.log, assignment.member)
        assembler = Assembler(assignment, settings, settings.redis_url)
    except RingError as error:
        print(f"osd.vllm.assembler: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"osd.vllm.assembler: {error}", file=sys.stderr)
        return BAD_SETTINGS
    except ValueError:  # the message of the parser may quote a part of the password
        print(f"osd.vllm.assembler: {REDIS_URL} is not a Redis URL", file=sys.stderr)
        return BAD_SETTINGS
    with closing(assembler):
        assembler.run(stopped.is_set)
    if listener is not None:
        listener.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
