"""Makes traces of what taps captured, in spare time: the target reads each answer, and says what it would have said."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
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
from osd.capture.reader import DeliveredRecord, ExchangeReader, TraceReader
from osd.capture.retention import Retention, belongs, oldest_allowed
from osd.capture.streams import group_of
from osd.capture.trace import Trace, TraceError
from osd.capture.writer import TraceWriter
from osd.config import Settings
from osd.labelling.labeller import Labeller
from osd.labelling.rendering import Reading, Renderer
from osd.redis_client import Backoff, connect
from osd.registry.replica_loads import ReplicaLoads
from osd.target.identity import identify
from osd.target.load import load_tokenizer
from osd.target.opening import load_target
from trainer.capacity import Capacity, lower_priority

logger = logging.getLogger(__name__)

SLOTS = 4
"""Answers that are read at a time."""

_READ_MS, _WRITE_SECONDS, _LOOK_SECONDS = 500, 5.0, 0.2


class _Stopped(Exception):
    pass


@dataclass(frozen=True)
class Labelled:
    """Exchanges ``read`` so far, those ``refused`` or purged, and the ``traces`` of the others."""

    read: int = 0
    refused: int = 0
    traces: int = 0


class Teacher:
    """Reads exchanges as one of the group of ``settings.domain``, and writes their traces for its trainer.

    It computes where ``Capacity`` leaves room, and no more than the trainer takes: while half of a full stream of
    traces is not learnt from yet it waits. An exchange is acknowledged when its traces are written.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        target: Path,
        taps: tuple[int, ...],
        over: threading.Event,
        told: Callable[[Labelled], None] = lambda labelled: None,
    ) -> None:
        """``taps`` are the layers whose states the drafter reads of the target in that directory.

        ``run`` ends when it is ``over``, and ``told`` hears what was labelled so far after each batch.
        """
        self._settings, self._over, self._told, self._counts = settings, over, told, Labelled()
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(target)
        model = load_target(
            settings.target,
            target,
            slots=SLOTS,
            context=settings.engine.context,
            scratch=1,
            taps=taps,
            label=identify(settings.target.source, target).label,
        )
        self._renderer = Renderer(tokenizer, model.eos_ids, model.vocab_size)
        self._labeller = Labeller(model, settings.capture, SLOTS)
        domain, group = settings.domain, group_of(settings.domain)
        self._reader = ExchangeReader(redis_url, settings.tapped, domain, group, "teacher")
        self._learnt = TraceReader(redis_url, settings.capture, domain, group, "teacher")  # for its lag alone
        self._writer = TraceWriter(redis_url, settings.capture, "teacher")
        self._offered = 0
        self._purges, self._redis = Purges(redis_url), connect(redis_url, timeout=5.0)
        self._tapped = Retention(self._redis, settings.tapped)
        self._loads = ReplicaLoads(redis_url)
        threads = settings.trainer.threads
        self._capacity = Capacity(self._loads, settings.trainer, lambda: time.process_time() / threads)
        self._never = threading.Event()

    def run(self) -> None:
        """Label until it is over; what was not written then is read again by the next."""
        lower_priority(self._settings.trainer.threads)
        most = self._settings.capture.max_records // 2
        while not self._over.is_set():
            self._reader.sweep()
            if self._learnt.waiting().records >= most:
                self._over.wait(_LOOK_SECONDS)
            elif batch := self._reader.read(SLOTS, _READ_MS):
                self._label(batch)
        self._writer.close()
        for connection in (self._reader, self._learnt, self._purges, self._redis, self._loads):
            connection.close()

    def _label(self, batch: Sequence[DeliveredRecord[Exchange]]) -> None:
        """Write the traces of a batch, and acknowledge it; what purges forbid is taken off the stream."""
        try:
            asked = self._purges.requests()
            for request in asked:
                if any(belongs(one.record.request_id, request) for one in batch):
                    self._tapped.purge(request)
        except RedisError as error:
            logger.debug("the list of purged requests cannot be read: %s", error)
            return  # they are read again when Redis is back
        readings = [reading for one in batch if (reading := self._reading(one.record, list(asked))) is not None]
        try:
            traces = self._traces(readings)
        except _Stopped:
            return
        except Exception as error:
            # Its message may quote a user. Read again, it would stand in the way of all others for ever.
            logger.error("answers could not be read by the target, they are left out: %s", type(error).__name__)
            readings, traces = [], []
        if self._write(traces):
            self._reader.ack([one.place for one in batch])
            known, refused = self._counts, len(batch) - len(readings)
            self._counts = Labelled(known.read + len(batch), known.refused + refused, known.traces + len(traces))
            self._told(self._counts)

    def _traces(self, readings: Sequence[Reading]) -> list[Trace]:
        if not self._capacity.wait(self._over, self._never, lambda why: None):
            raise _Stopped
        with self._capacity.working():
            return self._labeller.traces(readings, self._give_way)

    def _reading(self, record: Exchange, purged: Sequence[str]) -> Reading | None:
        oldest = oldest_allowed(self._settings.capture, time.time())
        old = oldest is not None and record.created < oldest
        if old or any(belongs(record.request_id, asked) for asked in purged):
            return None
        try:
            if record.target != self._settings.target.source:
                raise TraceError(f"it is of the target {record.target}, not of {self._settings.target.source}")
            return self._renderer.read(record)
        except TraceError as error:
            logger.warning("an exchange was refused: %s", error)
            return None
        except ValueError as error:  # its prompt is no JSON of one
            logger.warning("an exchange was refused: %s", type(error).__name__)
            return None

    def _give_way(self) -> None:
        self._capacity.give_way(self._over.is_set, lambda share: None)
        if self._over.is_set():
            raise _Stopped

    def _write(self, traces: Sequence[Trace]) -> bool:
        """Write traces; False when they are still not all written or dropped after some seconds."""
        for trace in traces:
            self._writer.offer(trace)
        self._offered += len(traces)
        deadline = time.monotonic() + _WRITE_SECONDS
        while sum(self._writer.counters().values()) < self._offered:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


