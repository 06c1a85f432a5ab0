"""Commands ``osd chat`` and ``osd replay``, which send requests to a running service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.addresses import uses_proxies
from osd.cli.common import (
    ConfigFile,
    Host,
    MaxTokens,
    Overrides,
    Port,
    RequestDomain,
    Temperature,
    Url,
    address_of,
    fail,
    key_of,
    settings_of_client,
    unreachable,
)
from osd.cli.exit_codes import FAILURE
from osd.cli.signals import stop_signals
from osd.config import tenant_of

if TYPE_CHECKING:
    import httpx2
    from rich.console import Console


def replay(
    source: Annotated[str, typer.Argument(help="unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")],
    rate: Annotated[float, typer.Option(min=0.001, help="Average number of new conversations per second.")],
    duration: Annotated[float | None, typer.Option(min=0.001, help="Duration in seconds.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of conversations.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the arrival times.")] = 0,
    domain: RequestDomain = None,
    host: Host = None,
    port: Port = None,
    url: Url = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Send prompts like independent users: new conversations do not wait for answers.

    Without --domain the requests name no domain. The field domain of a prompt in SOURCE is not sent.
    """
    settings, url = settings_of_client(config, overrides, url, host, port, domain)
    _check_domain(domain)
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from osd.traffic import load
    from osd.traffic.open_loop import Load, Tally, replay
    from osd.traffic.prompt import TrafficError

    try:
        prompts = load(source)
    except TrafficError as error:
        fail(error)
    address = address_of(settings, url)
    plan = Load(rate, duration, limit, max_tokens, temperature, seed, domain=domain)
    by_time = len(prompts) if duration is None else max(1, round(rate * duration))
    total = by_time if limit is None else limit
    console, tally = Console(stderr=True, highlight=False), Tally()
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with stop_signals(), Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def show(tally: Tally) -> None:
            text = f"{tally.sent} sent, {tally.finished} finished, {tally.failed} failed, {tally.tokens} tokens"
            progress.update(task, completed=tally.finished + tally.failed, description=text)

        try:
            asyncio.run(replay(prompts, address, plan, tally, api_key=key_of(settings), on_change=show))
        finally:
            progress.stop()
            typer.echo(json.dumps(tally.figures()))
    for error, count in tally.errors.most_common(5):
        typer.echo(f"osd: {count} failed: {error}", err=True)
    if tally.failed:
        raise typer.Exit(FAILURE)


def chat(
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    domain: RequestDomain = None,
    host: Host = None,
    port: Port = None,
    url: Url = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Talk to the running service; an empty line or Ctrl-D ends it."""
    settings, url = settings_of_client(config, overrides, url, host, port, domain)
    _check_domain(domain)
    import httpx2
    from rich.console import Console

    from osd.traffic.open_loop import fields_of

    console = Console(highlight=False)
    headers = {"Authorization": f"Bearer {key}"} if (key := key_of(settings)) else {}
    messages: list[dict[str, str]] = []
    with (
        stop_signals(),
        httpx2.Client(
            base_url=(address := address_of(settings, url)),
            headers=headers,
            timeout=httpx2.Timeout(300, connect=5),
            trust_env=uses_proxies(address),
        ) as http,
    ):
        try:
            http.get("/health")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            unreachable(settings, address, error)
        while text := _line(console):
            messages.append({"role": "user", "content": text})
            body = {
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "stream": True,
                **fields_of(domain),
            }
            answer = ""
            try:
                for piece in _stream(http, body):
                    answer += piece
                    console.print(piece, end="", markup=False)
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                unreachable(settings, address, error)
            console.print()
            messages.append({"role": "assistant", "content": answer})


def _check_domain(domain: str | None) -> None:
    """Exit with a line if the name of a domain has a tenant, because clients name the domains of their own tenant."""
    if domain is not None and tenant_of(domain):
        fail(f"--domain {domain}: leave out the tenant {tenant_of(domain)}, which the service knows by the key")


def _line(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return ""


def _stream(http: httpx2.Client, body: dict[str, Any]) -> Iterator[str]:
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            fail(f"the service answered {response.status_code}: {_reason(response.text)}", FAILURE)
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                fail(event["error"]["message"], FAILURE)
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def _reason(text: str) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return text[:200]
