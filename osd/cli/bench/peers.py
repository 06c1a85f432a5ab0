"""``osd bench peers``."""

from __future__ import annotations

from typing import Annotated

import typer

from osd.cli.bench.options import (
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
from osd.config import LanguageModelSettings


def peers(
    peer: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be given again. All of them otherwise.", metavar="NAME")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Prompts decoded at the same time.")] = 1,
    turns: Turns = 5,
    tokens: Tokens = 96,
    draft: Annotated[
        str, typer.Option(help="recall, mixed, or what other commands take for --draft.", metavar="KIND")
    ] = "recall",
    prompts: Prompts = "unittest",
    after: Annotated[int, typer.Option(min=0, help="Prompts that our engine answers before, in their order.")] = 200,
    unseen: Annotated[int, typer.Option(min=1, help="Prompts after these, which turns take from.")] = 24,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare with other engines, each in an environment of its own under the home directory, made when it is missing.

    Same prompts, lengths and threads, greedily, in alternation; answers end where the target ends them. A peer that
    cannot be installed or does not run is a row that says why. Peers that draft with a small model have ours if it is
    one, else the first layers of the target.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    check_draft(draft, recalling=True)
    from benchmarks.peers.roster import PEERS

    for name in peer or ():
        if name not in PEERS:
            fail(f"--peer must be one of {', '.join(PEERS)}, not {name}")
    if settings.engine.slots < streams:
        fail(f"--streams must be at most engine.slots {settings.engine.slots}, not {streams}")
    import os
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from benchmarks.pair import engine_with, find_drafter, reading_anew
    from benchmarks.peers.measure import answered, measure, ours, serve, table
    from benchmarks.peers.models import write_drafter, write_first_layers
    from benchmarks.peers.roster import Models
    from osd.drafters.language_model.drafter import LanguageModel
    from osd.target.load import gguf_of, target_directory
    from osd.traffic import load

    home = settings.home_dir
    with tempfile.TemporaryDirectory() as scratch:
        with loading():
            texts = load(prompts)
            directory = target_directory(settings, say)
            gguf = gguf_of(settings.target.source, home, say)
            drafter, name = find_drafter(settings, draft, directory)
            engine = engine_with(reading_anew(settings), directory, drafter)
            small, draft_gguf = drafter, None
            if not isinstance(small, LanguageModel):
                chosen = settings.drafter
                fresh = LanguageModelSettings()
                if chosen.kind == "language_model":
                    fresh = chosen.model_copy(update={"source": None})
                layers = settings.model_copy(update={"drafter": fresh})
                small, _ = find_drafter(layers, "language_model", directory)
                if gguf is not None:
                    folder = Path(scratch, "gguf")
                    folder.mkdir()
                    draft_gguf = write_first_layers(gguf, fresh.layers, folder / "draft.gguf")
            assert isinstance(small, LanguageModel)  # noqa: S101 - one or the other
            models = Models(
                directory,
                settings.target.dtype,
                settings.engine.context,
                settings.engine.threads or os.cpu_count() or 1,
                streams,
                gguf,
                write_drafter(small, settings.target.dtype, Path(scratch, "draft")),
                draft_gguf,
            )
        short = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, prompts)
        if len(short) < after + unseen:
            fail(f"--after {after} and --unseen {unseen} need as many prompts, but {prompts} has {len(short)}")
        chosen = {key: entry for key, entry in PEERS.items() if peer is None or key in peer}
        with running(engine):
            say(f"serving {after} prompts")
            serve(engine, short[:after], tokens)
            asked = answered(engine, short[after : after + unseen], tokens)
            if not asked:
                fail(f"--prompts: none of {unseen} answers is long enough to be timed")
            rows = measure(chosen, models, home, ours(engine), asked, turns, say)
    show(table(rows))
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "tokens": tokens}
    write(json_file, {**about, "after": after, "turns": turns, "peers": [asdict(row) for row in rows]})
