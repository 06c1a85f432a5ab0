"""``osd bench serve`` and ``osd bench start``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, check_output, loading, say, show, write
from osd.cli.common import ConfigFile, MaxTokens, Overrides, Temperature, Url, address_of, fail, key_of, settings_of
from osd.cli.signals import stop_signals


def serve(
    arrivals: Annotated[
        Path | None, typer.Option(help="CSV with TIMESTAMP and GeneratedTokens; else they are Poisson.", metavar="FILE")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second on average; else as the file has them.")
    ] = None,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of arrivals.")] = 60.0,
    prompts: Prompts = "unittest",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Fixes Poisson arrivals.")] = 0,
    url: Url = None,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure a service under an open load: arrivals never wait for answers.

    Without --url it is the service that runs in the home directory, else one that is started for the measurement. With
    --arrivals each answer is as long as the trace says, up to --max-tokens. Ends with 1 when a request failed.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    if arrivals is None and rate is None:
        fail("give --rate, --arrivals or both")
    from benchmarks import serve as bench
    from deploy.running import find
    from osd.traffic import load
    from osd.traffic.arrivals import paced, read
    from osd.traffic.open_loop import Load

    with loading(), ExitStack() as ends:
        recorded = None if arrivals is None else tuple(paced(read(arrivals), rate, max_tokens))
        texts = load(prompts)
        ends.enter_context(stop_signals())
        if url is None and find(settings.home_dir) is None:
            from deploy.assembly import START_ERRORS
            from deploy.embedded import Embedded

            try:
                address = ends.enter_context(Embedded(settings, say)).url
            except START_ERRORS as error:
                fail(error)
        else:
            address = address_of(settings, url)
        plan = Load(rate or 1.0, duration, None, max_tokens, temperature, seed, recorded, recorded is not None)
        found = bench.measure(texts, address, plan, key_of(settings), say)
    show(bench.table(found))
    about = {"prompts": prompts, "arrivals": arrivals and arrivals.name, "rate": rate, "duration": duration}
    write(json_file, {**about, "max_tokens": max_tokens, "temperature": temperature, **found.figures()})
    for error, count in found.tally.errors.most_common(5):
        typer.echo(f"osd: {count} failed: {error}", err=True)
    if found.tally.failed:
        raise typer.Exit(1)


def start(json_file: Json = None, config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Start the service, and measure the time to its first token and the memory of its replica, fresh and full."""
    settings = settings_of(config, overrides)
    check_output(json_file)
    from dataclasses import asdict

    from benchmarks import start as bench
    from deploy.running import find

    if find(settings.home_dir) is not None:
        fail(f"osd already runs in {settings.home_dir}; stop it, or set another home")
    with loading(), stop_signals():
        found = bench.start(settings)
    show(bench.table(found))
    write(json_file, {**asdict(found), "ratio": found.ratio, "full_ratio": found.full_ratio})
