"""``osd analyze drafts``: what captured traffic says of verification rules."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import Contexts, Depth, Draft, Drafts, Json, Plot, Prompts, Temperatures, TopP, check_output
from osd.cli.bench.rules import compare, conclude
from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of


def drafts(
    live: Annotated[bool, typer.Option("--live", help="From live models instead of captured traces.")] = False,
    records: Annotated[int, typer.Option(min=1, help="Newest traces to read.")] = 64,
    places: Annotated[int, typer.Option(min=2, help="Drafted places of them to look at.")] = 2048,
    drafts: Drafts = 3,
    depth: Depth = 3,
    draft: Draft = "skip_layers",
    prompts: Prompts = "stdlib",
    temperature: Temperatures = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    contexts: Contexts = 32,
    json_file: Json = None,
    plot: Plot = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Say of each verification rule how much it accepts of the traffic's drafts, next to the best possible.

    Ends with 1 when a rule surpasses what is possible. With --live this is osd bench rules, whose options it takes;
    without it, of those only --drafts, --json and --plot.
    """
    settings = settings_of(config, overrides)
    if live:
        from benchmarks.rules import Plan

        return compare(settings, Plan(drafts, depth, contexts), draft, prompts, temperature, top_p, json_file, plot)
    check_output(json_file, plot)
    url = redis_url(settings)
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, set redis_url, or ask for --live")
    from benchmarks import traces
    from benchmarks.pair import BenchError
    from osd.capture.newest import NoTracesError, newest

    try:
        found = traces.places_of(list(newest(url, settings.capture.stream, records)), places)
    except (BenchError, NoTracesError) as error:
        fail(error)
    table = traces.compare(found, drafts)
    typer.echo(traces.NOTE)
    typer.echo(
        f"{found.records} traces; the tokens that both models list carry {found.listed:.3f} of the target's mass; "
        f"in service {found.accepted:.3f} of the drafted tokens were accepted"
    )
    conclude([table], {"stream": settings.capture.stream, "note": traces.NOTE, "listed": found.listed}, json_file, plot)
