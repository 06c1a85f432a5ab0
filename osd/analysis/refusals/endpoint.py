"""Chat completions of an OpenAI-compatible endpoint, asked for with patience."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from osd.analysis.refusals import RefusalsError

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_TOLD = 200  # characters of a refusal


@dataclass(frozen=True)
class Patience:
    """How long an answer is waited for, in seconds.

    A request that fails in a way that may pass is sent again, up to ``attempts`` times, after ``wait``, twice of it and
    so on, or as the endpoint asks by Retry-After, ``longest_wait`` at most. ``deadline`` holds for all of it.
    """

    attempts: int = 5
    wait: float = 0.5
    longest_wait: float = 20.0
    deadline: float = 180.0


@dataclass(frozen=True)
class Endpoint:
    """Whose address is ``url``, with or without ``/v1``; ``name`` is what it is called in sentences."""

    name: str
    url: str
    key: str | None = None
    together: int = 8
    patience: Patience = Patience()

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send chat requests, some at a time, and give the chat completions in their order.

        Args:
            bodies: as OpenAI's ``/v1/chat/completions`` takes them, without ``stream``.

        Raises:
            RefusalsError: one of them was refused, or not answered in time; the others are given up.
        """
        return asyncio.run(self._ask(bodies))

    async def _ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        free = asyncio.Semaphore(self.together)

        async def one(client: httpx2.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
            async with free:
                return await self._patiently(client, body)

        try:
            timeout = httpx2.Timeout(self.patience.deadline, connect=10)
            async with (
                httpx2.AsyncClient(headers=headers, timeout=timeout) as client,
                asyncio.TaskGroup() as group,
            ):
                tasks = [group.create_task(one(client, body)) for body in bodies]
        except* RefusalsError as failures:
            failed = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise RefusalsError(str(failed))

    async def _patiently(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
        patience, problem = self.patience, ""
        address = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        try:
            async with asyncio.timeout(patience.deadline):
                for attempt in range(patience.attempts):
                    wait = patience.wait * 2**attempt
                    try:
                        response = await client.post(address, json=body)
                    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
                        raise self._failed(str(error)) from None
                    except httpx2.HTTPError as error:
                        problem = str(error) or type(error).__name__
                    else:
                        if response.status_code == 200:
                            return self._completion(response)
                        problem = f"HTTP {response.status_code}: {_reason(response)}"
                        if response.status_code not in _AGAIN:
                            raise self._failed(problem)
                        asked = response.headers.get("retry-after", "")
                        wait = float(asked) if asked.isdecimal() and len(asked) < 6 else wait
                    if attempt + 1 < patience.attempts:
                        await asyncio.sleep(min(wait, patience.longest_wait))
        except TimeoutError:
            raise self._failed(f"no answer within {patience.deadline:g} s{problem and f', last {problem}'}") from None
        raise self._failed(f"{patience.attempts} attempts failed, the last with {problem}")

    def _completion(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            completion = response.json()
            if isinstance(completion["choices"][0]["message"]["content"], str | None):
                return completion
        except (ValueError, LookupError, TypeError):
            pass
        raise self._failed("an answer is not what OpenAI's protocol says")

    def _failed(self, problem: str) -> RefusalsError:
        return RefusalsError(f"{self.name} at {self.url} does not answer: {problem}")


def text_of(completion: Mapping[str, Any]) -> str | None:
    """What the first choice says."""
    return completion["choices"][0]["message"]["content"]


def _reason(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:_TOLD]
    except (ValueError, LookupError, TypeError):
        return json.dumps(response.text[:_TOLD])
