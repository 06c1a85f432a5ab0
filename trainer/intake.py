"""Intake of a domain's training: reads records from the stream into the learner, and forgets purged requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from osd.capture.purge import Member, PurgeFollower, Purges, RemovedData
from osd.capture.reader import Place, TraceReader
from osd.capture.retention import belongs
from osd.capture.streams import Waiting, group_of
from osd.capture.trace import Trace, TraceError
from osd.config import Settings, tenant_of
from osd.learning.batch import check
from osd.learning.buffers import Key
from osd.learning.online import Learner, empty_replay
from osd.learning.trainer_recall import TrainerRecall
from trainer.executor import TargetContext
from trainer.reporter import TrainingReporter

logger = logging.getLogger(__name__)

_READ_RECORDS, _READ_MS = 16, 1
_GATHER_READS = 32
_DAY = 86_400.0
_EXPIRE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_MEASURE_SECONDS = 1.0


class Intake:
    """Reader of the domain's stream, or of all streams of its tenant, with at-least-once delivery.

    A record is finished once it was trained on, held out, refused, or evicted from the replay buffer. ``acknowledge``
    acknowledges all finished records; call it only when a checkpoint on disk includes their training.

    Purged requests are forgotten and refused from then on, even if no trainer ran at the time of the purge. Records
    without hidden states are observed and added to the n-gram cache, but not trained on.

    Attributes:
        replay: the replay buffer.
        recalled: the n-gram cache's statistics on the records; None unless the drafter mixes both.
        room: the size of the replay buffer, in tokens and megabytes.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        context: TargetContext,
        reporter: TrainingReporter,
        observe: Callable[[Trace, Learner], None],
    ) -> None:
        """Create the intake of ``settings.domain``; ``observe`` is called with each new record, in order of arrival."""
        trainer = settings.trainer
        ages = [days * _DAY for days in (trainer.replay_days, settings.capture.keep_days) if days is not None]
        self._oldest = min(ages, default=None)
        self._expire_at = self._measure_at = self._gathered_at = 0.0
        self._every_domain = trainer.domains == "all"
        self._context, self._observe = context, observe
        self._state, self._trained_requests = reporter.state, reporter.trained_requests
        self.replay = empty_replay(trainer)
        self.recalled = TrainerRecall(settings.recall) if settings.drafter.mixes else None
        self.room = self._next_room = (trainer.replay_tokens, trainer.replay_mb)
        self._domain, self._tenant, self._min_records = settings.domain, tenant_of(settings.domain), trainer.min_records
        self._reader = TraceReader(
            redis_url, settings.capture, self._domain, group_of(self._domain), "trainer", tenant=self._every_domain
        )
        self._unfinished: dict[Key, list[Place]] = {}
        self._finished: list[Place] = []
        self._purged: set[str] = set()
        self._follower = PurgeFollower(Purges(redis_url), Member("trainer", self._domain), self._forget)
        self._looked_at = self._alive_at = -_LOOK_SECONDS
        self._purge_pending = False

    @property
    def finished(self) -> int:
        """Number of records that can be acknowledged."""
        return len(self._finished)

    def resize(self, tokens: int, megabytes: int) -> None:
        """Set the size of the replay buffer from the next ``read`` on; thread-safe."""
        self._next_room = tokens, megabytes

    def read(self, learner: Learner) -> bool:
        """Read records from the stream into the learner; measure the stream's lag once a second.

        Returns:
            Whether the stream may have more records.
        """
        if self.room != self._next_room:
            self.room = tokens, megabytes = self._next_room
            self.finish(self.replay.resize(tokens, megabytes << 20))
        deliveries = self._reader.read(_READ_RECORDS, _READ_MS)
        for delivery in deliveries:
            try:
                self._take(delivery.place, delivery.record, learner)
            except Exception as error:  # without this, each restart would fail at the same record
                # Other messages may quote a user.
                reason = str(error) if isinstance(error, TraceError) else type(error).__name__
                logger.warning("a record was refused: %s", reason)
                self._state.refused += 1
                self._reader.refuse(delivery.place, reason)
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + _MEASURE_SECONDS
            waiting = self._reader.waiting()
            self._state.lag, self._state.lag_seconds = waiting.records, waiting.age
        if time.monotonic() >= self._expire_at:
            self._expire_at = time.monotonic() + _EXPIRE_SECONDS
            self._reader.sweep()
            if self._oldest is not None:
                oldest = time.time() - self._oldest
                self.finish(self.replay.expire(oldest))
                if self.recalled is not None:
                    self.recalled.expire(oldest)
        return len(deliveries) == _READ_RECORDS

    def gather(self, learner: Learner, seconds: float, sleep: Callable[[float], object]) -> None:
        """Wait until ``seconds`` after the previous call, then read all records of the stream."""
        sleep(self._gathered_at + seconds - time.monotonic())
        self._gathered_at = time.monotonic()
        for _ in range(_GATHER_READS):
            if not self.read(learner):
                break

    def must_forget(self) -> bool:
        """Send a heartbeat; return whether requests must be forgotten, checked at most twice a second."""
        self._send_heartbeat()
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at, self._purge_pending = now, self._follower.has_new_requests()
        return self._purge_pending

    def forget_purged(self) -> None:
        """Forget newly purged requests, at most twice a second. Do not call it during an evaluation."""
        self._send_heartbeat()
        now = time.monotonic()
        if not self._purge_pending and now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at, self._purge_pending = now, False
        self._follower.update()
        self._purged &= self._follower.requests.keys()

    def missing(self, learner: Learner) -> str:
        """Return the reason why a micro-step cannot run, or "" when it can."""
        if not learner.ready:
            refused = self._state.refused
            missing = f"{learner.counters.records} of {self._min_records} records to start with"
            return missing + (f", {refused} were refused" if refused else "")
        if not learner.trigger.due(self.replay.fresh_records, time.monotonic()):
            return "every record was trained on often enough, waiting for new records"
        return ""

    def finish(self, keys: Iterable[Key]) -> None:
        """Mark records as finished."""
        for key in keys:
            self._finished += self._unfinished.pop(key, [])

    def acknowledge(self) -> None:
        """Acknowledge all finished records."""
        self._reader.ack(self._finished)
        self._finished.clear()

    def waiting(self) -> Waiting:
        """Return number and age of the records that are not acknowledged."""
        return self._reader.waiting()

    def close(self) -> None:
        """Close the connections."""
        self._reader.close()
        self._follower.close()

    def _take(self, place: Place, trace: Trace, learner: Learner) -> None:
        other_domain = trace.domain != self._domain and not (
            self._every_domain and tenant_of(trace.domain) == self._tenant
        )
        purged = any(belongs(trace.request_id, request) for request in self._purged)
        if other_domain or purged or (self._oldest is not None and trace.created < time.time() - self._oldest):
            self._finished.append(place)
            return
        if not self._context.target.wrote(trace.target):
            raise TraceError(f"its target is {trace.target}, not {self._context.target.label}")
        width = len(learner.distiller.drafter.needs.taps) * self._context.hidden_size
        without_states = width > 0 and not trace.states_weight
        check(trace, self._context.vocabulary, 0 if without_states else width)
        if without_states:
            learner.add_without_states(trace)
            self._observe(trace, learner)
            self._finished.append(place)
            return
        key = (trace.request_id, trace.segment)
        added = learner.add(msgspec.structs.replace(trace, weight=trace.weight * max(trace.states_weight, 1.0)))
        if added.part == "duplicate":
            if self.replay.is_fresh(key):
                self._unfinished[key].append(place)
            else:
                self._finished.append(place)
            return
        self._unfinished[key] = [place]
        self._observe(trace, learner)
        self.finish(added.evicted)
        if added.part == "held_out":
            self.finish([key])

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._alive_at >= _LOOK_SECONDS:
            self._alive_at = now
            self._follower.alive()

    def _forget(self, request: str, at: float) -> RemovedData:
        """Forget a request and refuse its later records."""
        self._purged.add(request)
        removed = self.replay.purge(lambda request_id: belongs(request_id, request))
        self.finish(removed)
        if self.recalled is not None:
            self.recalled.forget(request)
        logger.info("a request was purged: %d records removed", len(removed))
        return RemovedData(len(removed), self._trained_requests.contains(request))
