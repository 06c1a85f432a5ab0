"""``osd bench decode``: the engine beside plain decoding."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import (
    Draft,
    Json,
    Prompts,
    Tokens,
    check_draft,
    check_output,
    loading,
    running,
    say,
    short_enough,
    show,
    write,
)
from osd.cli.common import ConfigFile, Overrides, fail, settings_of

_TURNS = 15
"""Of the isolated forwards."""


def decode(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    streams: Annotated[int, typer.Option(min=1, help="Prompts decoded at the same time.")] = 1,
    waves: Annotated[int, typer.Option(min=1, help="Of as many prompts, in both ways.")] = 9,
    tokens: Tokens = 96,
    growth: Annotated[str | None, typer.Option(help="growth.kind; its parameters with --set.", metavar="KIND")] = None,
    rule: Annotated[str | None, typer.Option(help="verification.", metavar="NAME")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--synthetic-acceptance", min=0, max=1, help="Keep this share of every draft, whatever the target says."
        ),
    ] = None,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare speculative with plain decoding, and both with what their forwards allow.

    Writes a line of JSON for each wave and one of figures to standard output, and the table to standard error. Drafts
    are not governed.
    """
    chosen = [f"growth.kind={growth}"] if growth else []
    chosen += [f"verification={rule}"] if rule else []
    settings = settings_of(config, [*(overrides or ()), *chosen])
    check_output(json_file)
    check_draft(draft)
    from benchmarks import decode as bench
    from benchmarks.isolated import DRAFT_CONTEXT, on_several_cores
    from benchmarks.pair import BenchError, check_alone, engine_with, find_drafter, reading_anew
    from benchmarks.synthetic import forced
    from osd.drafters.autoregressive import autoregressive
    from osd.drafters.session import Runtime
    from osd.engine.policy import Policy
    from osd.engine.request import SamplingParams
    from osd.speculation.compatibility import IncompatibleError
    from osd.target.load import target_directory
    from osd.traffic import load

    if settings.engine.slots < streams:
        fail(f"--streams must be at most engine.slots {settings.engine.slots}, not {streams}")
    try:
        policy = Policy.of(settings.growth, settings.verification)
    except IncompatibleError as error:
        fail(error)
    if policy.growth.max_nodes > settings.engine.max_draft:
        fail(f"engine.max_draft is {settings.engine.max_draft}, but a draft may have {policy.growth.max_nodes} tokens")
    if acceptance is not None:
        policy = forced(policy, acceptance)
    with loading():
        texts = load(prompts)
        directory = target_directory(settings)
        drafter, name = find_drafter(settings, draft, directory)
        check_alone(drafter)
        calls = bench.Calls.of(drafter)
        engine = engine_with(reading_anew(settings), directory, drafter)
    asked = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, prompts)
    sampling = SamplingParams(temperature=temperature)
    found: list[bench.Wave] = []
    try:
        with running(engine):
            for wave in bench.decode(engine, asked, waves, streams, tokens, sampling, policy, calls, say):
                typer.echo(json.dumps(asdict(wave)))
                found.append(wave)
        depth = policy.growth.max_nodes
        session = autoregressive(
            drafter.session(Runtime.serving(streams, DRAFT_CONTEXT, depth + 1, engine.target.device, engine.target))
        )
        timed = on_several_cores(lambda: bench.model(engine, session, streams, found, _TURNS), settings.engine.threads)
    except BenchError as error:
        fail(error)
    result = bench.conclude(found, timed, streams)
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "tokens": tokens}
    about |= {"temperature": temperature, "growth": settings.growth.kind, "rule": policy.rule.name}
    about |= {"synthetic_acceptance": acceptance}
    about |= bench.figures(result)
    typer.echo(json.dumps(about))
    show(bench.table(result), stderr=True)
    write(json_file, {**about, "waves": [asdict(wave) for wave in found]})
