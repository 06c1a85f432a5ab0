"""Maintenance of a replica's recall tables: snapshots, retention, purges, and learning from other replicas."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from osd.capture.purge import Member, PurgeFollower, Purges, RemovedData
from osd.capture.retention import belongs, oldest_allowed
from osd.capture.tail import TraceTail
from osd.capture.trace import Trace, TraceError
from osd.config import Settings
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.rehearsal import rehearse
from osd.drafting.recall.snapshot import CLOCK_MARGIN, SnapshotError, Snapshots
from osd.learning.batch import check, length
from osd.recall.backends import backend
from osd.recall.memory import Memory, mark_of
from osd.runtime.device import one_core
from osd.target.identity import Identity

if TYPE_CHECKING:
    from osd.engine.engine import Engine
    from osd.runtime.model import SlotModel

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.001
_TURN_SECONDS = 1.0
_POLL_SECONDS = 0.5
_SAVE_SECONDS = 60.0


class RecallListener:
    """Reader of other replicas' traces that updates the recall tables of this replica, for one thread.

    It pauses every few tokens, so that it never delays the engine, which shares the interpreter.
    """

    def __init__(
        self, settings: Settings, redis_url: str, name: str, target: Identity, model: SlotModel, stop: threading.Event
    ) -> None:
        """Create a reader for the replica ``name``.

        Args:
            settings: the settings of the service.
            redis_url: the Redis with the traces.
            name: the name of the replica; its own traces are skipped.
            target: the identity of its target; traces of other targets are skipped.
            model: the target; traces that are longer than its context are skipped.
            stop: event that interrupts ``learn``.
        """
        self._settings, self._target, self._model, self._stop = settings, target, model, stop
        self._tail = TraceTail(redis_url, settings.recalled, name)
        self._text = backend().text(model.context)

    def learn(self, tables: Mapping[str, Memory], purged: Iterable[str]) -> bool:
        """Learn the traces that arrived since the last call, for about a second at most.

        Args:
            tables: the table of each domain.
            purged: request ids to skip.

        Returns:
            Whether any trace was learned.
        """
        learned, end = False, time.monotonic() + _TURN_SECONDS
        for trace in self._tail.new(tables):
            if trace.domain in tables and self._is_usable(trace, purged):
                learned = True
                for _ in rehearse(tables[trace.domain], self._text, trace):
                    if self._stop.wait(_PAUSE_SECONDS):
                        return learned
            if time.monotonic() > end:
                break
        return learned

    def close(self) -> None:
        """Close the connection."""
        self._tail.close()

    def _is_usable(self, trace: Trace, purged: Iterable[str]) -> bool:
        oldest = oldest_allowed(self._settings.capture, time.time())
        if oldest is not None and trace.created < oldest:
            return False
        if any(belongs(trace.request_id, request) for request in purged):
            return False
        target, model = self._target, self._model
        try:
            if not target.wrote(trace.target):
                raise TraceError(f"its target is {trace.target}, not {target.label}")
            if length(trace) > model.context:
                raise TraceError(f"it has {length(trace)} tokens, more than the context of {model.context}")
            check(trace, model.vocab_size, 0)
            if trace.target_ids.numpy().min() < 0:
                raise TraceError("target_ids has an id below 0")
        except TraceError as error:
            logger.warning("skipping a trace of another replica: %s", error)
            return False
        return True


class RecallKeeper:
    """Thread that maintains the recall tables of every domain of an engine.

    The table of a domain starts from its latest snapshot. A snapshot is written at the end, and each minute in which
    tokens were decoded. Tables of single clients have no snapshots. Entries older than ``capture.keep_days`` are
    dropped. Entries that a purged request may have touched are dropped at once from the tables and from every snapshot
    on this disk, and again when the request has ended.
    If the service has several replicas, each learns the traces of the other replicas. A replica without a drafter has
    no tables, but follows purges for the snapshots on its disk and the traces of running requests.
    """

    def __init__(self, settings: Settings, redis_url: str, name: str, target: Identity, engine: Engine) -> None:
        """Create the thread for ``engine``, which the replica ``name`` runs with ``target``."""
        self._settings, self._target = settings, target
        self._engine, self._pool = engine, engine.pool
        self._snapshots = Snapshots(settings.registry_dir)
        self._memories: dict[str, Memories] = {}
        self._purged: dict[str, float] = {}  # time up to which purges are applied to each table
        self._purges = PurgeFollower(Purges(redis_url), Member("replica", name), self._forget)
        self._running: dict[str, float] = {}  # purged requests that still decode, with the time of each purge
        self._listener: RecallListener | None = None
        self._saved_tokens, self._changed, self._failing = 0, False, False
        self._save_at = time.monotonic() + _SAVE_SECONDS
        self._stop = threading.Event()
        if settings.shares_recall:
            self._listener = RecallListener(settings, redis_url, name, target, engine.target, self._stop)
        self._thread = threading.Thread(target=self._run, name="recall-keeper", daemon=True)

    def start(self) -> None:
        """Load the snapshots of the existing tables and start the thread."""
        self._try_update()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and write the last snapshots."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._try_update()  # a domain may be new since the last update
        self.save()
        self._purges.close()
        if self._listener is not None:
            self._listener.close()

    def update(self) -> None:
        """Load the snapshots of new tables, apply purges, learn from other replicas, and save when it is due."""
        current = {} if self._pool is None else self._pool.all_memories()
        for domain, memories in current.items():
            if self._memories.get(domain) is not memories:
                self._restore(domain, memories)
        self._write_dropped({domain: memories for domain, memories in self._memories.items() if domain not in current})
        self._memories = current
        self._purges.alive()
        self._purges.update()
        for request in [request for request in self._running if not self._is_running(request)]:
            self._drop(request, current)
            del self._running[request]
        if self._listener is not None:
            self._changed |= self._listener.learn(self._shared_tables(self._memories), self._purges.requests)
        if time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + _SAVE_SECONDS
            self.save()

    def is_purged(self, request: str) -> bool:
        """Return whether a request was purged in the last day; any thread may call this."""
        return any(belongs(request, purged) for purged in self._purges.requests)

    def save(self) -> None:
        """Drop entries that are too old, and write snapshots if the tables changed since the last call."""
        oldest, tokens = self._oldest(), self._engine.counters().completion_tokens
        for memories in self._memories.values():
            for table in memories.tables:
                self._changed |= _expire(table, oldest)
        self._changed |= tokens != self._saved_tokens
        try:
            self._snapshots.expire(oldest)
            if self._changed:
                for domain, table in self._shared_tables(self._memories).items():
                    self._write(domain, table)
        except OSError as error:
            if not self._failing:
                logger.warning("cannot write the recall snapshots, trying again: %s", error)
            self._failing = True
        else:
            self._saved_tokens, self._changed, self._failing = tokens, False, False

    def _shared_tables(self, by_domain: dict[str, Memories]) -> dict[str, Memory]:
        """Return the table of each domain; empty if each client has its own table."""
        if not self._settings.recall.shared:
            return {}
        return {domain: memories.of("") for domain, memories in by_domain.items()}

    def _forget(self, request: str, at: float) -> RemovedData:
        """Drop the entries of a purged request; ``at`` is the time of the purge.

        Raises:
            OSError: a snapshot on this disk cannot be purged.
        """
        if self._is_running(request):
            self._running[request] = at
        if self._purges.updated:
            return RemovedData(entries=self._drop(request, self._memories))
        # At the start most purges are applied already, and a repetition would drop entries of other requests.
        affected = {name: tables for name, tables in self._memories.items() if self._purged[name] < at + CLOCK_MARGIN}
        return RemovedData(entries=self._drop(request, affected, at))

    def _drop(self, request: str, by_domain: dict[str, Memories], at: float | None = None) -> int:
        """Drop the entries that a request may have touched, in tables and snapshots; return their number.

        Args:
            request: the purged request.
            by_domain: the tables.
            at: the time of the purge, to skip the snapshots to which it is applied; None skips none.

        Raises:
            OSError: a snapshot on this disk cannot be purged.
        """
        mark = mark_of(request)
        dropped = sum(table.drop(reader=mark) for memories in by_domain.values() for table in memories.tables)
        self._changed |= dropped > 0
        return dropped + self._snapshots.purge(request, at)

    def _write(self, domain: str, table: Memory) -> None:
        """Write the snapshot of a table."""
        # The entries of a purged request that still decodes are dropped at its end, or after a restart.
        purged = min([self._purges.updated, *self._running.values()])
        self._snapshots.write(domain, table, self._target, purged, self._oldest() or 0.0)

    def _oldest(self) -> float | None:
        return oldest_allowed(self._settings.capture, time.time())

    def _is_running(self, request: str) -> bool:
        """Return whether a sequence of the request is queued or decodes."""
        loop = self._engine.loop
        with loop.changed:
            return any(belongs(s.request.id, request) for s in loop.scheduler.sequences())

    def _write_dropped(self, dropped: dict[str, Memories]) -> None:
        """Write snapshots of domains that the pool dropped; their last snapshot may be a minute old."""
        try:
            for domain, table in self._shared_tables(dropped).items():
                _expire(table, self._oldest())
                self._write(domain, table)
        except OSError as error:
            logger.warning("cannot write the last recall snapshot of %s: %s", ", ".join(dropped), error)

    def _restore(self, domain: str, memories: Memories) -> None:
        self._purged[domain] = time.time()
        if not self._settings.recall.shared:
            return
        table = memories.of("")
        try:
            snapshot = self._snapshots.restore(domain, table, self._target)
        except SnapshotError as error:
            logger.warning("cannot use the recall snapshot of %s, starting with an empty table: %s", domain, error)
            return
        if snapshot is not None:
            self._purged[domain] = snapshot.purged
            for request, at in self._purges.requests.items():
                if not snapshot.is_purged(at):
                    self._changed |= table.drop(reader=mark_of(request)) > 0
            self._changed |= _expire(table, self._oldest())
            logger.info("loaded the recall snapshot %s of %s", snapshot.sha256[:8], domain)

    def _run(self) -> None:
        one_core()
        while not self._stop.wait(_POLL_SECONDS):
            self._try_update()

    def _try_update(self) -> None:
        try:
            self.update()
        except Exception:
            # An error here must not stop serving; the next update may succeed.
            logger.exception("cannot update the recall tables")


def _expire(table: Memory, oldest: float | None) -> bool:
    """Drop the entries before the time ``oldest``; return whether there were any."""
    return oldest is not None and table.drop(before=int(oldest)) > 0