class TeacherProcess:
    """Keeps a teacher running in a process from ``start`` to ``stop``; one that ends by itself is followed by another.

    The next one goes on with what was not acknowledged. CPU seconds of training are counted by process, so that those
    of the teacher are not among the trainer's.
    """

    def __init__(self, settings: Settings, redis_url: str, target: Path, taps: tuple[int, ...]) -> None:
        """``taps`` are as in ``Teacher``."""
        self._context = multiprocessing.get_context("spawn")
        self._counts: MutableSequence[int] = self._context.Array("q", 3, lock=False)
        self._before = (0, 0, 0)
        self._given = settings, redis_url, target, taps
        self._backoff = Backoff()
        self._process: BaseProcess | None = None
        self._lasts: Connection | None = None  # as long as it is open the process goes on

    @property
    def counts(self) -> Labelled:
        """What was labelled since the start."""
        return Labelled(*(old + new for old, new in zip(self._before, self._counts, strict=True)))

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process."""
        ends, self._lasts = self._context.Pipe(duplex=False)
        given = (*self._given, ends, self._counts)
        self._process = self._context.Process(target=_teach, args=given, name="teacher", daemon=True)
        self._process.start()
        ends.close()

    def check(self) -> None:
        """Start another process when this one has ended by itself; to be called now and then."""
        if self._process is None or self._process.is_alive() or self._backoff.remaining:
            return
        logger.warning("what reads exchanges ended by itself with code %s, starting anew", self._process.exitcode)
        labelled = self.counts
        self._before = (labelled.read, labelled.refused, labelled.traces)
        self._counts[:] = [0, 0, 0]
        self._backoff.failed()
        self._let_go()
        self.start()

    def stop(self) -> None:
        """End after the forward that runs."""
        self._let_go()
        if self._process is not None:
            self._process.join(10)
            self._process.kill()
            self._process.join()

    def _let_go(self) -> None:
        if self._lasts is not None:
            self._lasts.close()


def _teach(
    settings: Settings,
    redis_url: str,
    target: Path,
    taps: tuple[int, ...],
    ends: Connection,
    counts: MutableSequence[int],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which says when it is over
    if logs.set_up(settings.log, "teacher") is None:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    progress.disable_progress_bar()
    over = threading.Event()

    def watch() -> None:
        ends.poll(None)  # until the other end is closed, by whoever started this or by its end
        over.set()

    def told(labelled: Labelled) -> None:
        counts[:] = [labelled.read, labelled.refused, labelled.traces]

    threading.Thread(target=watch, name="teacher-watch", daemon=True).start()
    Teacher(settings, redis_url, target, taps, over, told).run()
