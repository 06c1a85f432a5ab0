"""``osd bench vllm``: recall as vLLM's proposer, and our drafters in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.cli.bench.options import Json, Tokens, check_output, loading, running, say, short_enough, show, write
from osd.cli.bench.recorded import Most, open_experiment
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.config import ChainSettings, drafter_of

if TYPE_CHECKING:
    from benchmarks.peers.roster import Models
    from benchmarks.vllm import Row
    from osd.config import Settings
    from osd.drafters.trainable import Trainable

_RECALL, _REGISTRY = "recall", "registry"


def vllm(
    stream: Annotated[str, typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")] = (
        "unittest"
    ),
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
    """Compare vLLM with our drafters to vLLM alone, and to our engine that drafts the same chains.

    Recall learns what both decode; the others are exported, and drafted with by vLLM's own server. vLLM is installed in
    an environment of its own under the home directory, where it is missing, and runs in one process at a time.
    Everything is greedy, in float32, where the answers must be those of vLLM alone, token by token, and the acceptance
    rate of an export ours within 0.03: else the command fails. Answers end where our engine ends them.
    """
    settings = settings_of(config, overrides)
    check_output(json_file)
    from benchmarks.peers.environments import PeerError
    from benchmarks.vllm_exports import FORMATS
    from osd.runtime.machine import Machine

    kinds = draft or [_RECALL, *FORMATS]
    for kind in kinds:
        if kind not in (_RECALL, *FORMATS, _REGISTRY):
            fail(f"--draft must be one of {', '.join((_RECALL, *FORMATS, _REGISTRY))}, not {kind}")
    about = {"target": settings.target.source, "stream": stream, "after": after, "tokens": tokens}
    figures: dict[str, Any] = {**about, "machine": asdict(Machine.here())}
    wrong: list[str] = []
    try:
        if _RECALL in kinds:
            found, asked, share = _recall(settings, stream, after, prompts, tokens)
            wrong += _concluded(found, asked)
            say(f"recall inside vLLM: {share:.3f} of the accepted tokens a round of our engine")
            figures |= {"share_of_ours": share, "prompts": asked, "ways": [asdict(row) for row in found]}
        exported = [kind for kind in kinds if kind != _RECALL]
        if exported:
            found, asked = _exports(settings, stream, after, prompts, tokens, exported, most)
            wrong += _concluded(found, asked)
            figures["exports"] = {"prompts": asked, "ways": [asdict(row) for row in found]}
    except PeerError as error:
        fail(f"vllm: {error}")
    write(json_file, figures)
    if wrong:
        fail("; ".join(wrong))


def _concluded(found: Sequence[Row], asked: int) -> list[str]:
    """Show what was found, and return what does not hold."""
    from benchmarks.vllm import OURS, table
    from benchmarks.vllm_exports import differences

    show(table(found, asked))
    return differences([row for row in found if row.way != OURS], asked)


def _recall(settings: Settings, stream: str, after: int, prompts: int, tokens: int) -> tuple[Sequence[Row], int, float]:
    """Rows, prompts, and the share of our accepted tokens a round."""
    from benchmarks import vllm as bench
    from benchmarks.pair import engine_with
    from benchmarks.peers.roster import LOOKUP
    from osd.drafters.recall.drafter import Recall
    from osd.target.load import target_directory
    from osd.traffic import load

    settings = _exact(settings, LOOKUP)
    with loading():
        texts = load(stream)
        directory = target_directory(settings, say)
        engine = engine_with(settings, directory, Recall())
    short = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, stream)
    if len(short) < after + prompts:
        fail(f"--after {after} and --prompts {prompts} need as many prompts, but {stream} has {len(short)}")
    with running(engine):
        served = bench.served(engine, short[:after], tokens, say)
        asked, mine = bench.ours(engine, short[after : after + prompts], tokens)
        if not asked:
            fail(f"--prompts: none of {prompts} answers is long enough to be measured")
    models = _models(settings, directory, bench.ABREAST)
    with tempfile.TemporaryDirectory() as scratch:
        found = bench.rows(mine, bench.theirs(models, settings.home_dir, Path(scratch), served, asked, say))
    return found, len(asked), bench.share_of_ours(found)


def _exports(
    settings: Settings, stream: str, after: int, prompts: int, tokens: int, kinds: Sequence[str], most: float
) -> tuple[Sequence[Row], int]:
    """Rows and prompts."""
    from benchmarks import vllm_exports as bench
    from benchmarks.adaptation import kinds as trained
    from benchmarks.adaptation.adapt import OFFLINE
    from benchmarks.pair import BenchError, engine_with, find_drafter
    from benchmarks.peers.measure import answered
    from benchmarks.peers.roster import LOOKUP
    from osd.drafters import trainable
    from osd.registry.versions import VersionError

    drafters: dict[str, Trainable] = {}
    chains = settings.model_copy(update={"growth": _chains(LOOKUP), "verification": None})
    readers = [drafter_of(kind, settings.drafter) for kind in bench.FORMATS]
    with (
        open_experiment(chains, [Path(stream)], readers, after, prompts, tokens, 60.0) as (experiment, (recorded,)),
        tempfile.TemporaryDirectory() as scratch,
    ):
        recipe, directory = experiment.recipe(most, 8, 0), experiment.setup.directory
        try:
            for kind in kinds:
                if kind == _REGISTRY:
                    drafters[kind] = trainable(find_drafter(settings, kind, directory)[0])
                    continue
                list(trained.learn(experiment, recorded, kind, recipe, most, say, [OFFLINE]))
                drafters[kind] = experiment.fresh(kind)
                trained.ResultStore(experiment, recorded, kind, recipe, most).load(OFFLINE, drafters[kind])
            exports = {
                kind: bench.export(drafter, directory, Path(scratch, kind)) for kind, drafter in drafters.items()
            }
        except (BenchError, VersionError) as error:
            fail(error)
        unseen = [tuple(trace.prompt_ids.numpy().tolist()) for trace in recorded.unseen]
        asked, mine = [], {}
        for kind, drafter in drafters.items():
            exact = _exact(settings, exports[kind].depth)
            engine = engine_with(exact, directory, drafter)
            with running(engine):
                asked = asked or answered(engine, unseen, tokens)
                if not asked:
                    fail(f"--prompts: none of {prompts} answers is long enough to be measured")
                say(f"{bench.ours_of(kind)}: {len(asked)} prompts")
                mine[kind] = bench.ours(engine, asked)
        models = _models(_exact(settings, LOOKUP), directory, 1)
        Path(scratch, "path").mkdir()
        others = bench.theirs(models, settings.home_dir, Path(scratch, "path"), exports, asked, say)
        return bench.rows(mine, others), len(asked)


def _chains(depth: int) -> ChainSettings:
    return ChainSettings(depth=depth, governed=False)


def _exact(settings: Settings, depth: int) -> Settings:
    """The same in float32 with chains of so many tokens, whatever they pay."""
    exact = settings.target.model_copy(update={"dtype": "float32"})
    return settings.model_copy(update={"growth": _chains(depth), "verification": None, "target": exact})


def _models(settings: Settings, directory: Path, streams: int) -> Models:
    from benchmarks.peers.roster import Models

    threads = settings.engine.threads or os.cpu_count() or 1
    context = settings.engine.context
    return Models(directory, settings.target.dtype, context, threads, streams, None, directory, None)
