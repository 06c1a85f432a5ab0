"""Traffic for a vLLM with capture: requests of every kind, their answers, and the traces in Redis."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
import redis

from osd.capture.trace import FIELD, Trace, decode

_ANSWER_SECONDS = 900.0


@dataclass
class Answer:
    """Answer to one choice of a request.

    Attributes:
        body: the body of the request.
        prompt: the tokens of the prompt.
        tokens: the tokens of the answer.
    """

    body: dict[str, Any]
    prompt: list[int]
    tokens: list[int]


@dataclass
class Traffic:
    """Client of a server.

    Attributes:
        url: the address of the server.
        length: the number of tokens of a long answer.
        answers: the answers by the id of their trace.
    """

    url: str
    length: int
    answers: dict[str, Answer] = field(default_factory=dict)

    def complete(self, prompt: list[int], **fields: Any) -> list[list[int]]:
        """Send a completion of token ids, and return the tokens of all choices."""
        return self.complete_all([prompt], **fields)

    def complete_all(self, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
        """Send a completion with several prompts, and return the tokens of all choices in their order."""
        body = {"model": "target", "prompt": prompts, "max_tokens": self.length, "temperature": 0, **fields}
        answer = self._post("/v1/completions", body | {"return_token_ids": True})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        for number, choice in enumerate(choices):
            prompt = prompts[number // body.get("n", 1)]
            self.answers[f"{answer['id']}-{number}"] = Answer(body, prompt, choice["token_ids"])
        return [choice["token_ids"] for choice in choices]

    def chat(self, text: str, **fields: Any) -> str:
        """Send a chat, and return the id of the response."""
        body = {"model": "target", "messages": [{"role": "user", "content": text}], "max_tokens": self.length}
        return self._post("/v1/chat/completions", body | fields)["id"]

    def abandon(self, prompt: list[int]) -> None:
        """Send a streamed completion, and leave after its first event."""
        body = {"model": "target", "prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=body, timeout=_ANSWER_SECONDS) as response:
            next(response.iter_lines())

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        # Without verify=False, each call reads all certificates, which takes longer than a small answer.
        answer = httpx2.post(self.url + path, json=body, timeout=_ANSWER_SECONDS, verify=False)
        assert answer.status_code == 200, answer.text
        return answer.json()


def random_prompts(seed: int) -> list[list[int]]:
    """Return prompts of 5 to 130 bytes; every second begins with the same 70 bytes."""
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret
    prefix = [draw.randrange(256) for _ in range(70)]
    return [
        (prefix if number % 2 else []) + [draw.randrange(256) for _ in range(draw.randrange(5, 60))]
        for number in range(8)
    ]


def at_once(calls: list[Any]) -> list[Any]:
    """Call all functions at the same time, and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def stored(url: str) -> list[Trace]:
    """Return all traces in Redis."""
    with redis.Redis.from_url(url, protocol=2) as client:
        streams = [key for key in client.scan_iter("osd:traces:domain:*") if client.type(key) == b"stream"]
        entries: list[Any] = [entry for stream in streams for entry in client.xrange(stream)]
    return [decode(fields[FIELD]) for _, fields in entries]


def settled(url: str, quiet: float = 6.0) -> list[Trace]:
    """Return all traces in Redis when no further trace has arrived for some seconds."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < quiet:
        if (now := len(stored(url))) != count:
            count, since = now, time.monotonic()
        time.sleep(0.5)
    return stored(url)
