"""What each key may still have: checked when a request comes, charged as its tokens are produced."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from serving.access.keys import Key
from serving.access.windows import Used, Window, Windows
from serving.http.errors import ApiError

_CHARGE_SECONDS = 0.2


class Budgets:
    """Admits requests and charges tokens; used on one event loop, which never waits for what counts."""

    def __init__(self, redis_url: str | None) -> None:
        """Count over all replicas that have the Redis of ``redis_url``."""
        self._windows = Windows(redis_url)
        self._counting = ThreadPoolExecutor(4, thread_name_prefix="limits")
        self._unpaid: Counter[str] = Counter()
        self._paying: asyncio.Task[None] | None = None

    async def admit(self, key: Key) -> dict[str, str]:
        """Count a request; returns the headers that say what is left.

        Raises:
            ApiError: 429 with these headers and Retry-After; a limit of the key is reached.
        """
        # What it owes first: two requests in a row may not both be let in by what neither has paid.
        owed = self._unpaid.pop(key.name, 0)
        used = await asyncio.get_running_loop().run_in_executor(self._counting, self._admit, key, owed)
        headers = _headers(used)
        if used.admitted:
            return headers
        raise _refusal(used, headers)

    def charge(self, key: Key | None, tokens: int) -> None:
        """Charge a key for tokens; soon, and for many rounds together."""
        if key is None or not (key.limits.tokens_per_minute or key.limits.tokens_per_day):
            return
        self._unpaid[key.name] += tokens
        if self._paying is None or self._paying.done():
            self._paying = asyncio.get_running_loop().create_task(self._pay())

    def close(self) -> None:
        """Charge what is left, and close the connections."""
        self._counting.shutdown()
        for name, tokens in self._unpaid.items():
            self._windows.charge(name, tokens)
        self._windows.close()

    async def _pay(self) -> None:
        while self._unpaid:
            await asyncio.sleep(_CHARGE_SECONDS)
            owed, self._unpaid = self._unpaid, Counter()
            for name, tokens in owed.items():
                await asyncio.get_running_loop().run_in_executor(self._counting, self._windows.charge, name, tokens)

    def _admit(self, key: Key, owed: int) -> Used:
        if owed:
            self._windows.charge(key.name, owed)
        return self._windows.admit(key.name, key.limits)


def _headers(used: Used) -> dict[str, str]:
    """OpenAI's: of tokens those of the minute where that is limited, else those of the day."""
    headers: dict[str, str] = {}
    for name, window in (("requests", used.requests), ("tokens", used.tokens or used.quota)):
        if window is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(window.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(window.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _spelled(window.reset)
    return headers


def _refusal(used: Used, headers: dict[str, str]) -> ApiError:
    full = used.quota if _full(used.quota) else used.tokens if _full(used.tokens) else used.requests
    assert full is not None  # noqa: S101  one of them refused it
    wait = max(1, math.ceil(full.wait))
    what = "requests" if full is used.requests else "tokens"
    span = "minute" if full is not used.quota else "day"
    code = "insufficient_quota" if full is used.quota else "rate_limit_exceeded"
    message = f"This key has used its {full.limit} {what} a {span}. Try again in {_spelled(wait)}."
    return ApiError(429, message, kind="rate_limit_error", code=code, headers={**headers, "Retry-After": str(wait)})


def _full(window: Window | None) -> bool:
    return window is not None and window.used >= window.limit


def _spelled(seconds: float) -> str:
    """As in 1h0m30s; never less than there is."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"
