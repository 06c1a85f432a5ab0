"""``osd bench vllm``: recall and exported drafters inside vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engines import engine_with, find_drafter, loading, running, short_enough
from benchmarks.learning.drafters import Learning
from benchmarks.learning.experiment import open_experiment
from benchmarks.learning.ways import OFFLINE
from benchmarks.options import Most, Tokens
from benchmarks.peers.measure import answered
from benchmarks.peers.roster import LOOKUP, Models
from benchmarks.vllm import exports
from benchmarks.vllm import recall as recalling
from benchmarks.vllm.exports import FORMATS
from benchmarks.vllm.recall import OURS, Row, table
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Json, check_files, say, show, write
from osd.config import ChainSettings, Settings, drafter_of
from osd.drafting import trainable
from osd.drafting.recall.drafter import Recall
from osd.drafting.trainable import Trainable
from osd.runtime.machine import Machine
from osd.target.load import target_directory
from osd.traffic import load

_RECALL, _REGISTRY = "recall", "registry"


def vllm(
    stream: Annotated[
        str, typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")
    ] = "unittest",
    after: Annotated[int, typer.Option(min=16, help="Requests of the stream that drafters learn from.")] = 200,
    prompts: Annotated[int, typer.Option(min=1, help="Unseen ones behind them, to measure on.")] = 32,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="recall; eagle, language_model or medusa, distilled first; registry: the domain's newest version. "
            "May be given again, the first four by default.",
            metavar="KIND",
        ),
    ] = None,
    tokens: Tokens = 96,
    most: Most = 4.0,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare vLLM with our drafters to vLLM alone.

    Recall learns what both decode; the others are exported, and drafted with by vLLM's own server. vLLM is installed in
    an environment of its own under the home directory, where it is missing, and runs in one process at a time.
    Everything is greedy, in float32, where the answers must be those of vLLM alone, token by token, and the acceptance
    rate of an export ours within 0.03: else the command fails. Answers end where our engine ends them.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    kinds = draft or [_RECALL, *FORMATS]
    for kind in kinds:
        if kind not in (_RECALL, *FORMATS, _REGISTRY):
            fail(f"--draft must be one of {', '.join((_RECALL, *FORMATS, _REGISTRY))}, not {kind}")
    about = {"target": settings.target.source, "stream": stream, "after": after, "tokens": tokens}
    figures: dict[str, Any] = {**about, "machine": asdict(Machine.here())}
    wrong: list[str] = []
    if _RECALL in kinds:
        found, asked, share = _recall(settings, stream, after, prompts, tokens)
        wrong += _concluded(found, asked)
        say(f"recall inside vLLM: {share:.3f} of the accepted tokens a step of our engine")
        figures |= {"share_of_ours": share, "prompts": asked, "ways": [asdict(row) for row in found]}
    exported = [kind for kind in kinds if kind != _RECALL]
    if exported:
        found, asked = _exports(settings, stream, after, prompts, tokens, exported, most)
        wrong += _concluded(found, asked)
        figures["exports"] = {"prompts": asked, "ways": [asdict(row) for row in found]}
    write(json_file, figures)
    if wrong:
        fail("; ".join(wrong))


def _concluded(found: Sequence[Row], asked: int) -> list[str]:
    """Show what was found, and return what does not hold."""
    show(table(found, asked))
    return exports.differences([row for row in found if row.way != OURS], asked)


def _recall(settings: Settings, stream: str, after: int, prompts: int, tokens: int) -> tuple[Sequence[Row], int, float]:
    """Return rows, prompts, and the share of our accepted tokens a step."""
    settings = _exact(settings, LOOKUP)
    with loading():
        texts = load(stream)
        directory = target_directory(settings)
        engine = engine_with(settings, directory, Recall())
    short = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, stream, after + prompts)
    with running(engine):
        served = recalling.served(engine, short[:after], tokens)
        asked, mine = recalling.ours(engine, short[after : after + prompts], tokens)
        if not asked:
            fail(f"--prompts: none of {prompts} answers is long enough to be measured")
    models = _models(settings, directory, recalling.ABREAST)
    with tempfile.TemporaryDirectory() as scratch:
        theirs = recalling.theirs(models, settings.home_dir, Path(scratch), served, asked)
        found = recalling.rows(mine, theirs)
    return found, len(asked), recalling.share_of_ours(found)


def _exports(
    settings: Settings, stream: str, after: int, prompts: int, tokens: int, kinds: Sequence[str], most: float
) -> tuple[Sequence[Row], int]:
    """Return rows and prompts."""
    drafters: dict[str, Trainable] = {}
    chains = settings.model_copy(update={"growth": _chains(LOOKUP), "verification": None})
    readers = [drafter_of(kind, settings.drafter) for kind in FORMATS]
    with (
        open_experiment(chains, Path(stream), readers, after, prompts, tokens, 60.0) as (experiment, recorded),
        tempfile.TemporaryDirectory() as scratch,
    ):
        recipe, directory = experiment.recipe(most, 8, 0), experiment.setup.directory
        for kind in kinds:
            if kind == _REGISTRY:
                drafter, _ = find_drafter(settings, kind, directory)
            else:
                drafter = Learning(experiment, recorded, kind, recipe, most).drafter(OFFLINE)
            drafters[kind] = trainable(drafter)
        made = {kind: exports.export(one, directory, Path(scratch, kind)) for kind, one in drafters.items()}
        unseen = [tuple(trace.prompt_ids.numpy().tolist()) for trace in recorded.unseen]
        asked, mine = [], {}
        for kind, drafter in drafters.items():
            engine = engine_with(_exact(settings, made[kind].depth), directory, drafter)
            with running(engine):
                asked = asked or answered(engine, unseen, tokens)
                if not asked:
                    fail(f"--prompts: none of {prompts} answers is long enough to be measured")
                say(f"{exports.ours_of(kind)}: {len(asked)} prompts")
                mine[kind] = exports.ours(engine, asked)
        models = _models(_exact(settings, LOOKUP), directory, 1)
        Path(scratch, "path").mkdir()
        others = exports.theirs(models, settings.home_dir, Path(scratch, "path"), made, asked)
        return exports.rows(mine, others), len(asked)


def _chains(depth: int) -> ChainSettings:
    return ChainSettings(depth=depth, governed=False)


def _exact(settings: Settings, depth: int) -> Settings:
    """Return the same in float32 with chains of so many tokens, whatever they pay."""
    exact = settings.target.model_copy(update={"dtype": "float32"})
    return settings.model_copy(update={"growth": _chains(depth), "verification": None, "target": exact})


def _models(settings: Settings, directory: Path, streams: int) -> Models:
    threads = settings.engine.threads or os.cpu_count() or 1
    context = settings.engine.context
    return Models(directory, settings.target.dtype, context, threads, streams, None, directory, None)
