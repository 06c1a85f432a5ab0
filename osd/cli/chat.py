"""``osd chat``: talk to a running service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from osd.cli.common import ConfigFile, MaxTokens, Overrides, Temperature, Url, address_of, fail, key_of, settings_of
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    import httpx2
    from rich.console import Console


def chat(
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    url: Url = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Talk to the running service; an empty line or Ctrl-D ends it."""
    settings = settings_of(config, overrides)
    import httpx2
    from rich.console import Console

    console = Console(highlight=False)
    headers = {"Authorization": f"Bearer {key}"} if (key := key_of(settings)) else {}
    messages: list[dict[str, str]] = []
    with (
        stop_signals(),
        httpx2.Client(
            base_url=address_of(settings, url), headers=headers, timeout=httpx2.Timeout(300, connect=5)
        ) as http,
    ):
        while text := _line(console):
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature, "stream": True}
            answer = ""
            try:
                for piece in _stream(http, body):
                    answer += piece
                    console.print(piece, end="", markup=False)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                fail(f"{address_of(settings, url)}: {error}")
            console.print()
            messages.append({"role": "assistant", "content": answer})


def _line(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return ""


def _stream(http: httpx2.Client, body: dict[str, Any]) -> Iterator[str]:
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            fail(f"the service answers {response.status_code}: {_reason(response.text)}")
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                fail(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def _reason(text: str) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return text[:200]
