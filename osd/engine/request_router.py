"""Routing of requests without a domain to drafters, by their prompts and the speed of past requests."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from osd.config import in_tenant, tenant_of
from osd.engine.pool import DrafterPool
from osd.engine.sequence import RoutingResult, SequenceState
from osd.routing.router import Outcome, Router
from osd.runtime.model import SlotModel

_MAX_INCOMING = 16  # outcomes to learn from before a prompt is routed; takes a few milliseconds
_MAX_OUTGOING = 256
_MAX_WAITING = 512


class RequestRouter:
    """Router of sequences whose prompts have been read, and its measurements. Only the engine's thread calls it.

    The embedding of a prompt is the mean over its tokens of the hidden states of one tapped layer, the nearest to the
    middle. The first token is left out: attention makes its state far larger than all others. Each tenant has its own
    router.

    Attributes:
        routers: by tenant.
        outgoing: outcomes of requests that may be learned from, for other replicas; another thread removes them.
        incoming: the newest outcomes of other replicas; another thread adds them.
    """

    def __init__(self, pool: DrafterPool, target: SlotModel) -> None:
        """Route among the domains of ``pool`` by the states of ``target``, which must have taps."""
        self._pool, self.routers = pool, {"": Router(pool.domain)}
        self.outgoing: deque[Outcome] = deque(maxlen=_MAX_OUTGOING)
        self.incoming: deque[Outcome] = deque(maxlen=_MAX_WAITING)
        self._dimensions = target.hidden_size
        middle = min(range(len(target.taps)), key=lambda at: abs(target.taps[at] - len(target.layers) // 2))
        start = middle * target.hidden_size
        self._layer = slice(start, start + target.hidden_size)

    def has_choice(self, tenant: str) -> bool:
        """Return whether there is more than one domain to choose from for a tenant, "" for none."""
        return len(self._domains(tenant)) > 1

    @torch.inference_mode()
    def route(self, s: SequenceState) -> None:
        """Choose the drafter of a sequence whose prompt has been read, and pass it the tokens and states so far."""
        unrouted, s.unrouted = s.unrouted, None
        assert unrouted is not None  # noqa: S101
        states = torch.cat(unrouted.states)
        prompt, tenant = len(s.request.prompt_ids), s.request.tenant
        self._learn_incoming()
        embedding = states[min(1, prompt - 1) : prompt, self._layer].float().mean(0).cpu().numpy()
        if np.isfinite(embedding).all():
            pick = self._router(tenant).pick(embedding, self._domains(tenant))
            s.domain, drafters = pick.domain, self._pool.choose(pick.drafter)
            s.routed = RoutingResult(pick, time.perf_counter(), len(s.tokens))
        else:
            drafters = self._pool.choose(s.domain)
        s.start_drafting(drafters.stable)
        drafters.stable.commit(s.slot, unrouted.tokens, states)
        if drafters.alternate is not None:
            s.join_comparison(drafters.alternate, states)
        drafter = s.recorded or drafters.stable
        if s.trace is not None and s.learner is not None and s.learner.needs != drafter.needs:
            s.trace.forget_states()
            s.trace.feed(drafter.hidden(states))
        s.learner = drafter

    def observe_end(self, s: SequenceState) -> None:
        """Learn the speed of a sequence that has ended by itself."""
        if s.routed is None or s.preempted:  # the wait for a slot is not a property of the drafter
            return
        if s.finish in ("stop", "length") and s.request.policy is None and s.request.is_exact:
            seconds = time.perf_counter() - s.routed.decided_at
            pick, request = s.routed.pick, s.request
            gain = self._router(request.tenant).learn(pick, len(s.tokens) - s.routed.tokens, seconds)
            if gain is not None and request.capture:
                self.outgoing.append(Outcome.of(request.id, request.tenant, pick.drafter, gain, pick.embedding))

    def _learn_incoming(self) -> None:
        for _ in range(min(len(self.incoming), _MAX_INCOMING)):
            outcome = self.incoming.popleft()
            states = outcome.states()
            # The stream may have outcomes of another target, which do not apply.
            if len(states) == self._dimensions and np.isfinite(states).all():
                self._router(outcome.tenant).hear(states, outcome.drafter, outcome.gain)

    def _domains(self, tenant: str) -> list[str]:
        """Return the default domain of a tenant, even without drafters, and its other domains with drafters."""
        default = in_tenant(tenant, self._pool.domain)
        return [
            default,
            *(domain for domain in self._pool.domains if tenant_of(domain) == tenant and domain != default),
        ]

    def _router(self, tenant: str) -> Router:
        if tenant not in self.routers:
            self.routers[tenant] = Router(in_tenant(tenant, self._pool.domain))
        return self.routers[tenant]
