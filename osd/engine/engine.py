"""Engine: it decodes requests, and its drafters can change while it runs."""

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
from osd.engine.grammar import GrammarCompiler
from osd.engine.loop import DecodeLoop
from osd.engine.policy import Policy
from osd.engine.pool import DomainHandle, DrafterPool
from osd.engine.request import Request, Update
from osd.engine.sequence import SequenceState
from osd.engine.tracing import StatesWeight, TraceSink, keep_all_states
from osd.runtime.model import SlotModel

OnUpdate = Callable[[Update], None]


class Engine:
    """Decoder of requests on a target, speculative if there is a drafter.

    One thread does all the work. Any other thread may call these methods. ``on_update``, ``sink`` and
    ``states_weight`` are called on the engine's thread and must not block.
    """

    def __init__(
        self,
        target: SlotModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Settings,
        drafter: Drafter | None = None,
        version: int = 0,
        sink: TraceSink | None = None,
        states_weight: StatesWeight = keep_all_states,
    ) -> None:
        """Make an engine on a target whose slots are all free, tapped at the layers that ``drafter`` reads.

        ``drafter`` is the default drafter in its ``version``; None decodes plainly. ``sink`` receives the traces of
        requests that allow capture, with hidden states by ``states_weight``. Of the settings ``engine``, ``domain``,
        ``growth``, ``verification``, ``economy``, ``recall``, ``capture`` and ``trainer.samples`` are read.
        """
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self._policy = Policy.of(settings.growth, settings.verification)
        self._version = version
        eos_id: Any = tokenizer.eos_token_id
        self._eos_ids = frozenset(() if eos_id is None else (eos_id,))  # may be missing in a chat model's configuration
        self.grammars = GrammarCompiler(tokenizer, target.vocab_size, target.eos_ids | self._eos_ids)
        self.loop = DecodeLoop(target, settings, self._policy, drafter, version, sink, states_weight)
        self._changed = self.loop.changed
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread = threading.Thread(target=self.loop.run, name="osd-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the engine's thread and wait for its end; requests that have not finished end as cancelled."""
        with self._changed:
            self.loop.stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.grammars.close()

    def submit(self, request: Request, on_update: OnUpdate) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt is empty, prompt and ``max_tokens`` exceed the context, or the engine is stopping.
        """
        _check_length(request, self.target.context)
        domain = in_tenant(request.tenant, request.domain or self.settings.domain)
        policy, eos_ids = request.policy or self._policy, self.target.eos_ids | self._eos_ids
        sequence = SequenceState(request, policy, on_update, self.tokenizer, domain, eos_ids)
        with self._changed:
            if self.loop.stopping:
                raise ValueError("the engine is stopping")
            self.loop.counters.requests += 1
            self.loop.scheduler.add(sequence)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request within one decoding step; unknown ids are ignored."""
        with self._changed:
            self.loop.cancelled.add(request_id)
            self._changed.notify_all()

    @property
    def pool(self) -> DrafterPool | None:
        """Drafters of all domains; None for plain decoding."""
        return self.loop.pool

    def drafters(self, domain: str) -> DomainHandle:
        """Return the drafters of a domain.

        Raises:
            ValueError: the engine decodes without a drafter.
        """
        if self.pool is None:
            raise ValueError("this engine decodes without a drafter")
        return DomainHandle(self.pool, domain)

    def stage(self, version: int, weights: dict[str, Tensor]) -> None:
        """Check the weights of another version for the default domain, and swap them in before the next step.

        Raises:
            DrafterError: the weights do not fit; the running version stays.
        """
        self.drafters(self.settings.domain).stage(version, weights)

    @property
    def drafter_version(self) -> int:
        """Stable version of the default domain."""
        return self._version if self.pool is None else self.pool.default.version

    @property
    def canary_version(self) -> int | None:
        """Version of the default domain's canary; None without a canary."""
        return None if self.pool is None else self.drafters(self.settings.domain).canary_version

    def set_speculation(self, enabled: bool) -> None:
        """Turn speculation on or off from the next step on."""
        self.loop.speculate = enabled

    def check_health(self) -> None:
        """Raise RuntimeError with the reason unless the engine decodes; never waits for the engine."""
        self.loop.health.check()
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the engine's thread does not run")
        self.target.check()

    def wait_for_request(self, seconds: float) -> None:
        """Wait until another request arrives, at most ``seconds``; other changes may end the wait too."""
        with self._changed:
            self._changed.wait(seconds)

    def load(self) -> EngineLoad:
        """Return the numbers of running and waiting requests."""
        with self._changed:
            scheduler = self.loop.scheduler
            return EngineLoad(len(scheduler.running), len(scheduler.waiting), scheduler.memory)

    def counters(self) -> EngineCounters:
        """Return a copy of the counts; a request may receive its last update before its last step is counted."""
        with self._changed:
            return self.loop.counters.copy()

    @property
    def measured(self) -> Measured | None:
        """Speed-up of drafting as measured by the last trial; None if it is not measured."""
        switchback = self.loop.planner.switchback
        return None if switchback is None or self.pool is None else switchback.measured

    @property
    def comparisons(self) -> dict[str, tuple[Comparison, ...]]:
        """Measured effects of a canary, or of the stable version over references, by domain."""
        return {} if self.pool is None else self.pool.comparisons()

    @property
    def is_idle(self) -> bool:
        """Whether there is no work, and all past work is counted."""
        with self._changed:
            return self.loop.health.is_idle and not self.loop.scheduler.sequences()


def _check_length(request: Request, context: int) -> None:
    prompt = len(request.prompt_ids)
    if prompt < 1 or request.max_tokens < 1:
        raise ValueError("a request needs at least one prompt token and max_tokens of at least 1")
    if prompt + request.max_tokens > context:
        raise ValueError(
            f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}: "
            f"together they exceed the context of {context} tokens"
        )
