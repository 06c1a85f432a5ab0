"""The state of one request while it is decoded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osd.drafting.session import Origin, TargetRows
from osd.engine.completion import Completion
from osd.engine.constraint import Constraint
from osd.engine.lifetime import Lifetime
from osd.engine.policy import Policy
from osd.engine.request import FinishReason, Request, TokenLogprobs, Update
from osd.engine.text import TextStream
from osd.engine.trace_builder import TraceBuilder
from osd.metrics import SpeculationCounts
from osd.routing.router import Pick
from osd.verification.penalties import WithheldTokens

if TYPE_CHECKING:
    from osd.engine.pool import ActiveDrafter, Canary

log = logging.getLogger(__name__)

_ALL = 1 << 62


@dataclass
class Unrouted:
    """What the drafter of a sequence that has none yet will have to read: tokens, and the states before each."""

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Routed:
    """What was decided for a sequence, when, and how many tokens it had then."""

    pick: Pick
    began: float
    tokens: int


class Sequence:
    """Tokens, text and counts of one request; ``slot`` is -1 while it has none.

    ``domain`` is whose request it is, as far as is known. It drafts with ``drafter``, None when it decodes plainly or
    as long as it is ``unrouted``: that is its ``stable`` drafter or, in turns, the drafter of a ``canary``. Both are
    open for it. Its trace is of the drafts of ``learner``, with the states that this reads. ``constraint`` is where
    it stands in its grammar, None without one. ``tokens`` are the
    prompt and what was generated; ``fed`` of them are in the target's KV slot, which is all but the last once the
    prompt is done; ``cached`` of the prompt's were in some slot before. ``ended`` says that its last report was sent.
    ``lifetime`` notes when it came, began and drew its tokens, ``number`` how many came before. It was ``preempted``
    where it had a slot before and lost it: then it feeds again what it has. ``completion`` is the state of what its
    request asks of a controller, None where it asks nothing. ``logprobs`` and ``sources`` of the tokens that were
    appended wait for the next report.
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
        self.constraint = None if request.grammar is None else Constraint(request.grammar)
        own = eos_ids if request.grammar is None else request.grammar.ends
        goes_on = request.ignore_eos and request.grammar is None
        self._ends = frozenset(request.stop_ids) | (frozenset() if goes_on else own)
        self.request, self.policy, self._on_update = request, policy, on_update
        self.limit = policy.growth.first_limit
        self.tokens = list(request.prompt_ids)
        self.fed = self.cached = self.number = 0
        self.slot = -1
        self.preempted = False
        self.step = 0
        self.drafted_in = -1  # the last step with a governed draft
        self.drafter: ActiveDrafter | None = None
        self.stable: ActiveDrafter | None = None
        self.canary: Canary | None = None
        self._resting = self.drafted_in, self.limit  # of the drafter whose turn it is not
        self.learner: ActiveDrafter | None = None
        self.unrouted: Unrouted | None = None
        self.routed: Routed | None = None
        self.finish: FinishReason | None = None
        self.counts = SpeculationCounts()
        self.trace: TraceBuilder | None = None
        self.completion = None if request.completing is None else Completion(request.completing)
        self.ended = False
        now = time.monotonic()
        self.lifetime = Lifetime(now if request.arrived is None else request.arrived, now)
        self.handed = self._told = 0  # tokens handed on since it has its slot, and those that its trace knows
        self._text = TextStream(tokenizer, request.stop, request.prompt_ids if request.completes else ())
        self._new: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.sources: list[str] = []

    @property
    def missed(self) -> int:
        """About how many tokens a drafter would first have to read, were it to draft now; 0 if it drafts all along."""
        return len(self.tokens) if self.drafted_in < 0 else self.step - self.drafted_in

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt but its last token has been fed."""
        return self.fed == len(self.tokens) - 1

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def exact(self) -> int:
        """Of how many first tokens the keys are the target's own, so that others may have them."""
        return _ALL if self.request.is_exact else len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - self.generated

    @property
    def withheld(self) -> WithheldTokens | None:
        """Tokens that would end it too soon."""
        early = self.request.min_tokens - self.generated
        return WithheldTokens(self._ends, early) if early > 0 and self._ends else None

    def append(self, tokens: list[int], states: Tensor | None = None) -> list[int]:
        """Append generated tokens up to the one that ends the request; returns those that were kept.

        The last of ``states`` [n, taps * hidden] are the target's before each token, for a controller that judges them.
        """
        if self.completion is None:
            return self._append(tokens)
        exempt = max(max(1, self.request.min_tokens) - self.generated, 0)
        right = self.completion.judge(self.drafter, states, len(tokens), exempt)
        kept = self._append(tokens[:right])
        if self.finish is None and right < len(tokens):
            self.finish = "stop"
        else:
            self.completion.not_stopped()
        return kept

    def _append(self, tokens: list[int]) -> list[int]:
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self._new.append(token)
            early = self.generated < self.request.min_tokens
            if token in self._ends:
                self.finish = "stop"
            elif self._text.push(token, early):
                self._text.close()
                self.finish = "stop"
            elif self._completes(token):
                self.finish = "stop"
            elif self.remaining == 0:
                self.finish = "length"
            if self.finish:
                return tokens[:count]
        return tokens

    def _completes(self, token: int) -> bool:
        """Whether nothing may follow a token in the grammar, if there is one."""
        if self.constraint is None:
            return False
        self.constraint.advance(token)
        return self.constraint.complete

    @property
    def drafters(self) -> list[ActiveDrafter]:
        """The drafters that are open for it."""
        both = self.stable, None if self.canary is None else self.canary.drafter
        return [drafter for drafter in both if drafter is not None]

    def begin(self, drafter: ActiveDrafter) -> None:
        """Draft with a stable ``drafter`` from now on."""
        self._open(drafter)
        self.drafter = self.stable = drafter  # only now is there something to close

    def _open(self, drafter: ActiveDrafter) -> None:
        request = self.request
        above = 0.0 if request.completing is None else request.completing.exit or 0.0
        origin = Origin(request.id, request.client, request.teaches, request.tenant, above, request.prediction)
        drafter.open(self.slot, self.tokens[0], origin)

    def join(self, canary: Canary, states: Tensor | None) -> None:
        """Take part in the turns of a ``canary``; where that is not possible it stays with its stable drafter.

        A controller that judges the text has to be the same one throughout: such requests take no part.

        Args:
            canary: of its domain.
            states: [handed, taps * hidden] the target's before each token so far; None where they were not kept.
        """
        drafter = canary.drafter
        if self.request.completing is not None or (self.handed and states is None and drafter.needs.taps):
            return
        try:
            self._open(drafter)
            self.canary = canary
            if self.handed:
                drafter.commit(self.slot, self.tokens[1 : self.handed + 1], states)
        except Exception:
            log.exception("request %s takes no part in the turns of version %d", self.request.id, drafter.version)
            self.leave()
        self.take_turn()

    def leave(self) -> None:
        """Take part in no turns any more."""
        if self.canary is None:
            return
        gone, self.canary = self.canary.drafter, None
        self._draft_with(self.stable)
        self._resting = -1, self.policy.growth.first_limit
        try:
            gone.close(self.slot)
        except Exception:  # the next sequence opens the slot again
            log.exception("version %d cannot close request %s", gone.version, self.request.id)

    def take_turn(self) -> None:
        """Draft with the drafter whose turn it is."""
        if self.canary is not None:
            self._draft_with(self.canary.drafter if self.canary.turns.candidate else self.stable)

    def _draft_with(self, drafter: ActiveDrafter | None) -> None:
        if drafter is not self.drafter:
            before = self.drafted_in, self.limit
            (self.drafted_in, self.limit), self._resting = self._resting, before
            self.drafter = drafter

    def traces(self, drafter: ActiveDrafter) -> bool:
        """Whether its trace is of the drafts of ``drafter``: it shows one version only."""
        learner = self.learner
        return learner is None or (learner.domain, learner.version) == (drafter.domain, drafter.version)

    def give_way(self) -> None:
        """Have no slot and no drafter any more, until there are others."""
        self.slot, self.fed, self.handed, self.drafted_in = -1, 0, 0, -1
        self.drafter = self.stable = self.canary = self.unrouted = None
        self._resting = -1, self.policy.growth.first_limit
        self.preempted = True

    def hand_on(self, tokens: list[int], states: Tensor | None, rows: TargetRows | None = None) -> None:
        """Pass committed tokens on to its drafters, or keep them until it has any, and their states to its trace.

        ``states`` [len(tokens), taps * hidden] are the target's before each, None without taps. Only the drafter whose
        turn it is gets the step's ``rows``: the memories that both share must not learn twice.
        """
        if self.unrouted is not None and states is not None:
            self.unrouted.tokens += tokens
            self.unrouted.states.append(states)
        for drafter in self.drafters:
            if drafter is self.drafter:
                drafter.commit(self.slot, tokens, states, rows)
            else:  # it keeps them until its turn: a copy does not hold on to the rows of all other sequences
                drafter.commit(self.slot, tokens, None if states is None else states.clone())
        known = max(self._told - self.handed, 0)
        self.handed += len(tokens)
        self._told = max(self._told, self.handed)
        trace, learner = self.trace, self.learner
        if trace is None or not trace.states_weight or learner is None or states is None or known >= len(tokens):
            return
        trace.feed(learner.hidden(states[known:]))

    def report(self) -> None:
        """Send what is new; the last report carries the counts."""
        text = self._text.take(last=self.finish is not None)
        if self._new or self.finish:
            counts = self.counts if self.finish else None
            logprobs = tuple(self.logprobs)
            new, sources = tuple(self._new), tuple(self.sources)
            self._send(
                Update(self.request.id, new, text, self.finish, counts, None, logprobs, self.cached, sources=sources)
            )
        self._new, self.logprobs, self.sources = [], [], []

    def fail(self, message: str) -> None:
        """End the request with an error."""
        self.finish = "error"
        self._send(Update(self.request.id, (), "", "error", self.counts, message))

    def _send(self, update: Update) -> None:
        self.ended = update.finish_reason is not None
        if self.ended:
            drafted = None if self.drafter is None else (self.drafter.domain, self.drafter.version)
            update = replace(update, lifetime=replace(self.lifetime), drafted=drafted)
            if self.completion is not None:
                update = replace(update, judged=self.completion.judged, skipped=self.completion.skipped)
        try:
            self._on_update(update)
        except Exception:  # a receiver that is gone ends its own request and nobody else's
            log.exception("request %s cannot be updated", self.request.id)
            self.finish = self.finish or "cancelled"
