"""Requests that do not say their domain: where they are sent, and what is learnt from how they do."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from osd.config import in_tenant, tenant_of
from osd.engine.pool import DrafterPool
from osd.engine.sequence import Routed, Sequence
from osd.routing.router import Outcome, Router
from osd.runtime.model import SlotModel

_HEARD_AT_ONCE = 16  # outcomes that are taken in before a prompt is routed: a few milliseconds
_KEPT = 256  # outcomes that wait for whoever tells them


class RequestRouter:
    """Gives a sequence its drafter once its prompt has been read, and the router its measurements; on one thread.

    The prompt's embedding is the mean of the hidden states of one tapped layer, the one nearest to the middle, over its
    tokens. The first token is left out: whatever the text, attention makes its state far larger than all others. Each
    tenant has a router of its own.

    ``told`` are the outcomes of requests that may be learnt from, and ``heard`` those of other replicas: another thread
    takes the ones away and brings the others.
    """

    def __init__(self, pool: DrafterPool, target: SlotModel) -> None:
        """Route among the domains of ``pool`` by the states of ``target``, which has taps."""
        self._pool, self.routers = pool, {"": Router(pool.domain)}
        self.told: deque[Outcome] = deque(maxlen=_KEPT)
        self.heard: deque[Outcome] = deque()
        self._dimensions = target.hidden_size
        middle = min(range(len(target.taps)), key=lambda at: abs(target.taps[at] - len(target.layers) // 2))
        start = middle * target.hidden_size
        self._layer = slice(start, start + target.hidden_size)

    def open(self, tenant: str) -> bool:
        """Whether a tenant, "" for none, has more than one domain to choose from."""
        return len(self._domains(tenant)) > 1

    @torch.inference_mode()
    def route(self, s: Sequence) -> None:
        """Give a sequence whose prompt has been read its drafter, and that all that the sequence has."""
        unrouted, s.unrouted = s.unrouted, None
        assert unrouted is not None  # noqa: S101  nobody else is routed
        states = torch.cat(unrouted.states)
        prompt, tenant = len(s.request.prompt_ids), s.request.tenant
        self._hear()
        embedding = states[min(1, prompt - 1) : prompt, self._layer].float().mean(0).cpu().numpy()
        if np.isfinite(embedding).all():
            pick = self._router(tenant).pick(embedding, self._domains(tenant))
            s.domain, drafters = pick.domain, self._pool.choose(pick.drafter)
            s.routed = Routed(pick, time.perf_counter(), len(s.tokens))
        else:
            drafters = self._pool.choose(s.domain)
        s.begin(drafters.stable)
        drafters.stable.commit(s.slot, unrouted.tokens, states)
        if drafters.canary is not None:
            s.join(drafters.canary, states)
        drafter = s.drafter or drafters.stable
        if s.trace is not None and s.learner is not None and s.learner.needs != drafter.needs:
            s.trace.forget_states()
            s.trace.feed(drafter.hidden(states))
        s.learner = drafter

    def ended(self, s: Sequence) -> None:
        """Learn how fast a sequence was that has ended by itself."""
        if s.routed is None or s.preempted:  # whoever waits for a slot is not slow by its drafter
            return
        if s.finish in ("stop", "length") and s.request.policy is None and s.request.is_exact:
            seconds = time.perf_counter() - s.routed.began
            pick, request = s.routed.pick, s.request
            gain = self._router(request.tenant).learn(pick, len(s.tokens) - s.routed.tokens, seconds)
            if gain is not None and request.capture:
                self.told.append(Outcome.of(request.id, request.tenant, pick.drafter, gain, pick.embedding))

    def _hear(self) -> None:
        for _ in range(min(len(self.heard), _HEARD_AT_ONCE)):
            outcome = self.heard.popleft()
            states = outcome.states()
            # What is on the stream may be of another target: it says nothing here.
            if len(states) == self._dimensions and np.isfinite(states).all():
                self._router(outcome.tenant).hear(states, outcome.drafter, outcome.gain)

    def _domains(self, tenant: str) -> list[str]:
        """A tenant's usual domain, which others may serve, and its others that have drafters."""
        usual = in_tenant(tenant, self._pool.domain)
        return [usual, *(domain for domain in self._pool.domains if tenant_of(domain) == tenant and domain != usual)]

    def _router(self, tenant: str) -> Router:
        if tenant not in self.routers:
            self.routers[tenant] = Router(in_tenant(tenant, self._pool.domain))
        return self.routers[tenant]
