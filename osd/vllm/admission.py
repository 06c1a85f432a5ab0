"""Choice of the requests of a vLLM worker whose traces are captured."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from osd.capture.budget import RecordSampler
from osd.capture.trace import rounded_bytes
from osd.config import DOMAIN
from osd.vllm.consent import CHOICES, DOMAIN_NAME, PLACE, RESPONSE, STORE
from osd.vllm.steps import CapturedRequest, shared

_FIRST_TOKENS = 128  # assumed length of an answer before lengths are known
_FIXED_BYTES = 32  # of a token, without log-probabilities and states
_DOMAINS = 64
_CHATS = ("chatcmpl-", "resp_")


@dataclass(frozen=True)
class RecordSizes:
    """Sizes of the parts of a trace.

    Attributes:
        k: the number of log-probabilities of a token.
        width: the number of states of a token.
        int8: whether states have 8 bits.
    """

    k: int
    width: int
    int8: bool

    def trace(self, prompt: int, tokens: float, has_states: bool) -> int:
        """Return the expected bytes of a trace with ``prompt`` and ``tokens`` tokens."""
        state = (rounded_bytes(1, self.width) if self.int8 else 2 * self.width) if has_states else 0
        return int(tokens * (6 * self.k + _FIXED_BYTES) + (prompt + tokens) * state)


class Admissions:
    """Choice of the requests to capture: consent, kind of request, and a sample within a budget.

    ``admit`` and ``note`` are for one thread; every thread may use ``demand`` and ``set_rate``.

    Attributes:
        skipped: the number of requests without capture, by reason.
        admitted: the number of captured requests.
        domains: the domains of captured requests, at most 64.
    """

    def __init__(
        self,
        domain: str,
        sizes: RecordSizes,
        states_weight: Callable[[str, str], float],
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty choice.

        Args:
            domain: the domain of requests that name none.
            sizes: the sizes of the parts of a trace.
            states_weight: returns the further weight of the states of a request, by domain and request id.
            rate: the bytes of traces per second; None captures every request.
            clock: returns the time in seconds.
        """
        self._domain, self._sizes, self._states_weight = domain, sizes, states_weight
        self._sampler: RecordSampler[None] | None = None if rate is None else RecordSampler(rate, lambda _: 1.0, clock)
        self._lock = threading.Lock()
        self.skipped: Counter[str] = Counter()
        self.admitted = 0
        self.domains = (domain,)
        self._tokens = 0

    @property
    def demand(self) -> float:
        """Bytes per second of all requests that may be captured."""
        with self._lock:
            return 0.0 if self._sampler is None else self._sampler.demand

    def set_rate(self, rate: float) -> None:
        """Set the bytes of traces per second."""
        with self._lock:
            if self._sampler is not None:
                self._sampler.rate = rate

    def note(self, tokens: int) -> None:
        """Count new tokens of captured requests, for the mean length of an answer."""
        self._tokens += tokens

    def admit(self, request: Any) -> CapturedRequest | None:
        """Return the admission of a request of vLLM's scheduler (``NewRequestData``), or None without capture."""
        parameters = request.sampling_params
        extra: dict[str, Any] = getattr(parameters, "extra_args", None) or {}
        domain = extra.get(DOMAIN_NAME) or self._domain
        if reason := _reason(request, extra, domain):
            self.skipped[reason] += 1
            return None
        request_id = _request_id(request.req_id, extra)
        prompt, computed = request.prompt_token_ids, int(request.num_computed_tokens)
        states_weight = self._states_weight(domain, request_id)
        mean = (_FIRST_TOKENS + self._tokens) / (1 + self.admitted)
        tokens = min(parameters.max_tokens or 1, mean)
        weight = self._weight(request_id, self._sizes.trace(len(prompt) - computed, tokens, states_weight > 0))
        if weight is None:
            self.skipped["budget"] += 1
            return None
        self.admitted += 1
        if domain not in self.domains and len(self.domains) < _DOMAINS:
            self.domains = (*self.domains, domain)
        return CapturedRequest(
            request_id=request_id,
            key=request.req_id,
            prompt_ids=shared(np.array(prompt, np.int32)),
            computed=computed,
            temperature=float(parameters.temperature),
            top_k=max(int(parameters.top_k), 0),
            top_p=float(parameters.top_p),
            stop_ids=sorted(_stop_ids(parameters)),
            max_tokens=int(parameters.max_tokens or 1),
            completes=not request_id.startswith(_CHATS),
            domain=domain,
            weight=weight,
            states_weight=states_weight,
        )

    def _weight(self, request_id: str, size: int) -> float | None:
        with self._lock:
            return 1.0 if self._sampler is None else self._sampler.weight(None, request_id, size)


def _reason(request: Any, extra: dict[str, Any], domain: str) -> str:
    """Return the reason to skip a request, "" if it may be captured."""
    if request.sampling_params is None:
        return "pooling"
    if extra.get(STORE) is not True:
        return "store"
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "multimodal"
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return "embeddings"
    if not re.fullmatch(DOMAIN, domain):
        return "domain"
    return ""


def _request_id(key: str, extra: dict[str, Any]) -> str:
    """Return the id of a choice of a response, ``RESPONSE-NUMBER`` as in our service."""
    number = int(extra.get(PLACE, 0))
    if extra.get(CHOICES, 1) > 1:
        number += int(key.partition("_")[0])  # vLLM begins the key of a choice with its number
    return f"{extra.get(RESPONSE, key)}-{number}"


def _stop_ids(parameters: Any) -> set[int]:
    """Return the tokens at which vLLM ends an answer; ``eos_token_id`` is None with ``ignore_eos``."""
    end = parameters.eos_token_id
    return {*(parameters.stop_token_ids or ()), *(() if end is None else (end,))}
