"""Keeps what a replica's drafters recall: for the next replica, and no longer than it may be kept."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from osd.capture.purge import Member, PurgeFollower, Purges, Removed
from osd.capture.retention import belongs, oldest_allowed
from osd.capture.tail import TraceTail
from osd.capture.trace import Trace, TraceError
from osd.config import Settings
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.rehearsal import rehearse
from osd.drafting.recall.snapshot import SnapshotError, Snapshots
from osd.learning.batch import check, length
from osd.recall.backends import backend
from osd.recall.memory import Memory, mark_of
from osd.runtime.device import one_core
from osd.target.identity import Identity

if TYPE_CHECKING:
    from osd.engine.engine import Engine

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.001
_TURN_SECONDS = 1.0


class RecallListener:
    """Puts what other replicas decoded into this one's tables, for one thread.

    It pauses every few tokens, so that the engine, which shares an interpreter with it, is never held up.
    """

    def __init__(
        self, settings: Settings, redis_url: str, name: str, target: Identity, vocabulary: int, stop: threading.Event
    ) -> None:
        """Listen for the replica ``name``, whose ``target`` has ``vocabulary`` ids, until ``stop``."""
        self._settings, self._target, self._vocabulary, self._stop = settings, target, vocabulary, stop
        self._tail = TraceTail(redis_url, settings.recalled, name)
        self._text = backend().text(settings.engine.context)

    def listen(self, tables: Mapping[str, Memory], purged: Iterable[str]) -> bool:
        """Learn what came since the last call, by the table of each domain; whether there was anything.

        It takes about a second at most, and leaves the rest for the next call. ``purged`` requests are left out.
        """
        learnt, end = False, time.monotonic() + _TURN_SECONDS
        for trace in self._tail.new(tables):
            if trace.domain in tables and self._usable(trace, purged):
                learnt = True
                for _ in rehearse(tables[trace.domain], self._text, trace):
                    if self._stop.wait(_PAUSE_SECONDS):
                        return learnt
            if time.monotonic() > end:
                break
        return learnt

    def close(self) -> None:
        """Close the connection."""
        self._tail.close()

    def _usable(self, trace: Trace, purged: Iterable[str]) -> bool:
        oldest = oldest_allowed(self._settings.capture, time.time())
        if oldest is not None and trace.created < oldest:
            return False
        if any(belongs(trace.request_id, request) for request in purged):
            return False
        target, context = self._target, self._settings.engine.context
        try:
            if not target.wrote(trace.target):
                raise TraceError(f"it is of the target {trace.target}, not of {target.label}")
            if length(trace) > context:
                raise TraceError(f"it has {length(trace)} tokens, and engine.context is {context}")
            check(trace, self._vocabulary, 0)
            if trace.target_ids.numpy().min() < 0:
                raise TraceError("target_ids has an id below 0")
        except TraceError as error:
            logger.warning("what another replica decoded is not learnt: %s", error)
            return False
        return True


_LOOK_SECONDS = 0.5
_SAVE_SECONDS = 60.0
_CLOCKS = 60.0  # by so much those of two machines may differ, or a snapshot come later than what it holds


class RecallKeeper:
    """Looks after the tables of every domain of an engine, in a thread.

    A domain's table starts from the latest snapshot, and is written down each minute in which something was decoded,
    and at the end. Tables of single clients are not. What is older than ``capture.keep_days`` is dropped, and what
    purged requests may have touched, at once and when the last of them has ended. Where there are several replicas
    each learns what the others decoded.
    """

    def __init__(self, settings: Settings, redis_url: str, name: str, target: Identity, engine: Engine) -> None:
        """Look after the tables of ``engine``, of the replica ``name``, which decodes ``target``."""
        assert engine.pool is not None  # noqa: S101  the replica has a drafter
        self._settings, self._target = settings, target
        self._engine, self._pool = engine, engine.pool
        self._snapshots = Snapshots(settings.registry_dir)
        self._known: dict[str, Memories] = {}
        self._since: dict[str, float] = {}  # before this time nobody else has looked after the table
        self._purges = PurgeFollower(Purges(redis_url), Member("replica", name), self._forget)
        self._running: set[str] = set()  # purged requests that are still decoded
        self._listener: RecallListener | None = None
        self._saved, self._changed, self._failing = 0, False, False
        self._save_at = time.monotonic() + _SAVE_SECONDS
        self._stop = threading.Event()
        if settings.shares_recall:
            vocabulary = engine.target.vocab_size
            self._listener = RecallListener(settings, redis_url, name, target, vocabulary, self._stop)
        self._thread = threading.Thread(target=self._run, name="recall-keeper", daemon=True)

    def start(self) -> None:
        """Fill the tables that there are, and begin to look after them."""
        self._try_to_look()
        self._thread.start()

    def close(self) -> None:
        """Stop, and write down what was learnt since the last time."""
        self._stop.set()
        self._thread.join(timeout=5)
        self._try_to_look()  # a tenant may have come since the last time
        self.save()
        self._purges.close()
        if self._listener is not None:
            self._listener.close()

    def look(self) -> None:
        """Take up the tables that are new, and do what is due."""
        recalled = self._pool.recalled()
        for domain, memories in recalled.items():
            if self._known.get(domain) is not memories:
                self._take_up(domain, memories)
        self._leave({domain: memories for domain, memories in self._known.items() if domain not in recalled})
        self._known = recalled
        if recalled:
            self._purges.alive()
            self._purges.look()
        for request in [request for request in self._running if not self._decoded(request)]:
            self._running.discard(request)
            self._drop(request, recalled)
        if self._listener is not None:
            self._changed |= self._listener.listen(self._shared(self._known), self._purges.asked)
        if time.monotonic() >= self._save_at:
            self._save_at = time.monotonic() + _SAVE_SECONDS
            self.save()

    def save(self) -> None:
        """Drop what is too old, and write the tables down if they changed since the last time."""
        oldest, done = oldest_allowed(self._settings.capture, time.time()), self._engine.counters().completion_tokens
        for memories in self._known.values():
            for table in memories.tables:
                self._changed |= _aged(table, oldest)
        self._changed |= done != self._saved
        try:
            self._snapshots.expire(oldest)
            if self._changed:
                for domain, table in self._shared(self._known).items():
                    self._snapshots.write(domain, table, self._target)
        except OSError as error:
            if not self._failing:
                logger.warning("what is recalled cannot be written down, trying again: %s", error)
            self._failing = True
        else:
            self._saved, self._changed, self._failing = done, False, False

    def _shared(self, known: dict[str, Memories]) -> dict[str, Memory]:
        """The table of each domain, none where each client has its own."""
        return {domain: memories.of("") for domain, memories in known.items()} if self._settings.recall.shared else {}

    def _forget(self, request: str, at: float) -> Removed:
        if self._decoded(request):
            self._running.add(request)
        held = self._known
        if not self._purges.caught_up:  # it may have been asked before there was anything here; later clocks may be set
            held = {domain: tables for domain, tables in held.items() if at > self._since[domain] - _CLOCKS}
        return Removed(entries=self._drop(request, held))

    def _drop(self, request: str, held: dict[str, Memories]) -> int:
        """Drop what a request may have touched, here and in the snapshots; returns how many entries."""
        mark = mark_of(request)
        dropped = sum(table.drop(reader=mark) for memories in held.values() for table in memories.tables)
        if dropped:
            self._changed = True
            self.save()
        return dropped

    def _decoded(self, request: str) -> bool:
        """Whether a request is not finished yet."""
        loop = self._engine.loop
        with loop.changed:
            return any(belongs(s.request.id, request) for s in loop.scheduler.everything())

    def _leave(self, gone: dict[str, Memories]) -> None:
        """Write down what those recalled that gave way to others; it may be a minute since the last time."""
        try:
            for domain, table in self._shared(gone).items():
                self._snapshots.write(domain, table, self._target)
        except OSError as error:
            logger.warning("what %s recalled is lost since it was last written down: %s", ", ".join(gone), error)

    def _take_up(self, domain: str, memories: Memories) -> None:
        self._since[domain] = time.time()
        if not self._settings.recall.shared:
            return
        table = memories.of("")
        try:
            found = self._snapshots.restore(domain, table, self._target)
        except SnapshotError as error:
            logger.warning("the snapshot of what %s recalled is refused, it starts empty: %s", domain, error)
            return
        if found is not None:
            self._since[domain] = found.created
            self._changed |= _aged(table, oldest_allowed(self._settings.capture, time.time()))
            logger.info("%s recalls what is in the snapshot %s", domain, found.sha256[:8])

    def _run(self) -> None:
        one_core()
        while not self._stop.wait(_LOOK_SECONDS):
            self._try_to_look()

    def _try_to_look(self) -> None:
        try:
            self.look()
        except Exception:
            # Whatever is wrong now, requests are served all the same, and the next look may be better.
            logger.exception("what is recalled cannot be looked after")


def _aged(table: Memory, oldest: float | None) -> bool:
    """Drop what is too old; whether there was anything."""
    return oldest is not None and table.drop(before=int(oldest)) > 0
