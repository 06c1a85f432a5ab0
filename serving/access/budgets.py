"""Rate limits and token quotas of keys: checked when a request arrives, charged while tokens are produced."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from serving.access.keys import Key
from serving.access.windows import KeyUsage, Window, Windows
from serving.http.errors import ApiError

_CHARGE_SECONDS = 0.2


class Budgets:
    """Admission of requests and charging of tokens against the limits of keys.

    Use it from a single event loop. Counting runs in threads, so the loop never waits for Redis.
    """

    def __init__(self, redis_url: str | None) -> None:
        """Count over all replicas that share ``redis_url``; None counts in this process only."""
        self._windows = Windows(redis_url)
        self._counting = ThreadPoolExecutor(4, thread_name_prefix="limits")
        self._uncharged: Counter[str] = Counter()
        self._charging: asyncio.Task[None] | None = None

    async def admit(self, key: Key) -> dict[str, str]:
        """Count a request of ``key`` and return the rate limit headers of its response.

        Raises:
            ApiError: status 429 with the same headers and Retry-After, when a limit of the key is reached.
        """
        # Charge pending tokens first. Otherwise a second request is admitted before the first one is charged.
        owed = self._uncharged.pop(key.name, 0)
        usage = await asyncio.get_running_loop().run_in_executor(self._counting, self._admit, key, owed)
        headers = _headers(usage)
        if usage.admitted:
            return headers
        raise _refusal(usage, headers)

    def charge(self, key: Key | None, tokens: int) -> None:
        """Charge ``tokens`` to ``key``. Charges are collected and written within 0.2 seconds."""
        if key is None or not (key.limits.tokens_per_minute or key.limits.tokens_per_day):
            return
        self._uncharged[key.name] += tokens
        if self._charging is None or self._charging.done():
            self._charging = asyncio.get_running_loop().create_task(self._charge_pending())

    def close(self) -> None:
        """Write the pending charges and close the connections."""
        self._counting.shutdown()
        for name, tokens in self._uncharged.items():
            self._windows.charge(name, tokens)
        self._windows.close()

    async def _charge_pending(self) -> None:
        while self._uncharged:
            await asyncio.sleep(_CHARGE_SECONDS)
            owed, self._uncharged = self._uncharged, Counter()
            for name, tokens in owed.items():
                await asyncio.get_running_loop().run_in_executor(self._counting, self._windows.charge, name, tokens)

    def _admit(self, key: Key, owed: int) -> KeyUsage:
        if owed:
            self._windows.charge(key.name, owed)
        return self._windows.admit(key.name, key.limits)


def _headers(usage: KeyUsage) -> dict[str, str]:
    """Return OpenAI's rate limit headers. Token headers show the minute if it is limited, else the day."""
    headers: dict[str, str] = {}
    for name, window in (("requests", usage.requests), ("tokens", usage.tokens or usage.quota)):
        if window is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(window.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(window.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _format_duration(window.reset)
    return headers


def _refusal(usage: KeyUsage, headers: dict[str, str]) -> ApiError:
    full = usage.quota if _is_full(usage.quota) else usage.tokens if _is_full(usage.tokens) else usage.requests
    assert full is not None  # noqa: S101  a full window is the only reason of a refusal
    wait = max(1, math.ceil(full.wait))
    unit = "requests" if full is usage.requests else "tokens"
    span = "minute" if full is not usage.quota else "day"
    code = "insufficient_quota" if full is usage.quota else "rate_limit_exceeded"
    message = f"This key has used its {full.limit} {unit} a {span}. Try again in {_format_duration(wait)}."
    return ApiError(429, message, kind="rate_limit_error", code=code, headers={**headers, "Retry-After": str(wait)})


def _is_full(window: Window | None) -> bool:
    return window is not None and window.used >= window.limit


def _format_duration(seconds: float) -> str:
    """Return a duration like 1h0m30s, rounded up to whole seconds."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"
