"""Client for chat completions of an OpenAI-compatible endpoint, with retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from osd.addresses import uses_proxies
from osd.analysis.refusals import EndpointError
from osd.nesting import parse_json

_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_SHOWN = 200  # characters of an error message


@dataclass(frozen=True)
class Patience:
    """Retry policy of a request; times are in seconds.

    Attributes:
        attempts: largest number of attempts after temporary failures.
        wait: wait after the first failure; doubled after each further failure, unless Retry-After sets it.
        longest_wait: limit on each wait.
        deadline: time limit over all attempts.
    """

    attempts: int = 5
    wait: float = 0.5
    longest_wait: float = 20.0
    deadline: float = 180.0


@dataclass(frozen=True)
class Endpoint:
    """OpenAI-compatible endpoint.

    Attributes:
        name: name in error messages.
        url: address, with or without ``/v1``.
        key: API key; None without a key.
        together: largest number of concurrent requests.
        patience: retry policy.
    """

    name: str
    url: str
    key: str | None = None
    together: int = 8
    patience: Patience = Patience()

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send chat requests concurrently and return the chat completions in order.

        Args:
            bodies: bodies for ``/v1/chat/completions``, without ``stream``.

        Raises:
            EndpointError: a request failed or was not answered in time; the other requests are cancelled.
        """
        return asyncio.run(self._ask(bodies))

    async def _ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        free = asyncio.Semaphore(self.together)

        async def send(client: httpx2.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
            async with free:
                return await self._send_with_retries(client, body)

        try:
            timeout = httpx2.Timeout(self.patience.deadline, connect=10)
            async with (
                httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=uses_proxies(self.url)) as client,
                asyncio.TaskGroup() as group,
            ):
                tasks = [group.create_task(send(client, body)) for body in bodies]
        except* EndpointError as failures:
            failed = failures.exceptions[0]
        else:
            return [task.result() for task in tasks]
        raise EndpointError(str(failed))

    async def _send_with_retries(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
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
                        if response.status_code not in _RETRIED:
                            raise self._failed(problem)
                        retry_after = response.headers.get("retry-after", "")
                        wait = float(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else wait
                    if attempt + 1 < patience.attempts:
                        await asyncio.sleep(min(wait, patience.longest_wait))
        except TimeoutError:
            raise self._failed(f"no answer within {patience.deadline:g} s{problem and f', last {problem}'}") from None
        raise self._failed(f"{patience.attempts} attempts failed, the last with {problem}")

    def _completion(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            completion = parse_json(response.content)
            if isinstance(completion["choices"][0]["message"]["content"], str | None):
                return completion
        except (ValueError, LookupError, TypeError):
            pass
        raise self._failed("an answer is not in OpenAI's format")

    def _failed(self, problem: str) -> EndpointError:
        return EndpointError(f"{self.name} at {self.url} does not answer: {problem}")


def text_of(completion: Mapping[str, Any]) -> str | None:
    """Return the text of the first choice."""
    return completion["choices"][0]["message"]["content"]


def _reason(response: httpx2.Response) -> str:
    try:
        return str(parse_json(response.content)["error"]["message"])[:_SHOWN]
    except (ValueError, LookupError, TypeError):
        return json.dumps(response.text[:_SHOWN])
