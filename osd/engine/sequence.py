"""State of one sequence, an answer to a request, while it is decoded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osd.drafting.session import Origin, TargetRows
from osd.economy.report import RECALL_ALONE
from osd.engine.completion import CompletionState
from osd.engine.constraint import GrammarConstraint
from osd.engine.lifetime import Lifetime
from osd.engine.policy import Policy
from osd.engine.request import FinishReason, Request, RequestDataError, TokenLogprobs, Update
from osd.engine.text import TextStream
from osd.engine.thinking import Phase
from osd.engine.trace_builder import TraceBuilder
from osd.metrics import SpeculationCounts
from osd.routing.router import Pick
from osd.verification.penalties import WithheldTokens

if TYPE_CHECKING:
    from osd.engine.domain_drafters import ActiveDrafter, AlternateDrafter

log = logging.getLogger(__name__)

_ALL = 1 << 62


@dataclass
class RoutingBuffer:
    """Input for the drafter of a sequence that is not routed yet: tokens, and the states before each."""

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class RoutingResult:
    """Routing decision of a sequence, with its time (``time.perf_counter``) and the number of tokens at that time."""

    pick: Pick
    decided_at: float
    tokens: int


class SequenceState:
    """Tokens, text, drafter and counts of one sequence; the engine has one ``Request`` per sequence.

    Attributes:
        domain: domain of the request; the default domain until the router has chosen one.
        policy: growth policy and verification rule of the sequence.
        constraint: position in the request's grammar; None without a grammar.
        limit: maximum number of draft nodes, set by the growth policy.
        tokens: prompt and generated tokens.
        fed: number of first tokens whose keys and values are in the target's KV slot. While the sequence
            generates, it is the number of all tokens but the last.
        cached: number of prompt tokens that came from another slot or an earlier request.
        number: rank among all sequences of the engine by arrival.
        slot: number of the target's KV slot; -1 without a slot.
        preempted: whether the sequence lost a slot before. It then feeds its tokens again.
        step: number of the decoding step, counted for this sequence.
        last_drafted_step: last value of ``step`` with a draft whose size the planner chose; -1 for none.
        drafter: current drafter; None while the sequence decodes plainly or is not routed. It is either ``stable`` or
            the drafter of ``alternate``. During a comparison of versions both are open for this sequence.
        learner: drafter whose drafts and states the trace records.
        unrouted: tokens and states to give to the drafter once the router has chosen it; None once routed.
        routed: decision of the router; None if there was none.
        finish: finish reason; None while the sequence decodes.
        trace: builder of the trace; None without capture.
        completion: state of the controller, which can stop the text or skip layers; None if the request does not use
            it.
        ended: whether the last update was sent.
        lifetime: times of its events.
        delivered: number of tokens that the drafters have received since the sequence got its slot.
        logprobs: log-probabilities of new tokens, for the next update.
        sources: names of the proposers of new tokens, for the next update.
        thinking: number of first tokens of the answer that are thinking, with its marks.
    """

    def __init__(
        self,
        request: Request,
        policy: Policy,
        on_update: Callable[[Update], None],
        tokenizer: PreTrainedTokenizerBase,
        domain: str,
        eos_ids: frozenset[int],
    ) -> None:
        self.domain = domain
        self.constraint = None if request.grammar is None else GrammarConstraint(request.grammar)
        eos = eos_ids if request.grammar is None else request.grammar.ends
        ignore_eos = request.ignore_eos and request.grammar is None
        self._ends = frozenset(request.stop_ids) | (frozenset() if ignore_eos else eos)
        self.request, self.policy, self._on_update = request, policy, on_update
        self.limit = policy.growth.first_limit
        self.tokens = list(request.prompt_ids)
        self.fed = self.cached = self.number = 0
        self.slot = -1
        self.preempted = False
        self.step = 0
        self.last_drafted_step = -1
        self.drafter: ActiveDrafter | None = None
        self.stable: ActiveDrafter | None = None
        self.alternate: AlternateDrafter | None = None
        self._other_turn = self.last_drafted_step, self.limit  # of the drafter that does not draft now
        self.learner: ActiveDrafter | None = None
        self.unrouted: RoutingBuffer | None = None
        self.routed: RoutingResult | None = None
        self.finish: FinishReason | None = None
        self.counts = SpeculationCounts()
        self.trace: TraceBuilder | None = None
        self.completion = None if request.controller is None else CompletionState(request.controller)
        self.ended = False
        now = time.monotonic()
        self.lifetime = Lifetime(now if request.arrived is None else request.arrived, now)
        self.delivered = self._traced = 0  # _traced: number of tokens whose states the trace has
        prompt = request.prompt_ids if request.completes else ()
        self._text = TextStream(tokenizer, request.stop, prompt, request.thinking)
        self._read = self._reported = len(request.prompt_ids)  # numbers of tokens whose text is read, and that are sent
        self.logprobs: list[TokenLogprobs] = []
        self.sources: list[str] = []
        self.thinking = 0

    @property
    def phase(self) -> Phase:
        """Phase of the next token."""
        return self._text.phase

    @property
    def missed(self) -> int:
        """Estimated number of tokens that the drafter reads before it can draft; 0 if it drafted in the last step."""
        return len(self.tokens) if self.last_drafted_step < 0 else self.step - self.last_drafted_step

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the last are in the target's KV slot.

        False while the target reads the prompt, or reads all tokens again after a preemption.
        """
        return self.fed == len(self.tokens) - 1

    @property
    def generated(self) -> int:
        """Number of tokens in the answer so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def exact_tokens(self) -> int:
        """Number of first tokens whose keys are exactly the target's, so that other sequences may share them."""
        return _ALL if self.request.is_exact else len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.request.max_tokens - self.generated

    @property
    def withheld(self) -> WithheldTokens | None:
        """Tokens that must not be drawn yet, because they would end the answer before ``min_tokens``."""
        early = self.request.min_tokens - self.generated
        return WithheldTokens(self._ends, early) if early > 0 and self._ends else None

    def append(self, tokens: list[int], states: Tensor | None = None) -> list[int]:
        """Append generated tokens up to the end of the request, and return the appended tokens.

        A stop string is found only when ``read_text`` reads the text of the tokens.

        Args:
            tokens: generated.
            states: [n, taps * hidden] of the target; the last rows precede the tokens. The controller judges them.
        """
        if self.completion is None:
            return self._append(tokens)
        exempt = max(max(1, self.request.min_tokens) - self.generated, 0)
        accepted = self.completion.judge(self.drafter, states, len(tokens), exempt)
        kept = self._append(tokens[:accepted])
        if self.finish is None and accepted < len(tokens):
            self.finish = "stop"
        else:
            self.completion.clear_stop()
        return kept

    def _append(self, tokens: list[int]) -> list[int]:
        remaining = self.remaining
        tokens = tokens[:remaining]
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self._ends or self._ends_by_grammar(token):
                self.finish = "stop"
                return tokens[:count]
        if len(tokens) == remaining:
            self.finish = "length"
        return tokens

    def read_text(self) -> None:
        """Decode the text of the tokens appended since the last call; a stop string ends the request.

        The tokens after those with the stop string are dropped.
        """
        prompt, early, thinks = len(self.request.prompt_ids), self.request.min_tokens, self.request.thinking is not None
        while self._read < len(self.tokens):
            token, before = self.tokens[self._read], self.phase if thinks else "answer"
            self._read += 1
            generated = self._read - prompt
            if token not in self._ends and self._text.push(token, generated < early):
                self._text.close()
                del self.tokens[self._read :]
                self.finish = "stop"
                if self.completion is not None:
                    self.completion.clear_stop()
            if thinks and "thinking" in (before, self.phase):
                self.thinking = generated

    def _ends_by_grammar(self, token: int) -> bool:
        """Return whether the text ends before ``token`` or the grammar, if any, allows only an end after it.

        A stop string must end the text before the grammar reads the token, because the grammar can end it by an error.
        """
        if self.constraint is None:
            return False
        self.read_text()
        if self.finish is None:
            self.constraint.advance(token)
        return self.finish is not None or self.constraint.complete

    @property
    def drafters(self) -> list[ActiveDrafter]:
        """Drafters with an open slot for this sequence: the stable drafter, and an alternate drafter if any."""
        both = self.stable, None if self.alternate is None else self.alternate.drafter
        return [drafter for drafter in both if drafter is not None]

    @property
    def recorded(self) -> ActiveDrafter | None:
        """Drafter that a new trace records: the one whose turn it is, but never a reference."""
        return self.stable if self.alternate is not None and self.alternate.reference else self.drafter

    def start_drafting(self, drafter: ActiveDrafter) -> None:
        """Draft with a stable ``drafter`` from now on."""
        self._open(drafter)
        self.drafter = self.stable = drafter  # after the opening: a drafter that failed to open is never closed

    def _open(self, drafter: ActiveDrafter) -> None:
        request = self.request
        above = 0.0 if request.controller is None else request.controller.exit or 0.0
        origin = Origin(request.id, request.client, request.teaches, request.tenant, above, request.prediction)
        drafter.open(self.slot, self.tokens[0], origin)

    def join_comparison(self, alternate: AlternateDrafter, states: Tensor | None) -> None:
        """Let the ``alternate`` draft in turns with the stable drafter; if that is impossible, keep the stable one.

        Requests with a controller never join, because one controller has to judge the whole text.

        Args:
            alternate: of the sequence's domain.
            states: [delivered, taps * hidden] of the target before each token so far; None if they were not kept.
        """
        drafter = alternate.drafter
        if self.request.controller is not None or (self.delivered and states is None and drafter.needs.taps):
            return
        try:
            self._open(drafter)
            self.alternate = alternate
            if self.delivered:
                drafter.commit(self.slot, self.tokens[1 : self.delivered + 1], states)
        except Exception:
            log.exception("request %s cannot alternate with version %d", self.request.id, drafter.version)
            self.leave_comparison()
        self.take_turn()

    def leave_comparison(self) -> None:
        """Draft with the stable drafter only."""
        if self.alternate is None:
            return
        drafter, self.alternate = self.alternate.drafter, None
        self._draft_with(self.stable)
        self._other_turn = -1, self.policy.growth.first_limit
        try:
            drafter.close(self.slot)
        except Exception:  # the next sequence opens the slot again
            log.exception("version %d cannot close request %s", drafter.version, self.request.id)

    def take_turn(self) -> None:
        """Select the drafter whose turn it is."""
        if self.alternate is not None:
            self._draft_with(self.alternate.drafter if self.alternate.drafts else self.stable)

    def _draft_with(self, drafter: ActiveDrafter | None) -> None:
        if drafter is not self.drafter:
            before = self.last_drafted_step, self.limit
            (self.last_drafted_step, self.limit), self._other_turn = self._other_turn, before
            self.drafter = drafter

    def records(self, drafter: ActiveDrafter) -> bool:
        """Return whether the trace records the drafts of ``drafter``: of one version, and of recall where it rests."""
        learner = self.learner
        if learner is None:
            return True
        return learner.domain == drafter.domain and drafter.version in (learner.version, RECALL_ALONE)

    def preempt(self) -> None:
        """Give up slot and drafters until the sequence is admitted again."""
        self.slot, self.fed, self.delivered, self.last_drafted_step = -1, 0, 0, -1
        self.drafter = self.stable = self.alternate = self.unrouted = None
        self._other_turn = -1, self.policy.growth.first_limit
        self.preempted = True

    def deliver(self, tokens: list[int], states: Tensor | None, rows: TargetRows | None = None) -> None:
        """Pass committed tokens to the drafters, or keep them for a later drafter, and their states to the trace.

        Args:
            tokens: committed.
            states: [len(tokens), taps * hidden] of the target before each token; None without taps.
            rows: of the step. Only the current drafter gets them, because both drafters share the memories that learn
                from them.
        """
        if self.unrouted is not None and states is not None:
            self.unrouted.tokens += tokens
            self.unrouted.states.append(states.clone())  # without the rows of other sequences
        for drafter in self.drafters:
            if drafter is self.drafter:
                drafter.commit(self.slot, tokens, states, rows)
            else:  # it keeps the states until its turn; a copy lets the rows of all other sequences be freed
                drafter.commit(self.slot, tokens, None if states is None else states.clone())
        known = max(self._traced - self.delivered, 0)
        self.delivered += len(tokens)
        self._traced = max(self._traced, self.delivered)
        trace, learner = self.trace, self.learner
        if trace is None or not trace.states_weight or learner is None or states is None or known >= len(tokens):
            return
        trace.feed(learner.hidden(states[known:]))

    def report(self) -> None:
        """Send the tokens and the text since the last update, if there are new tokens or the sequence has finished.

        Text that may still change, an incomplete character or the beginning of a stop string, waits for a later update.
        The last update carries the counts.

        Raises:
            RequestDataError: the text cannot be decoded.
        """
        try:
            text = self._text.take(last=self.finish is not None)
        except Exception as error:
            raise RequestDataError from error
        new = tuple(self.tokens[self._reported : self._read])
        self._reported = self._read
        if new or self.finish:
            counts = self.counts if self.finish else None
            logprobs, sources = tuple(self.logprobs), tuple(self.sources)
            self._send(
                Update(self.request.id, new, text, self.finish, counts, None, logprobs, self.cached, sources=sources)
            )
        self.logprobs, self.sources = [], []

    def fail(self, message: str, refusal: str = "") -> None:
        """End the request with an error; see ``Update`` for ``refusal``."""
        self.finish = "error"
        self._send(Update(self.request.id, (), "", "error", self.counts, message, refusal=refusal))

    def _send(self, update: Update) -> None:
        self.ended = update.finish_reason is not None
        if self.ended:
            drafted_by = None if self.drafter is None else (self.drafter.domain, self.drafter.version)
            last = {"lifetime": replace(self.lifetime), "drafted": drafted_by, "thinking_tokens": self.thinking}
            update = replace(update, **last)
            if self.completion is not None:
                update = replace(update, judged=self.completion.judged, skipped=self.completion.skipped)
        try:
            self._on_update(update)
        except Exception:  # a lost receiver ends only its own request
            log.exception("request %s cannot be updated", self.request.id)
            self.finish = self.finish or "cancelled"
