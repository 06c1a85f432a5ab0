"""``osd bench vllm``: recall as vLLM's proposer."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import Json, Prompts, Tokens, check_output, loading, running, say, short_enough, show, write
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import ChainSettings


def vllm(
    stream: Prompts = "unittest",
    after: Annotated[int, typer.Option(min=1, help="Requests of the stream that are served first.")] = 200,
    prompts: Annotated[int, typer.Option(min=1, help="Unseen ones behind them, to measure on.")] = 32,
    tokens: Tokens = 96,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare vLLM with recall to vLLM alone, and to our engine that drafts the same chains of three.

    vLLM is installed in an environment of its own under the home directory, where it is missing, and runs in one
    process at a time. Everything is greedy, in float32, where the answers must be those of vLLM alone, token by token:
    else the command fails. Answers end where our engine ends them.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    import os
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from benchmarks import vllm as bench
    from benchmarks.pair import engine_with
    from benchmarks.peers.environments import PeerError
    from benchmarks.peers.roster import LOOKUP, Models
    from osd.drafters.recall.drafter import Recall
    from osd.runtime.machine import Machine
    from osd.target.load import target_directory
    from osd.traffic import load

    chains = ChainSettings(depth=LOOKUP, governed=False)
    exact = settings.target.model_copy(update={"dtype": "float32"})
    settings = settings.model_copy(update={"growth": chains, "verification": None, "target": exact})
    with loading():
        texts = load(stream)
        directory = target_directory(settings, say)
        engine = engine_with(settings, directory, Recall())
    context = settings.engine.context
    short = short_enough(engine.tokenizer, texts, context - tokens, stream)
    if len(short) < after + prompts:
        fail(f"--after {after} and --prompts {prompts} need as many prompts, but {stream} has {len(short)}")
    threads = settings.engine.threads or os.cpu_count() or 1
    models = Models(directory, "float32", context, threads, bench.ABREAST, None, directory, None)
    with running(engine):
        served = bench.served(engine, short[:after], tokens, say)
        asked, mine = bench.ours(engine, short[after : after + prompts], tokens)
        if not asked:
            fail(f"--prompts: none of {prompts} answers is long enough to be measured")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = bench.rows(mine, bench.theirs(models, settings.home_dir, Path(scratch), served, asked, say))
    except PeerError as error:
        fail(f"vllm: {error}")
    show(bench.table(found, len(asked)))
    about = {"target": settings.target.source, "stream": stream, "after": after, "tokens": tokens}
    about |= {"machine": asdict(Machine.here()), "share_of_ours": bench.share_of_ours(found)}
    write(json_file, {**about, "prompts": len(asked), "ways": [asdict(row) for row in found]})
    say(f"recall inside vLLM: {bench.share_of_ours(found):.3f} of the accepted tokens a round of our engine")
    wrong = [row.way for row in found if row.way in bench.WAYS and row.same < len(asked)]
    if wrong:
        fail(f"answers differ from those of vllm alone: {', '.join(wrong)}")
