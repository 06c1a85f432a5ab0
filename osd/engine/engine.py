"""Continuous batching: one thread that admits, drafts, verifies, commits and swaps drafters."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osd.capture.trace import Trace
from osd.config import Settings
from osd.drafters.base import Drafter
from osd.engine import round as rounds
from osd.engine.calibration import forward_seconds
from osd.engine.counters import DecodeSeconds, EngineCounters, EngineLoad
from osd.engine.lanes import Lanes, LineControl
from osd.engine.piece import Piece
from osd.engine.planner import Planner
from osd.engine.policy import Policy
from osd.engine.request import Request, Update
from osd.engine.routing import Routing
from osd.engine.savings import PlainCost, Savings
from osd.engine.sequence import Sequence, Unrouted
from osd.engine.shapes import Shapes
from osd.engine.slots import Slots
from osd.engine.tracing import TraceBuilder
from osd.metrics import SpeculationCounts
from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel
from osd.speculation.governor import Governor

log = logging.getLogger(__name__)

OnUpdate = Callable[[Update], None]
TraceSink = Callable[[Trace], object]


class Engine:
    """Decodes requests on a target, speculatively when there is a drafter.

    All work is done by one thread. ``submit``, ``cancel``, ``stage`` and the readers may be called from any
    other; ``on_update`` and ``sink`` are called on the engine's thread and must not block.
    """

    def __init__(
        self,
        target: SlotModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        drafter: Drafter | None = None,
        version: int = 0,
        sink: TraceSink | None = None,
    ) -> None:
        """Make an engine; ``version`` is the number of ``drafter``.

        Args:
            target: a model whose slots are all free, tapped at the layers that ``drafter`` reads.
            tokenizer: the target's.
            settings: ``engine``, ``growth``, ``verification``, ``capture`` and ``trainer.samples`` are read.
            drafter: what to speculate with; None decodes plainly.
            version: of the drafter.
            sink: takes the traces of requests that allow it.
        """
        self.target, self.tokenizer, self.settings, self._sink = target, tokenizer, settings, sink
        self._policy = Policy.of(settings.growth, settings.verification)
        self._planner = Planner(self._policy, target.context)
        self._version = version
        self._speculation = True
        self._savings = Savings(PlainCost({}))
        self._changed = threading.Condition()
        self.lanes: Lanes | None = None
        self._routing: Routing | None = None
        if drafter is not None:
            self.lanes = Lanes(drafter, settings.domain, version, settings.engine, self._changed, target.device)
            if target.taps:
                self._routing = Routing(self.lanes, target)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._slots = Slots(target, settings.engine)
        self._cancelled: set[str] = set()
        self._counters = EngineCounters()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="osd-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; requests that are not finished end as cancelled."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: Request, on_update: OnUpdate) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, or it and ``max_tokens`` do not fit the context.
        """
        prompt, context = len(request.prompt_ids), self.settings.engine.context
        if prompt < 1 or request.max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and max_tokens of at least 1")
        if prompt + request.max_tokens > context:
            raise ValueError(
                f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}, together at most {context}"
            )
        domain = request.domain or self.settings.domain
        sequence = Sequence(request, request.policy or self._policy, on_update, self.tokenizer, domain)
        with self._changed:
            if self._stopping:
                raise ValueError("the engine is stopping")
            self._counters.requests += 1
            self._waiting.append(sequence)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request within a round; unknown ids are ignored."""
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def line(self, domain: str) -> LineControl:
        """The drafters of a domain that has a line.

        Raises:
            ValueError: the engine decodes without a drafter.
        """
        return LineControl(self._drafting(), domain)

    def stage(self, version: int, weights: dict[str, Tensor]) -> None:
        """Check and lay out another version's weights for the own domain, to be swapped in between two rounds.

        Raises:
            DrafterError: the weights do not fit; the running version stays.
        """
        lanes = self._drafting()
        lanes.stage(lanes.domain, version, weights)

    @property
    def drafter_version(self) -> int:
        """The own domain's stable version."""
        return self._version if self.lanes is None else self.lanes.lines[self.lanes.domain].stable.version

    @property
    def canary_version(self) -> int | None:
        """The version that drafts for a share of the own domain's new requests, None for none."""
        return None if self.lanes is None else LineControl(self.lanes, self.lanes.domain).canary_version

    def set_speculation(self, enabled: bool) -> None:
        """Speculate from the next round on, or decode plainly."""
        self._speculation = enabled

    def check_health(self) -> None:
        """Raise RuntimeError unless the thread decodes."""
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the engine's thread does not run")

    def load(self) -> EngineLoad:
        """How many requests run and wait."""
        with self._changed:
            return EngineLoad(len(self._running), len(self._waiting))

    def counters(self) -> EngineCounters:
        """A copy of the counts so far."""
        with self._changed:
            return copy.deepcopy(self._counters)

    @property
    def _reads_hidden(self) -> bool:
        return self.lanes is not None and self.lanes.reads_hidden

    def _drafting(self) -> Lanes:
        if self.lanes is None:
            raise ValueError("this engine decodes without a drafter")
        return self.lanes

    def _run(self) -> None:
        several_cores(self.settings.engine.threads)
        if self.lanes is not None:
            nodes = self._policy.growth.max_nodes
            seconds = forward_seconds(self.target, self.settings.engine.slots * (1 + nodes))
            self._savings = Savings(PlainCost(seconds))
            self._planner.shapes = Shapes(seconds)
            if self.settings.growth.governed:
                self._planner.governor = Governor(nodes, seconds)
        while True:
            with self._changed:
                idle = not (self._waiting or self._running or self._stopping or (self.lanes and self.lanes.staged))
                if idle:
                    self._cancelled.clear()
                    self._changed.wait()
                if self._stopping:
                    self._end(self._running + list(self._waiting))
                    return
            try:
                with self._changed:
                    self._swap()
                    self._drop_cancelled()
                    self._admit()
                if self._running:
                    self._round()
            except Exception as error:
                log.exception("a round failed")
                self._fail(f"{type(error).__name__} while decoding")

    def _swap(self) -> None:
        if self.lanes is None or not self.lanes.staged:
            return
        start = time.perf_counter()
        lane, (version, staged) = self.lanes.staged.popitem()
        lane.version = version
        with torch.inference_mode():
            lane.session.load(staged)
        self._planner.renew(lane)
        stall = time.perf_counter() - start
        self._counters.swaps += 1
        self._counters.swap_stall_seconds_max = max(self._counters.swap_stall_seconds_max, stall)
        log.info("drafter %d of %s swapped in within %.1f ms", version, lane.domain, stall * 1e3)

    def _drop_cancelled(self) -> None:
        gone = [s for s in [*self._running, *self._waiting] if s.request.id in self._cancelled]
        self._cancelled.clear()
        self._counters.cancelled += len(gone)
        self._end(gone)

    def _end(self, sequences: list[Sequence]) -> None:
        for s in sequences:
            s.finish = "cancelled"
            s.report()
            if s in self._waiting:
                self._waiting.remove(s)
            else:
                self._release(s)

    def _admit(self) -> None:
        while self._waiting and self._slots.free:
            s = self._waiting.popleft()
            self._slots.take(s)
            if self.lanes is not None and s.request.speculate:
                if s.request.domain is None and self._routing is not None and self._routing.open:
                    s.unrouted = Unrouted()
                else:
                    s.lane = self.lanes.choose(s.domain, s.request.id)
                    s.lane.open(s.slot, s.tokens[0])
            if self._sink is not None and s.request.capture and self.settings.capture.enabled:
                source = "" if self.lanes is None else self.lanes.source
                s.trace = TraceBuilder(s.request, self.settings.target.source, source, self.settings.capture.segment)
            self._counters.prompt_tokens += len(s.tokens)
            self._running.append(s)
            self._cached(s, 0)

    def _cached(self, s: Sequence, start: int) -> None:
        """Tell whom it concerns that the prompt from ``start`` to where ``s`` is did not have to be read."""
        if s.fed > start:
            states = self._slots.states(s.slot, start, s.fed)
            rounds.hand_on(s, s.tokens[start + 1 : s.fed + 1], states, self._reads_hidden)
            s.cached += s.fed - start
            with self._changed:
                self._counters.cached_tokens += s.fed - start

    def _release(self, s: Sequence) -> None:
        self._running.remove(s)
        self._slots.give_back(s.slot)
        if s.lane is not None:
            s.lane.close(s.slot)

    def _round(self) -> None:
        start = time.perf_counter()
        pieces = self._pieces()
        if self._speculation:
            self._planner.plan(pieces, len(self._running))
        outcome = rounds.run(self.target, pieces)
        own_samples = self.settings.trainer.samples != "teacher"
        report = rounds.commit(
            outcome, self._slots, self.target.eos_ids, self.settings.capture.top_k, self._reads_hidden, own_samples
        )
        with self._changed:
            self._counters.forwards += 1
            for drawn in report:
                self._counters.completion_tokens += drawn.tokens
                if drawn.drafted:
                    drafted_by = self._drafted_by(drawn.sequence)
                    of_version = self._counters.by_version.setdefault(drafted_by, SpeculationCounts())
                    source = self.lanes.source if self.lanes else ""
                    for counts in (drawn.sequence.counts, of_version):
                        counts.count({source: drawn.drafted}, [source] * drawn.accepted)
        for drawn in report:
            s = drawn.sequence
            s.limit = s.policy.next_limit(s.limit, drawn.drafted, len(drawn.path))
            s.report()
            self._emit(s)
            if s.finish:
                if self._routing is not None and self._speculation:
                    self._routing.ended(s)
                with self._changed:
                    self._release(s)
            elif s.unrouted is not None and self._routing is not None:
                with self._changed:
                    self._routing.route(s)
        seconds = time.perf_counter() - start
        with self._changed:
            self._counters.busy_seconds += seconds
            self._counters.token_seconds += seconds * len(report)
            for version, added in self._savings.of_round(outcome, report, seconds).items():
                self._counters.seconds_by_version.setdefault(version, DecodeSeconds()).add(added)
        self._planner.learn(outcome, report, seconds)

    def _pieces(self) -> list[Piece]:
        """What each sequence feeds: its last token, or the next part of its prompt as far as the chunk reaches.

        With the prefix cache, what several have to read is read by one, such as for the ``n`` answers that one client
        asked for; the others wait for it.
        """
        budget = self.settings.engine.prefill_chunk
        pieces, reading = [], []
        for s in self._running:
            if not s.decoding:
                start = s.fed
                self._slots.catch_up(s)
                self._cached(s, start)
            if s.decoding:
                pieces.append(Piece(s, s.fed, 1))
            elif budget > 0 and not any(piece.reads_for(s) for piece in reading):
                count = min(budget, len(s.tokens) - s.fed)
                budget -= count
                pieces.append(Piece(s, s.fed, count))
                if self.settings.engine.prefix_cache:
                    reading.append(pieces[-1])
        return pieces

    def _emit(self, s: Sequence) -> None:
        while s.trace is not None and self._sink is not None and (s.finish or s.trace.full()):
            trace = s.trace.build(s.domain, *self._drafted_by(s))
            if trace is None:
                return
            try:
                self._sink(trace)
            except Exception:  # what cannot be captured costs nobody an answer
                log.exception("the trace of request %s is lost", s.request.id)
                s.trace = None

    def _drafted_by(self, s: Sequence) -> tuple[str, int]:
        """Domain and version of the drafter."""
        if s.lane is None:
            return self.settings.domain, self.drafter_version
        return s.lane.domain, s.lane.version

    def _fail(self, message: str) -> None:
        with self._changed:
            self._counters.failed += len(self._running)
            for s in list(self._running):
                s.fail(message)
                self._slots.forget(s.slot)
                self._release(s)
