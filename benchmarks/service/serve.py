"""``osd bench serve``: latencies of a service under an open load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engines import loading
from benchmarks.options import Prompts
from deploy.cli.starts import start_errors
from deploy.embedded import Embedded
from osd.cli.common import (
    ConfigFile,
    Host,
    MaxTokens,
    Overrides,
    Port,
    Temperature,
    Url,
    address_of,
    fail,
    key_of,
    settings_of_client,
)
from osd.cli.exit_codes import FAILURE
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.running import find
from osd.traffic import load
from osd.traffic.arrivals import paced, read
from osd.traffic.open_loop import Load, Tally, replay
from osd.traffic.prompt import Prompt

_REPORT_SECONDS = 5.0


def serve(
    arrivals: Annotated[
        Path | None, typer.Option(help="CSV with TIMESTAMP and GeneratedTokens; default: Poisson.", metavar="FILE")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Average requests per second; default: the rate of the file.")
    ] = None,
    duration: Annotated[float, typer.Option(min=1, help="Seconds during which requests arrive.")] = 60.0,
    prompts: Prompts = "unittest",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of Poisson arrivals.")] = 0,
    host: Host = None,
    port: Port = None,
    url: Url = None,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure the latencies of a service under an open load.

    Without --host, --port and --url the service of home is measured; if none runs, one is started. With --arrivals each
    answer has the length in the trace, up to --max-tokens. The exit code is 1 if a request failed.
    """
    settings, url = settings_of_client(config, overrides, url, host, port)
    check_files(json_file)
    if arrivals is None and rate is None:
        fail("give --rate, --arrivals or both")
    with loading(), ExitStack() as stack:
        recorded = None if arrivals is None else tuple(paced(read(arrivals), rate, max_tokens))
        texts = load(prompts)
        stack.enter_context(stop_signals())
        stack.enter_context(start_errors())
        if url is None and find(settings.home_dir) is None:
            address = stack.enter_context(Embedded(settings, say)).url
        else:
            address = address_of(settings, url)
        plan = Load(rate or 1.0, duration, None, max_tokens, temperature, seed, recorded, recorded is not None)
        result = measure(texts, address, plan, key_of(settings))
    about = {"prompts": prompts, "arrivals": arrivals and arrivals.name, "rate": rate, "duration": duration}
    figures = {**about, "max_tokens": max_tokens, "temperature": temperature, **result.figures()}
    conclude([table(result)], figures, json_file)
    for error, count in result.tally.errors.most_common(5):
        say(f"osd: {count} failed: {error}")
    if result.tally.failed:
        raise typer.Exit(FAILURE)


@dataclass(frozen=True)
class LoadResult:
    """Outcome of all requests, and the seconds from the first arrival to the last answer."""

    tally: Tally
    seconds: float

    def figures(self) -> dict[str, Any]:
        """Return counts, latencies in seconds, and tokens per second over the whole time."""
        figures = {**self.tally.figures(), "seconds": round(self.seconds, 3)}
        return {**figures, "tokens_per_second": round(self.tally.tokens / self.seconds, 2)}


def measure(prompts: Sequence[Prompt], url: str, load: Load, api_key: str | None = None) -> LoadResult:
    """Send ``prompts`` to the service at ``url`` and wait for every answer.

    One request before the measurement warms up connections and kernels; it is not counted.
    """
    last_report = 0.0

    def report(tally: Tally) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _REPORT_SECONDS:
            last_report = time.monotonic()
            say(f"{tally.sent} sent, {tally.finished} finished, {tally.failed} failed, {tally.tokens} tokens")

    asyncio.run(replay(prompts[-1:], url, Load(rate=1000, limit=1, max_tokens=8), api_key=api_key))
    start = time.monotonic()
    tally = asyncio.run(replay(prompts, url, load, api_key=api_key, on_change=report))
    return LoadResult(tally, time.monotonic() - start)


def table(result: LoadResult) -> Table:
    """Return a table of counts, tokens per second, and latencies in milliseconds."""
    figures = result.figures()
    table = Table("", ("", "p50", "p99"), [])
    for name, key in (
        ("first token, ms", "first_token"),
        ("between two pieces of an answer, ms", "gaps"),
        ("a token after the first, ms", "per_token"),
        ("whole answer, ms", "latency"),
    ):
        cells = [figures[f"{key}_p{percent}"] for percent in (50, 99)]
        table.rows.append((name, *("" if value is None else f"{value * 1e3:.1f}" for value in cells)))
    names = ("sent", "failed", "tokens", "tokens_per_second")
    table.rows.extend((name.replace("_per_", "/"), str(figures[name])) for name in names)
    return table
