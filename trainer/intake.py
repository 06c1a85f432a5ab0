"""Records from the stream of a domain to its learner, their acknowledgement, and requests that are to be forgotten."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from osd.capture.purge import Member, PurgeFollower, Purges, Removed
from osd.capture.reader import Place, TraceReader
from osd.capture.retention import belongs
from osd.capture.trace import Trace, TraceError
from osd.capture.waiting import Waiting, group_of
from osd.config import Settings, tenant_of
from osd.learning.batch import check
from osd.learning.buffers import Key
from osd.learning.online import Learner
from osd.learning.recalled import Recalled
from osd.learning.replay import Replay
from osd.registry.learnt import Learnt
from trainer.executor import TargetContext
from trainer.status import Status

logger = logging.getLogger(__name__)

_READ_RECORDS, _READ_MS = 16, 1
_GATHER_READS = 32
_DAY = 86_400.0
_EXPIRE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_MEASURE_SECONDS = 1.0


class Intake:
    """Follows the stream of the domain, or those of all its tenant's, at least once for each record.

    A record is finished once it was trained on, kept as held-out, refused, or pushed out of the replay buffer, and
    ``acknowledge`` tells the stream of all that are. Call it only when a checkpoint on disk contains that training.

    ``observe`` is called with each new record, held out or not, in the order of arrival; requests ``purged`` are
    refused. Records whose hidden states were left out are observed and recalled, and not trained on.
    """

    def __init__(
        self,
        settings: Settings,
        redis_url: str,
        context: TargetContext,
        status: Status,
        replay: Replay,
        recalled: Recalled | None,
        observe: Callable[[Trace], None],
    ) -> None:
        trainer = settings.trainer
        ages = [days * _DAY for days in (trainer.replay_days, settings.capture.keep_days) if days is not None]
        self._oldest = min(ages, default=None)
        self.purged: set[str] = set()
        self._expire_at = self._measure_at = self._gathered_at = 0.0
        self._every_domain = trainer.domains == "all"
        self._context, self._status, self._observe = context, status, observe
        self._replay, self._recalled = replay, recalled
        self._room = self._resized = (trainer.replay_tokens, trainer.replay_mb)
        self._domain, self._tenant = settings.domain, tenant_of(settings.domain)
        self._reader = TraceReader(
            redis_url, settings.capture, self._domain, group_of(self._domain), "trainer", tenant=self._every_domain
        )
        self._unfinished: dict[Key, list[Place]] = {}
        self._finished: list[Place] = []

    @property
    def finished(self) -> int:
        """Records that could be acknowledged."""
        return len(self._finished)

    def resize(self, tokens: int, megabytes: int) -> None:
        """Have so much room for replay, from the next ``read`` on; from any thread."""
        self._room = tokens, megabytes

    def read(self, learner: Learner) -> bool:
        """Give the learner what the stream has.

        Says whether there may be more. The status says each second what is not acknowledged.
        """
        if self._resized != self._room:
            self._resized = tokens, megabytes = self._room
            self.finish(self._replay.resize(tokens, megabytes << 20))
        deliveries = self._reader.read(_READ_RECORDS, _READ_MS)
        for delivery in deliveries:
            self._take(delivery.place, delivery.record, learner)
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + _MEASURE_SECONDS
            waiting = self._reader.waiting()
            self._status.lag, self._status.lag_seconds = waiting.records, waiting.age
        if time.monotonic() >= self._expire_at:
            self._expire_at = time.monotonic() + _EXPIRE_SECONDS
            self._reader.sweep()
            if self._oldest is not None:
                oldest = time.time() - self._oldest
                self.finish(self._replay.expire(oldest))
                if self._recalled is not None:
                    self._recalled.expire(oldest)
        return len(deliveries) == _READ_RECORDS

    def gather(self, learner: Learner, seconds: float, sleep: Callable[[float], object]) -> None:
        """Give the learner at once what came within some seconds: nobody waits for it."""
        sleep(self._gathered_at + seconds - time.monotonic())
        self._gathered_at = time.monotonic()
        for _ in range(_GATHER_READS):
            if not self.read(learner):
                break

    def purge(self, asked: str) -> int:
        """Forget a request, and refuse what still comes of it; returns how many records there were."""
        self.purged.add(asked)
        gone = self._replay.purge(lambda request_id: belongs(request_id, asked))
        self.finish(gone)
        if self._recalled is not None:
            self._recalled.forget(asked)
        return len(gone)

    def finish(self, keys: Iterable[Key]) -> None:
        """These records were trained on, or are no longer there."""
        for key in keys:
            self._finished += self._unfinished.pop(key, [])

    def acknowledge(self) -> None:
        """Tell the stream that finished records need not be delivered again."""
        self._reader.ack(self._finished)
        self._finished.clear()

    def waiting(self) -> Waiting:
        """What is not acknowledged of the records that are there."""
        return self._reader.waiting()

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()

    def _take(self, place: Place, trace: Trace, learner: Learner) -> None:
        foreign = trace.domain != self._domain and not (self._every_domain and tenant_of(trace.domain) == self._tenant)
        purged = any(belongs(trace.request_id, asked) for asked in self.purged)
        if foreign or purged or (self._oldest is not None and trace.created < time.time() - self._oldest):
            self._finished.append(place)
            return
        try:
            if not self._context.target.wrote(trace.target):
                raise TraceError(f"it is of the target {trace.target}, not of {self._context.target.label}")
            width = len(learner.distiller.drafter.needs.taps) * self._context.hidden_size
            left_out = width > 0 and not trace.states_weight
            check(trace, self._context.vocabulary, 0 if left_out else width)
        except TraceError as error:
            logger.warning("a record was refused: %s", error)
            self._status.refused += 1
            self._finished.append(place)
            return
        if left_out:
            learner.overheard(trace)
            self._observe(trace)
            self._finished.append(place)
            return
        key = (trace.request_id, trace.segment)
        added = learner.add(msgspec.structs.replace(trace, weight=trace.weight * max(trace.states_weight, 1.0)))
        if added.part == "duplicate":
            if self._replay.is_fresh(key):
                self._unfinished[key].append(place)
            else:
                self._finished.append(place)
            return
        self._unfinished[key] = [place]
        self._observe(trace)
        self.finish(added.left)
        if added.part == "held_out":
            self.finish([key])


class Forgetting:
    """Follows the list of purged requests; what is asked for while no trainer runs is done when one starts."""

    def __init__(self, domain: str, purges: Purges, intake: Intake, learnt: Learnt) -> None:
        self._intake, self._learnt = intake, learnt
        self._follower = PurgeFollower(purges, Member("trainer", domain), self._forget)
        self._looked_at = self._alive_at = -_LOOK_SECONDS
        self._wanted = False

    def wanted(self) -> bool:
        """Say that this trainer will answer; whether there is something to forget, looked at twice a second at most."""
        self._alive()
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at, self._wanted = now, self._follower.wanted()
        return self._wanted

    def look(self) -> None:
        """Forget what is asked for since the last look, twice a second at most; not during an evaluation."""
        self._alive()
        now = time.monotonic()
        if not self._wanted and now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at, self._wanted = now, False
        self._follower.look()
        self._intake.purged &= self._follower.asked.keys()

    def close(self) -> None:
        """Close the connection."""
        self._follower.close()

    def _alive(self) -> None:
        now = time.monotonic()
        if now - self._alive_at < _LOOK_SECONDS:
            return
        self._alive_at = now
        self._follower.alive()

    def _forget(self, request: str, at: float) -> Removed:
        removed = Removed(self._intake.purge(request), self._learnt.knows(request))
        logger.info("request forgotten: %d records", removed.records)
        return removed
