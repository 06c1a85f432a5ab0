"""``osd bench beside``: drafters that learn beside a vLLM from what passes a tap."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, Tokens, check_output, loading, say, short_enough, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of


def beside(
    stream: Prompts = "unittest",
    prompts: Annotated[int, typer.Option(min=8, help="Of the stream, that are sent through the tap.")] = 300,
    unseen: Annotated[int, typer.Option(min=1, help="Further ones, only measured on.")] = 32,
    clients: Annotated[int, typer.Option(min=1, help="Who ask at the same time.")] = 8,
    tokens: Tokens = 48,
    minutes: Annotated[float, typer.Option(min=0, help="Of training behind the stream.")] = 2.0,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Send prompts to vLLM through a tap while a trainer learns from them, and tell what drafts gained.

    Real processes: vLLM that follows the registry, in an environment of its own, a tap, a trainer and Redis. It drafts
    with the first version, and with each that passes the gate from then on. In the end trainer and Redis are killed,
    and the tap is asked again. A request that fails ends the command with an error.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    import os
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from benchmarks import beside as bench
    from benchmarks.peers.environments import PeerError
    from benchmarks.peers.roster import Models
    from osd.runtime.machine import Machine
    from osd.target.load import load_tokenizer, target_directory
    from osd.traffic import load

    with loading():
        texts = load(stream)
        directory = target_directory(settings, say)
        tokenizer = load_tokenizer(directory)
    if len(texts) < prompts + unseen:
        fail(f"--prompts {prompts} and --unseen {unseen} need as many prompts, but {stream} has {len(texts)}")
    context = settings.engine.context
    measured = short_enough(tokenizer, texts[prompts:], context - tokens, stream)[:unseen]
    threads = settings.engine.threads or os.cpu_count() or 1
    models = Models(directory, settings.target.dtype, context, threads, clients, None, directory, None)
    plan = bench.Plan(clients, tokens, minutes)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = bench.run(settings, models, texts[:prompts], measured, plan, Path(scratch), say)
    except PeerError as error:
        fail(error)
    show(bench.table(found))
    say(
        f"{found.failed} of {found.sent} requests failed in {found.seconds:.0f} s; "
        f"{found.failed_in_trouble} of {found.sent_in_trouble} without trainer and Redis"
    )
    about = {"target": settings.target.source, "stream": stream, "machine": asdict(Machine.here())}
    write(json_file, {**about, "plan": asdict(plan), **asdict(found)})
    if found.failed or found.failed_in_trouble:
        fail("the tap failed requests")
