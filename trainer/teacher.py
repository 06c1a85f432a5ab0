"""Teacher: runs the target over captured exchanges in spare time and writes their traces."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from redis.exceptions import RedisError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as progress

from osd import logs
from osd.capture.exchange import Exchange
from osd.capture.purge import Purges
from osd.capture.reader import DeliveredRecord, ExchangeReader, Place, TraceReader
from osd.capture.retention import Retention, belongs, oldest_allowed
from osd.capture.streams import group_of
from osd.capture.trace import Trace, TraceError
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.labelling.labeller import Labeller
from osd.labelling.rendering import Reading, Renderer
from osd.redis_client import Backoff, connect
from osd.registry.replica_loads import ReplicaLoads
from osd.target.context import context_of
from osd.target.identity import identify
from osd.target.load import load_tokenizer
from osd.target.opening import load_target
from trainer.capacity import SpareCapacity, lower_priority

logger = logging.getLogger(__name__)

SLOTS = 4
"""Answers in one batch."""

_READ_MS, _WRITE_SECONDS, _LOOK_SECONDS = 500, 5.0, 0.2


class _StoppedError(Exception):
    pass


@dataclass(frozen=True)
class LabellingCounts:
    """Counts of processed exchanges.

    Attributes:
        read: exchanges that were read.
        refused: exchanges that were refused or purged.
        traces: traces that were written.
    """

    read: int = 0
    refused: int = 0
    traces: int = 0


class Teacher:
    """Reader of exchanges for ``settings.domain``, which writes their traces for the trainer.

    It computes only with spare capacity. It also waits while the trainer has not acknowledged half of a full stream of
    traces. An exchange is acknowledged when its traces are written.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        target: Path,
        taps: tuple[int, ...],
        stop: threading.Event,
        on_progress: Callable[[LabellingCounts], None] = lambda counts: None,
    ) -> None:
        """Load the target, with the hidden states of the layers ``taps``, and connect to Redis.

        ``stop`` ends ``run``. ``on_progress`` is called with the counts after each batch.
        """
        self._settings, self._stop, self._on_progress, self._counts = settings, stop, on_progress, LabellingCounts()
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(target)
        model = load_target(
            settings.target,
            target,
            slots=SLOTS,
            context=context_of(settings, target),
            scratch=1,
            taps=taps,
            label=identify(settings.target.source, target).label,
        )
        self._renderer = Renderer(tokenizer, model.eos_ids, model.vocab_size)
        self._labeller = Labeller(model, settings.capture, SLOTS)
        domain, group = settings.domain, group_of(settings.domain)
        self._reader = ExchangeReader(redis_url, settings.tapped, domain, group, "teacher")
        self._learnt = TraceReader(redis_url, settings.capture, domain, group, "teacher")  # only for its lag
        self._writer = TraceWriter(redis_url, settings.capture, "teacher")
        self._offered = 0
        self._purges, self._redis = Purges(redis_url), connect(redis_url, timeout=5.0)
        self._tapped = Retention(self._redis, settings.tapped)
        self._loads = ReplicaLoads(redis_url)
        threads = settings.trainer.threads
        self._capacity = SpareCapacity(self._loads, settings.trainer, lambda: time.process_time() / threads)
        self._never = threading.Event()

    def run(self) -> None:
        """Label exchanges until the end; the next teacher reads exchanges without traces again."""
        lower_priority(self._settings.trainer.threads)
        max_lag = self._settings.capture.max_records // 2
        while not self._stop.is_set():
            self._reader.sweep()
            if self._learnt.waiting().records >= max_lag:
                self._stop.wait(_LOOK_SECONDS)
            elif batch := self._reader.read(SLOTS, _READ_MS):
                self._label(batch)
        self._writer.close()
        for connection in (self._reader, self._learnt, self._purges, self._redis, self._loads):
            connection.close()

    def _label(self, batch: Sequence[DeliveredRecord[Exchange]]) -> None:
        """Write the traces of a batch and acknowledge it; remove purged requests from the stream."""
        try:
            purged = self._purges.requests()
            for request in purged:
                if any(belongs(delivery.record.request_id, request) for delivery in batch):
                    self._tapped.purge(request)
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)
            self._reader.release([delivery.place for delivery in batch])  # it is read again later
            return
        readings: dict[Place, Reading] = {}
        for delivery in batch:
            try:
                reading = self._reading(delivery.record, list(purged))
            except Exception as error:
                self._refuse(delivery.place, error)
                continue
            if reading is None:
                self._count(refused=1)
            else:
                readings[delivery.place] = reading
        try:
            traces = self._usable_traces(readings)
        except _StoppedError:
            return
        if self._write(traces):
            self._reader.ack([delivery.place for delivery in batch])
            self._count(read=len(batch), traces=len(traces))
        else:
            self._reader.release([delivery.place for delivery in batch])

    def _refuse(self, place: Place, error: Exception) -> None:
        """Refuse one exchange; without this, each restart would fail at the same exchange."""
        reason = str(error) if isinstance(error, TraceError) else type(error).__name__  # others may quote a user
        logger.warning("an exchange was refused: %s", reason)
        self._reader.refuse(place, reason)
        self._count(refused=1)

    def _count(self, read: int = 0, refused: int = 0, traces: int = 0) -> None:
        counts = self._counts
        self._counts = LabellingCounts(counts.read + read, counts.refused + refused, counts.traces + traces)
        self._on_progress(self._counts)

    def _usable_traces(self, readings: Mapping[Place, Reading]) -> list[Trace]:
        """Return the traces of a batch; if the target fails on it, refuse the exchanges on which it fails alone."""
        try:
            return self._traces(list(readings.values()))
        except _StoppedError:
            raise
        except Exception as error:
            logger.warning("the target failed on a batch of answers: %s", type(error).__name__)
        traces: list[Trace] = []
        for place, reading in readings.items():
            try:
                traces += self._traces([reading])
            except _StoppedError:
                raise
            except Exception as error:
                self._refuse(place, error)
        return traces

    def _traces(self, readings: Sequence[Reading]) -> list[Trace]:
        if not self._capacity.wait(self._stop, self._never, lambda why: None):
            raise _StoppedError
        with self._capacity.working():
            return self._labeller.traces(readings, self._give_way)

    def _reading(self, record: Exchange, purged: Sequence[str]) -> Reading | None:
        """Return the tokens of an exchange; None if it was purged or is too old."""
        oldest = oldest_allowed(self._settings.capture, time.time())
        old = oldest is not None and record.created < oldest
        if old or any(belongs(record.request_id, request) for request in purged):
            return None
        if record.target != self._settings.target.source:
            raise TraceError(f"its target is {record.target}, not {self._settings.target.source}")
        return self._renderer.read(record)

    def _give_way(self) -> None:
        self._capacity.give_way(self._stop.is_set, lambda share: None)
        if self._stop.is_set():
            raise _StoppedError

    def _write(self, traces: Sequence[Trace]) -> bool:
        """Write traces; return False when the writer is not done after five seconds."""
        for trace in traces:
            self._writer.offer(trace)
        self._offered += len(traces)
        deadline = time.monotonic() + _WRITE_SECONDS
        while self._writer.counters()["written"] + sum(self._writer.losses().values()) < self._offered:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


