"""``osd bench decode``, ``plain``, ``governor`` and ``lossless``: the engine beside plain decoding."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import (
    CONTEXT,
    Draft,
    Json,
    Prompts,
    Tokens,
    Turns,
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
from osd.config import TRAINED_SETTINGS, NoDrafterSettings

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


def plain(
    prompts: Prompts = "unittest",
    tokens: Tokens = 96,
    turns: Turns = 7,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare plain decoding with transformers' generate(), and eight streams with one, taking turns."""
    settings = settings_of(config, overrides).model_copy(update={"drafter": NoDrafterSettings()})
    check_output(json_file)
    from benchmarks.pair import encode, plain_engine, reading_anew
    from benchmarks.plain import measure, ratios
    from benchmarks.report import turns_of
    from osd.traffic import load

    with loading():
        texts = load(prompts)
        engine, directory = plain_engine(reading_anew(settings))
    asked = encode(engine.tokenizer, texts, settings.engine.context - tokens)
    with running(engine):
        pairs = measure(engine, directory, asked, tokens, turns, say)
    show(turns_of(pairs))
    figures = {"target": settings.target.source, "tokens": tokens, "turns": [asdict(pair) for pair in pairs]}
    write(json_file, {**figures, "ratios": ratios(pairs)})


def governor(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    cycles: Annotated[int, typer.Option(min=1, help="Of the alternating load.")] = 5,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare the governor with plain decoding and fixed draft lengths while the load goes from 1 to 16 and back."""
    settings = settings_of(config, [*(overrides or ()), "growth.kind=chain", "growth.depth=4"])
    check_output(json_file)
    from benchmarks.governor import Load, measure
    from benchmarks.pair import encode, load_engine, reading_anew
    from benchmarks.report import speeds
    from osd.traffic import load

    check_draft(draft)
    plan = Load(cycles=cycles)
    if settings.engine.slots < plan.together:
        fail(f"engine.slots must be at least {plan.together}, not {settings.engine.slots}")
    with loading():
        texts = load(prompts)
        engine, name = load_engine(reading_anew(settings), draft)
    asked = encode(engine.tokenizer, texts, settings.engine.context - plan.tokens)
    with running(engine):
        found = measure(engine, asked, plan, say)
    show(speeds(found))
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "load": asdict(plan)}
    write(json_file, {**about, "ways": [asdict(speed) for speed in found]})


def lossless(
    prompts: Annotated[
        list[str],
        typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file; several take turns.", metavar="SOURCE"),
    ] = ["unittest"],  # noqa: B006 - typer reads it and changes nothing
    draft: Annotated[
        list[str],
        typer.Option(
            help=f"recall, mixed (recall with a fresh eagle), {', '.join(TRAINED_SETTINGS)}, skip_layers or registry; "
            "may be given again.",
            metavar="KIND",
        ),
    ] = ["recall", "mixed", *TRAINED_SETTINGS],  # noqa: B006 - likewise
    count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, max=256, help="Of each answer at most.")] = 16,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare greedy decoding in float32 with every drafter, growth policy and rule to plain decoding, token by token.

    Ends with 1 when an answer differs.
    """
    from benchmarks.lossless import compare, slots

    fixed = ["target.dtype=float32", f"engine.slots={slots()}", f"engine.context={CONTEXT}", "growth.governed=false"]
    settings = settings_of(config, [*(overrides or ()), *fixed])
    check_output(json_file)
    for kind in draft:
        check_draft(kind, recalling=True)
    from itertools import chain, zip_longest

    from benchmarks.pair import encode, load_engine
    from benchmarks.report import identity
    from osd.traffic import load

    with loading():
        texts = [text for text in chain(*zip_longest(*map(load, prompts))) if text is not None]
    found, figures = [], []
    for kind in draft:
        with loading():
            engine, name = load_engine(settings, kind)
        asked = encode(engine.tokenizer, texts[: 4 * count], settings.engine.context - tokens)[:count]
        if len(asked) < count:
            fail(f"--count: {', '.join(prompts)} hold only {len(asked)} prompts that are short enough, not {count}")
        with running(engine):
            tallies = compare(engine, asked, tokens, lambda done, name=name: say(f"{name}: {done} of {count} prompts"))
        show(identity(name, tallies))
        found += tallies
        figures += ({"draft": name, **asdict(tally), "identical": tally.identical} for tally in tallies)
        about = {"target": settings.target.source, "prompts": prompts, "count": count, "tokens": tokens}
        write(json_file, {**about, "ways": figures})
    different = sum(len(tally.differences) for tally in found)
    if different:
        near = sum(tally.ties for tally in found)
        say(f"osd: {different} answers differ from plain decoding, {near} of them where two tokens are all but equal")
        raise typer.Exit(1)
