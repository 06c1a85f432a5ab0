"""Scheduler: which requests run, in which slots, and what each of them feeds in the next decoding step."""

from __future__ import annotations

import logging
from bisect import insort
from dataclasses import replace
from itertools import count, groupby

from osd.config import EngineSettings
from osd.engine.planner import Planner
from osd.engine.pool import DrafterPool
from osd.engine.request_router import RequestRouter
from osd.engine.sequence import RoutingBuffer, SequenceState
from osd.engine.slots import SlotManager
from osd.engine.step_plan import ScheduledSequence, StepPlan
from osd.engine.tracing import Tracer

log = logging.getLogger(__name__)

_MOST_WAITS = 3
"""Steps in a row in which sequences of worse priority wait, as ``docs/scheduling.md`` promises."""


class Scheduler:
    """Waiting and running sequences of an engine.

    Only the engine's thread admits, plans and settles. Other threads may ``add`` and read the counts while they hold
    the engine's lock.

    Waiting sequences are taken by ``priority``, and by arrival within a priority. If slots or memory run out, the last
    running sequence in this order is preempted for a sequence of better priority, or for the growth of another: it
    waits and continues later. This is the preemption with recomputation of Kwon et al. 2023, "PagedAttention" (arXiv
    2309.06180).

    Attributes:
        waiting: sequences without a slot, the next one first.
        running: sequences that were taken.
        cached_tokens: number of prompt tokens that did not have to be read.
        preemptions: number of preempted sequences.
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
        """Schedule over free ``slots``; without a ``pool`` decode plainly, and without a ``router`` route nothing."""
        self._settings, self._slots, self._planner = settings, slots, planner
        self._pool, self._router, self._tracer = pool, router, tracer
        self.cached_tokens = self.preemptions = 0
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._numbers, self._version_changes, self._waits = count(), 0, 0

    def add(self, sequence: SequenceState) -> None:
        """Queue a sequence behind the waiting sequences of its priority."""
        sequence.number = next(self._numbers)
        insort(self.waiting, sequence, key=_order)

    def take_next(self) -> SequenceState | None:
        """Move the first waiting sequence to the running ones and return it; None without one, or without room.

        If necessary, running sequences of worse priority are preempted, unless that would not make enough room.
        """
        if not self.waiting:
            return None
        first = self.waiting[0]
        worse = [s for s in self.running if s.request.priority > first.request.priority]
        if not self._slots.has_room(first, [s.slot for s in worse]):
            return None
        for s in sorted(worse, key=_order, reverse=True):
            if self._slots.has_room(first):
                break
            self._preempt(s)
        self.running.append(self.waiting.pop(0))
        return first

    def admit(self, s: SequenceState) -> None:
        """Give a sequence that was taken its slot, its drafter and the cached part of its prompt."""
        self._slots.take(s)
        before = s.learner
        if self._pool is not None:
            s.learner = self._pool.default
            if s.request.speculate:
                self._start_drafting(s, self._pool)
            if before is not None and before in s.drafters:
                s.learner = before
        if not s.preempted:
            self._tracer.begin(s)
        elif before is not None and s.learner is not None and before.needs != s.learner.needs:
            s.trace = None  # it has states that the new drafter does not read
        self._take_cached(s, 0)

    def reserve_memory(self) -> None:
        """Reserve the memory that each running sequence needs for the next step; preempt the last ones for it."""
        for s in sorted(self.running, key=_order):
            while s in self.running and not self._slots.grow(s):
                self._preempt(max(self.running, key=_order))

    def _preempt(self, s: SequenceState) -> None:
        """Take the slot of a running sequence and queue it again."""
        self.release(s)
        s.preempt()
        self.preemptions += 1
        insort(self.waiting, s, key=_order)

    def catch_up(self, s: SequenceState) -> None:
        """Give a sequence the part of its prompt that other slots have read since it began."""
        start = s.fed
        self._slots.catch_up(s)
        self._take_cached(s, start)

    def _start_drafting(self, s: SequenceState, pool: DrafterPool) -> None:
        needs_routing = s.request.domain is None and s.routed is None
        if needs_routing and self._router is not None and self._router.has_choice(s.request.tenant):
            s.unrouted = RoutingBuffer()
            return
        s.start_drafting(pool.choose(s.routed.pick.drafter if s.routed else s.domain).stable)
        self._update_alternate(s, pool)
        s.learner = s.recorded

    def follow_alternates(self) -> None:
        """Let running sequences join comparisons that began, and leave comparisons that ended."""
        pool = self._pool
        if pool is None or pool.version_changes == self._version_changes:
            return
        self._version_changes = pool.version_changes
        for s in self.running:
            self._update_alternate(s, pool)

    def _update_alternate(self, s: SequenceState, pool: DrafterPool) -> None:
        """Let a sequence take part in the comparison of its stable drafter, and in no other."""
        alternate = None if s.stable is None else pool.alternate_of(s.stable)
        if alternate is s.alternate:
            return
        s.leave_comparison()
        if alternate is not None:
            s.join_comparison(alternate, self._slots.states(s.slot, 0, s.delivered))

    def plan(self, speculate: bool) -> StepPlan:
        """Return the plan of the next step: for each sequence a draft, or the next part of its prompt.

        The length of the read prompts is limited to a chunk, and further if sequences would wait too long that decode
        with the same priority as a prompt, or run with a better one. With the prefix cache, only one sequence reads a
        beginning that several prompts of a client share, for example for ``n`` answers; the others wait for it. Tokens
        that a grammar forces are drafted without a drafter, also after a prompt. Sequences of worse priority that would
        prolong the step wait, but at most ``_MOST_WAITS`` steps in a row.
        """
        scheduled: list[ScheduledSequence] = []
        better = 0
        waits = False
        for _, group in groupby(sorted(self.running, key=_order), key=lambda s: s.request.priority):
            sequences = list(group)
            entries = self._entries(sequences, better, scheduled)
            better += len(sequences)
            rows, more = (sum(entry.rows for entry in part) for part in (scheduled, entries))
            if rows and self._waits < _MOST_WAITS and not self._planner.bears(rows, more):
                waits = True
            else:
                scheduled += [self._forced(entry) for entry in entries] if speculate else entries
        self._waits = self._waits + 1 if waits else 0
        if not speculate or self._pool is None:
            return StepPlan(scheduled, {}, {})
        limits = self._planner.limits(scheduled, len(self.running))
        return StepPlan(scheduled, *limits, drafts=self._planner.drafts)

    def _entries(
        self, sequences: list[SequenceState], better: int, scheduled: list[ScheduledSequence]
    ) -> list[ScheduledSequence]:
        """Return the inputs of sequences of one priority.

        Args:
            sequences: of the priority.
            better: number of running sequences of better priority.
            scheduled: inputs of these sequences in the step.
        """
        readers = sum(not s.decoding for s in self.running)
        slowed = better + sum(s.decoding for s in sequences)
        limit = self._planner.chunk(slowed, readers, self._settings.prefill_chunk) if readers else 0
        reading = [entry for entry in scheduled if not entry.sequence.decoding]
        read = sum(entry.count for entry in reading)
        entries: list[ScheduledSequence] = []
        for s in sequences:
            if s.decoding:
                entries.append(_scheduled(s, 1))
            elif read < limit and not (self._settings.prefix_cache and any(reader.reads_for(s) for reader in reading)):
                entries.append(_scheduled(s, min(limit - read, len(s.tokens) - s.fed)))
                reading.append(entries[-1])
                read += entries[-1].count
        return entries

    def _forced(self, entry: ScheduledSequence) -> ScheduledSequence:
        """Return the input of a sequence with the tokens that its grammar forces after it.

        Forced tokens are always accepted, so that the planner does not limit them.
        """
        s = entry.sequence
        if s.constraint is None or not entry.ends or not s.request.speculate:
            return entry
        return replace(entry, forced=s.constraint.forced(min(s.remaining - 1, self._settings.max_draft)))

    def _take_cached(self, s: SequenceState, start: int) -> None:
        """Count the prompt tokens from ``start`` on that came from the prefix cache, and pass them to the drafters."""
        if s.fed > start:
            s.deliver(s.tokens[start + 1 : s.fed + 1], self._slots.states(s.slot, start, s.fed))
            if not s.preempted:  # otherwise this sequence itself may have read them before
                s.cached += s.fed - start
                self.cached_tokens += s.fed - start

    def settle(self, s: SequenceState) -> None:
        """Release a finished sequence, and route a sequence whose prompt has been read."""
        if s.finish:
            self.release(s)
        elif s.unrouted is not None and self._router is not None:
            self._router.route(s)
            self._tracer.set_domain(s)

    def release(self, s: SequenceState, forget: bool = False) -> None:
        """Take the slot and the drafters of a running sequence; ``forget`` discards the content of the slot."""
        self.running.remove(s)
        if s.slot < 0:
            return
        if forget:
            self._slots.forget(s.slot)
        self._slots.give_back(s.slot)
        for drafter in s.drafters:
            try:
                drafter.close(s.slot)
            except Exception:  # the slot is free anyway: the next sequence opens it again
                log.exception("the drafter of request %s cannot close its slot", s.request.id)

    @property
    def memory(self) -> float:
        """Share of the memory for keys and values that running sequences have."""
        return self._slots.used

    def with_ids(self, ids: set[str]) -> list[SequenceState]:
        """Return the sequences of these requests."""
        return [s for s in self.sequences() if s.request.id in ids]

    def sequences(self) -> list[SequenceState]:
        """Return all sequences, the running ones first."""
        return [*self.running, *self.waiting]

    def cancel(self, s: SequenceState) -> None:
        """End a running or waiting sequence as cancelled."""
        s.finish = "cancelled"
        s.report()
        self.remove(s)

    def remove(self, s: SequenceState, forget: bool = False) -> None:
        """Remove a running or waiting sequence, if it is still there; see ``release``."""
        if s in self.waiting:
            self.waiting.remove(s)
        elif s in self.running:
            self.release(s, forget)


def _scheduled(s: SequenceState, count: int) -> ScheduledSequence:
    return ScheduledSequence(s, s.fed, count, ends=s.fed + count == len(s.tokens))


def _order(s: SequenceState) -> tuple[int, int]:
    """Return the sort key of the queue; the least key runs first."""
    return s.request.priority, s.number
