"""The teacher in a process of its own: it computes beside the trainer, whose seconds of CPU are counted by process."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import MutableSequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from transformers.utils import logging as progress

from osd import logs
from osd.config import Settings
from osd.redis_client import Backoff
from trainer.teacher import Labelled, Teacher

logger = logging.getLogger(__name__)


class TeacherProcess:
    """Keeps a teacher running from ``start`` to ``stop``; one that ends by itself is followed by another.

    The next one goes on with what was not acknowledged.
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
