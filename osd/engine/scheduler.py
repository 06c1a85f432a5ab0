"""Which requests run, in which slots, and what each of them feeds in the next round."""

from __future__ import annotations

import logging
from bisect import insort
from itertools import count

from osd.config import EngineSettings
from osd.engine.planner import Planner
from osd.engine.pool import DrafterPool
from osd.engine.request_router import RequestRouter
from osd.engine.scheduled import Scheduled, ScheduledSequence
from osd.engine.sequence import Sequence, Unrouted
from osd.engine.slots import SlotManager
from osd.engine.tracing import Tracer

log = logging.getLogger(__name__)


class Scheduler:
    """Holds the sequences of an engine, those that wait and those that run.

    The engine's thread alone admits, plans and settles. Other threads only ``add`` and read the counts; whoever calls
    holds the engine's lock.

    Who waits is taken by ``priority``, and of one priority by when it came. Where slots or memory are short, the
    sequence that is last by this order gives way to one of a better priority, and to those of its own that grow: it
    waits, and goes on from where it was. See Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), whose preemption
    this is, with what was computed computed again.

    ``cached_tokens`` counts those of prompts that did not have to be read, ``preemptions`` how often one gave way.
    """

    def __init__(
        self,
        settings: EngineSettings,
        slots: SlotManager,
        planner: Planner,
        pool: DrafterPool | None,
        router: RequestRouter | None,
        tracer: Tracer,
    ) -> None:
        """Schedule over free ``slots``; without a ``pool`` it decodes plainly.

        The ``router`` is for requests that do not say their domain, the ``tracer`` for those that allow a trace.
        """
        self._settings, self._slots, self._planner = settings, slots, planner
        self._pool, self._router, self._tracer = pool, router, tracer
        self.cached_tokens = self.preemptions = 0
        self.waiting: list[Sequence] = []  # the first in line first
        self.running: list[Sequence] = []
        self._numbers, self._trials = count(), 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        sequence.number = next(self._numbers)
        insort(self.waiting, sequence, key=_order)

    def take(self) -> Sequence | None:
        """The sequence that is first in line, which runs from now on; None without one, or without room for it."""
        if not self.waiting:
            return None
        first = self.waiting[0]
        while not self._slots.has_room(first):
            last = max(self.running, key=_order)
            if last.request.priority <= first.request.priority:
                return None
            self._preempt(last)
        self.running.append(self.waiting.pop(0))
        return first

    def admit(self, s: Sequence) -> None:
        """Give a sequence that was taken its slot, its drafter and what is known of its prompt."""
        self._slots.take(s)
        before = s.learner
        if self._pool is not None:
            s.learner = self._pool.own
            if s.request.speculate:
                self._begin(s, self._pool)
            if before is not None and before in s.drafters:
                s.learner = before
        if not s.preempted:
            self._tracer.begin(s)
        elif before is not None and s.learner is not None and before.needs != s.learner.needs:
            s.trace = None  # it has states that this one does not read
        self._take_cached(s, 0)

    def fit(self) -> None:
        """Have memory for what the next round keeps of each sequence; the last in line give way where there is none."""
        for s in sorted(self.running, key=_order):
            while s in self.running and not self._slots.grow(s):
                self._preempt(max(self.running, key=_order))

    def _preempt(self, s: Sequence) -> None:
        """Take back a running sequence's slot; it waits for another."""
        self.release(s)
        s.give_way()
        self.preemptions += 1
        insort(self.waiting, s, key=_order)

    def catch_up(self, s: Sequence) -> None:
        """Give a sequence what has come to be known of its prompt since it began to read that."""
        start = s.fed
        self._slots.catch_up(s)
        self._take_cached(s, start)

    def _begin(self, s: Sequence, pool: DrafterPool) -> None:
        unsaid = s.request.domain is None and s.routed is None
        if unsaid and self._router is not None and self._router.open(s.request.tenant):
            s.unrouted = Unrouted()
            return
        s.begin(pool.choose(s.routed.pick.drafter if s.routed else s.domain).stable)
        self._join(s, pool)
        s.learner = s.drafter

    def follow_canaries(self) -> None:
        """Have running sequences take part in the turns of a canary that began, and leave a canary that ended."""
        pool = self._pool
        if pool is None or pool.trials == self._trials:
            return
        self._trials = pool.trials
        for s in self.running:
            self._join(s, pool)

    def _join(self, s: Sequence, pool: DrafterPool) -> None:
        """Have a sequence take part in the turns beside its stable drafter, and in no others."""
        canary = None if s.stable is None else pool.canary_beside(s.stable)
        if canary is s.canary:
            return
        s.leave()
        if canary is not None:
            s.join(canary, self._slots.states(s.slot, 0, s.handed))

    def plan(self, speculate: bool) -> Scheduled:
        """What each running sequence feeds: its last token and a draft, or the next part of its prompt.

        Prompts get as many tokens as a chunk has, and beside sequences that decode no more than these can wait for.
        With the prefix cache, what several have to read is read by one, such as for the ``n`` answers that one client
        asked for; the others wait for it. What a grammar leaves no choice about is drafted without a drafter, behind a
        prompt too.
        """
        decoding = sum(s.decoding for s in self.running)
        readers = len(self.running) - decoding
        budget = self._planner.chunk(decoding, readers, self._settings.prefill_chunk) if readers else 0
        scheduled: list[ScheduledSequence] = []
        reading: list[ScheduledSequence] = []
        for s in self.running:
            if s.decoding:
                scheduled.append(self._scheduled(s, 1, speculate))
            elif budget > 0 and not any(one.reads_for(s) for one in reading):
                count = min(budget, len(s.tokens) - s.fed)
                budget -= count
                scheduled.append(self._scheduled(s, count, speculate))
                if self._settings.prefix_cache:
                    reading.append(scheduled[-1])
        if not speculate or self._pool is None:
            return Scheduled(scheduled, {}, {})
        return Scheduled(scheduled, *self._planner.limits(scheduled, len(self.running)))

    def _scheduled(self, s: Sequence, count: int, speculate: bool) -> ScheduledSequence:
        """So many tokens of a sequence, and what its grammar leaves no choice about behind them.

        All of that is kept, so that it pays without a plan.
        """
        ends, forced = s.fed + count == len(s.tokens), []
        if speculate and ends and s.constraint is not None and s.request.speculate:
            forced = s.constraint.forced(min(s.remaining - 1, self._settings.max_draft))
        return ScheduledSequence(s, s.fed, count, ends, forced)

    def _take_cached(self, s: Sequence, start: int) -> None:
        """Count, and pass on, the part of the prompt from ``start`` on that the prefix cache had."""
        if s.fed > start:
            s.hand_on(s.tokens[start + 1 : s.fed + 1], self._slots.states(s.slot, start, s.fed))
            if not s.preempted:  # else much of it was read for this very sequence
                s.cached += s.fed - start
                self.cached_tokens += s.fed - start

    def settle(self, s: Sequence) -> None:
        """Let a sequence go that has finished, and route one whose prompt has been read."""
        if s.finish:
            self.release(s)
        elif s.unrouted is not None and self._router is not None:
            self._router.route(s)
            self._tracer.routed(s)

    def release(self, s: Sequence, forget: bool = False) -> None:
        """Take back what a running sequence holds; with ``forget`` nothing in its slot can be relied on."""
        self.running.remove(s)
        if s.slot < 0:
            return
        if forget:
            self._slots.forget(s.slot)
        self._slots.give_back(s.slot)
        for drafter in s.drafters:
            try:
                drafter.close(s.slot)
            except Exception:  # the slot is free all the same: who gets it next opens it anew
                log.exception("the drafter of request %s cannot let it go", s.request.id)

    @property
    def memory(self) -> float:
        """The share of the memory for keys and values that running sequences have."""
        return self._slots.used

    def named(self, ids: set[str]) -> list[Sequence]:
        """The sequences of some requests."""
        return [s for s in self.everything() if s.request.id in ids]

    def everything(self) -> list[Sequence]:
        """All sequences."""
        return [*self.running, *self.waiting]

    def end(self, s: Sequence) -> None:
        """Give up a sequence, running or waiting."""
        s.finish = "cancelled"
        s.report()
        self.let_go(s)

    def let_go(self, s: Sequence, forget: bool = False) -> None:
        """Hold a sequence no longer, running or waiting; of one that has gone already there is nothing to do."""
        if s in self.waiting:
            self.waiting.remove(s)
        elif s in self.running:
            self.release(s, forget)


def _order(s: Sequence) -> tuple[int, int]:
    """What comes first in line is least."""
    return s.request.priority, s.number
