"""The engine: requests go in, tokens come out, and the drafters behind them change while it decodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osd.config import Settings, in_tenant
from osd.drafting.base import Drafter
from osd.economy.report import Comparison, Measured
from osd.engine.counters import EngineCounters, EngineLoad
from osd.engine.grammar import Grammars
from osd.engine.loop import DecodeLoop
from osd.engine.policy import Policy
from osd.engine.pool import DomainHandle, DrafterPool
from osd.engine.request import Request, Update
from osd.engine.sequence import Sequence
from osd.engine.tracing import StatesWanted, TraceSink, all_states
from osd.runtime.model import SlotModel

OnUpdate = Callable[[Update], None]


class Engine:
    """Decodes requests on a target, speculatively when there is a drafter.

    All work is done by one thread. Everything here may be called from any other; ``on_update``, ``sink`` and
    ``states`` are called on the engine's thread and must not block.
    """

    def __init__(
        self,
        target: SlotModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        drafter: Drafter | None = None,
        version: int = 0,
        sink: TraceSink | None = None,
        states: StatesWanted = all_states,
    ) -> None:
        """Make an engine on a target whose slots are all free, tapped at the layers that ``drafter`` reads.

        ``version`` is the number of ``drafter``; without one it decodes plainly. ``sink`` takes the traces of requests
        that allow it, with hidden states where ``states`` wants them. Of the settings ``engine``, ``growth``,
        ``verification``, ``capture`` and ``trainer.samples`` are read.
        """
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self._policy = Policy.of(settings.growth, settings.verification)
        self._version = version
        end: Any = tokenizer.eos_token_id
        self._ends = frozenset(() if end is None else (end,))  # a chat model's, which its configuration may not have
        self.grammars = Grammars(tokenizer, target.vocab_size, target.eos_ids | self._ends)
        self.loop = DecodeLoop(target, settings, self._policy, drafter, version, sink, states)
        self._changed = self.loop.changed
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self.loop.run, name="osd-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; requests that are not finished end as cancelled."""
        with self._changed:
            self.loop.stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.grammars.close()

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
        domain = in_tenant(request.tenant, request.domain or self.settings.domain)
        ends = self.target.eos_ids | self._ends
        sequence = Sequence(request, request.policy or self._policy, on_update, self.tokenizer, domain, ends)
        with self._changed:
            if self.loop.stopping:
                raise ValueError("the engine is stopping")
            self.loop.counters.requests += 1
            self.loop.scheduler.add(sequence)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request within a round; unknown ids are ignored."""
        with self._changed:
            self.loop.cancelled.add(request_id)
            self._changed.notify_all()

    @property
    def pool(self) -> DrafterPool | None:
        """The drafters of every domain, None when it decodes plainly."""
        return self.loop.pool

    def drafters(self, domain: str) -> DomainHandle:
        """The drafters of a domain that has some.

        Raises:
            ValueError: the engine decodes without a drafter.
        """
        if self.pool is None:
            raise ValueError("this engine decodes without a drafter")
        return DomainHandle(self.pool, domain)

    def stage(self, version: int, weights: dict[str, Tensor]) -> None:
        """Check and lay out another version's weights for the own domain, to be swapped in between two rounds.

        Raises:
            DrafterError: the weights do not fit; the running version stays.
        """
        self.drafters(self.settings.domain).stage(version, weights)

    @property
    def drafter_version(self) -> int:
        """The own domain's stable version."""
        return self._version if self.pool is None else self.pool.own.version

    @property
    def canary_version(self) -> int | None:
        """The version that drafts in a share of the own domain's steps, None for none."""
        return None if self.pool is None else self.drafters(self.settings.domain).canary_version

    def set_speculation(self, enabled: bool) -> None:
        """Speculate from the next round on, or decode plainly."""
        self.loop.speculate = enabled

    def check_health(self) -> None:
        """Raise RuntimeError, with one sentence that says why, unless the thread decodes; never waits for it."""
        self.loop.health.check()
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the engine's thread does not run")
        self.target.check()

    def load(self) -> EngineLoad:
        """How many requests run and wait."""
        with self._changed:
            scheduler = self.loop.scheduler
            return EngineLoad(len(scheduler.running), len(scheduler.waiting), scheduler.memory)

    def counters(self) -> EngineCounters:
        """A copy of the counts so far; a request hears of its end before its last round is counted."""
        with self._changed:
            return self.loop.counters.copy()

    @property
    def measured(self) -> Measured | None:
        """The measured speed-up of drafting as of the last trial; None where nothing is measured."""
        switchback = self.loop.planner.switchback
        return None if switchback is None or self.pool is None else switchback.measured

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """By domain the measured effect of the version on trial, against the stable one."""
        return {} if self.pool is None else self.pool.comparisons()

    @property
    def rests(self) -> bool:
        """Whether there is nothing to do, and all that was done is counted."""
        with self._changed:
            return self.loop.health.rests and not self.loop.scheduler.everything()