class TeacherProcess:
    """Process of a teacher from ``start`` to ``stop``, which is restarted when it ends by itself.

    A new process continues with the exchanges that are not acknowledged. CPU seconds are counted per process, so those
    of the teacher are not part of the trainer's cost.
    """

    def __init__(self, settings: Settings, redis_url: str, target: Path, taps: tuple[int, ...]) -> None:
        """Prepare a teacher; the arguments are those of ``Teacher``."""
        self._context = multiprocessing.get_context("spawn")
        self._counts: MutableSequence[int] = self._context.Array("q", 3, lock=False)
        self._before = (0, 0, 0)
        self._arguments = settings, redis_url, target, taps
        self._backoff = Backoff()
        self._process: BaseProcess | None = None
        self._keep_alive: Connection | None = None  # the process runs while this end is open

    @property
    def counts(self) -> LabellingCounts:
        """Counts since the start."""
        return LabellingCounts(*(old + new for old, new in zip(self._before, self._counts, strict=True)))

    @property
    def pid(self) -> int | None:
        """Process id of the running process."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process."""
        ends, self._keep_alive = self._context.Pipe(duplex=False)
        arguments = (*self._arguments, ends, self._counts)
        self._process = self._context.Process(target=_teach, args=arguments, name="teacher", daemon=True)
        self._process.start()
        ends.close()

    def check(self) -> None:
        """Restart the process if it ended by itself; call it regularly."""
        if self._process is None or self._process.is_alive() or self._backoff.remaining:
            return
        logger.warning("the teacher process ended by itself with code %s and is restarted", self._process.exitcode)
        counts = self.counts
        self._before = (counts.read, counts.refused, counts.traces)
        self._counts[:] = [0, 0, 0]
        self._backoff.failed()
        self._release()
        self.start()

    def stop(self) -> None:
        """End the process after the current forward."""
        self._release()
        if self._process is not None:
            self._process.join(10)
            self._process.kill()
            self._process.join()

    def _release(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.close()


def _teach(
    settings: Settings,
    redis_url: str,
    target: Path,
    taps: tuple[int, ...],
    ends: Connection,
    counts: MutableSequence[int],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command handles Ctrl-C and closes the pipe
    if logs.set_up(settings.log, "teacher") is None:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    progress.disable_progress_bar()
    stop = threading.Event()

    def watch() -> None:
        ends.poll(None)  # until the parent process closes its end or dies
        stop.set()

    def on_progress(total: LabellingCounts) -> None:
        counts[:] = [total.read, total.refused, total.traces]

    threading.Thread(target=watch, name="teacher-watch", daemon=True).start()
    Teacher(settings, redis_url, target, taps, stop, on_progress).run()
