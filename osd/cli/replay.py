"""``osd replay``: prompts as independent users would send them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from osd.cli.common import ConfigFile, MaxTokens, Overrides, Temperature, Url, address_of, fail, key_of, settings_of
from osd.cli.signals import stop_signals

if TYPE_CHECKING:
    from osd.traffic.open_loop import Tally


def replay(
    source: Annotated[str, typer.Argument(help="unittest, stdlib, pydoc or a JSON lines file.", metavar="SOURCE")],
    rate: Annotated[float, typer.Option(min=0.001, help="Conversations that begin in a second, on average.")],
    duration: Annotated[float | None, typer.Option(min=0.001, help="Seconds of arrivals.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Conversations at most.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Fixes the arrival times.")] = 0,
    url: Url = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Send prompts as independent users would: arrivals never wait for answers."""
    settings = settings_of(config, overrides)
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from osd.traffic import load
    from osd.traffic.open_loop import Load, replay
    from osd.traffic.prompt import TrafficError

    try:
        prompts = load(source)
    except TrafficError as error:
        fail(error)
    address = address_of(settings, url)
    plan = Load(rate, duration, limit, max_tokens, temperature, seed)
    by_time = len(prompts) if duration is None else max(1, round(rate * duration))
    total = by_time if limit is None else limit
    console = Console(stderr=True, highlight=False)
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with stop_signals(), Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def show(tally: Tally) -> None:
            text = f"{tally.sent} sent, {tally.finished} finished, {tally.failed} failed, {tally.tokens} tokens"
            progress.update(task, completed=tally.finished + tally.failed, description=text)

        tally = asyncio.run(replay(prompts, address, plan, api_key=key_of(settings), on_change=show))
    typer.echo(json.dumps(tally.figures()))
    for error, count in tally.errors.most_common(5):
        typer.echo(f"osd: {count} failed: {error}", err=True)
    if tally.failed:
        raise typer.Exit(1)
