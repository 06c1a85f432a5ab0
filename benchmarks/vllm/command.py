"""``osd bench vllm``: recall and exported drafters inside vLLM."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engines import encode_short, engine_with, find_drafter, loading, running
from benchmarks.learning.drafters import LearningRun
from benchmarks.learning.experiment import open_experiment
from benchmarks.learning.ways import OFFLINE
from benchmarks.options import Most, Tokens
from benchmarks.peers.measure import answer_prompts
from benchmarks.peers.roster import LOOKUP, PeerModels
from benchmarks.vllm import exports, learning
from benchmarks.vllm import recall as recalling
from benchmarks.vllm.exports import FORMATS
from benchmarks.vllm.recall import KINDS, OURS, RECALL, VllmResult, share_of_ours, table
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.exit_codes import FAILURE
from osd.cli.report import ReportFile, check_files, say, show, write
from osd.cli.signals import stop_signals
from osd.config import ChainSettings, Settings, drafter_of
from osd.drafting import trainable
from osd.drafting.recall.drafter import Recall
from osd.drafting.trainable import Trainable
from osd.runtime.machine import Machine
from osd.target.context import context_of
from osd.target.load import target_directory
from osd.traffic import load

_RECALL, _REGISTRY = "recall", "registry"


def vllm(
    stream: Annotated[
        str, typer.Option(help="unittest, stdlib, pydoc, or a JSON lines file.", metavar="SOURCE")
    ] = "unittest",
    after: Annotated[int, typer.Option(min=16, help="Requests of the stream for training.")] = 200,
    prompts: Annotated[int, typer.Option(min=1, help="Number of following prompts to measure on.")] = 32,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="recall; suffix or ngram, vLLM's own methods; eagle, language_model or medusa, distilled first; "
            "registry: the domain's newest version. Repeat the option for several. Default: recall, eagle, "
            "language_model and medusa.",
            metavar="KIND",
        ),
    ] = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Learn from the stream inside vLLM by capture, and next to it by a tap; and measure the cost of "
            "capture.",
        ),
    ] = False,
    tokens: Tokens = 96,
    most: Most = 4.0,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare vLLM with our drafters to vLLM alone.

    Recall and suffix learn from all decoded text. Trained drafters are exported, and vLLM's own server drafts with
    them. vLLM runs in one process at a time, in an environment under ``cache``, which is created if missing.
    Decoding is greedy in float32, and answers end where our engine ends them. The command fails if an answer differs
    from vLLM's own, or if the acceptance rate of an export differs from ours by more than 0.03.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    kinds, known = draft or ([] if learn else [_RECALL, *FORMATS]), (*KINDS, *FORMATS, _REGISTRY)
    for kind in kinds:
        if kind not in known:
            fail(f"--draft must be one of {', '.join(known)}, not {kind}")
    about = {"target": settings.target.source, "stream": stream, "after": after, "tokens": tokens}
    figures: dict[str, Any] = {**about, "machine": asdict(Machine.here())}
    problems: list[str] = []
    if ways := [way for kind, way in KINDS.items() if kind in kinds]:
        results, count = _untrained(settings, stream, after, prompts, tokens, ways)
        problems += _show_results(results, count)
        figures |= {"prompts": count, "ways": [asdict(row) for row in results]}
        if RECALL in ways:
            figures["share_of_ours"] = share = share_of_ours(results)
            say(f"recall inside vLLM: {share:.3f} of our engine's accepted tokens per step")
    exported = [kind for kind in kinds if kind not in KINDS]
    if exported:
        results, count = _exports(settings, stream, after, prompts, tokens, exported, most)
        problems += _show_results(results, count)
        figures["exports"] = {"prompts": count, "ways": [asdict(row) for row in results]}
    if learn:
        figures |= _learned(settings, stream, after, prompts, tokens)
    write(json_file, figures)
    if problems:
        fail("; ".join(problems), FAILURE)


def _show_results(results: Sequence[VllmResult], count: int) -> list[str]:
    """Print the table, and return the violated expectations."""
    show(table(results, count))
    return exports.differences([row for row in results if row.way != OURS], count)


def _untrained(
    settings: Settings, stream: str, after: int, prompts: int, tokens: int, ways: Sequence[str]
) -> tuple[Sequence[VllmResult], int]:
    """Return the results of ways that need no training, and the number of prompts."""
    settings = _exact_settings(settings, LOOKUP)
    with loading():
        texts = load(stream)
        directory = target_directory(settings)
        engine = engine_with(settings, directory, Recall())
    token_ids = encode_short(engine.tokenizer, texts, engine.target.context - tokens, stream, after + prompts)
    with running(engine):
        learnt = recalling.serve_stream(engine, token_ids[:after], tokens)
        answered, engine_answers = recalling.measure_engine(engine, token_ids[after : after + prompts], tokens)
        if not answered:
            fail(f"--prompts: none of {prompts} answers is long enough to be measured")
    models = _models(settings, directory, recalling.BATCH)
    with tempfile.TemporaryDirectory() as scratch:
        vllm_answers = recalling.measure_vllm(models, settings.cache_dir, Path(scratch), learnt, answered, ways)
    return recalling.rows(engine_answers, vllm_answers), len(answered)


def _exports(
    settings: Settings, stream: str, after: int, prompts: int, tokens: int, kinds: Sequence[str], most: float
) -> tuple[Sequence[VllmResult], int]:
    """Return the results and the number of prompts."""
    drafters: dict[str, Trainable] = {}
    chains = settings.model_copy(update={"growth": _chains(LOOKUP), "verification": None})
    readers = [drafter_of(kind, settings.drafter) for kind in FORMATS]
    with (
        stop_signals(),
        open_experiment(chains, Path(stream), readers, after, prompts, tokens, 60.0) as (experiment, recorded),
        tempfile.TemporaryDirectory() as scratch,
    ):
        recipe, directory = experiment.recipe(most, 8, 0), experiment.setup.directory
        for kind in kinds:
            if kind == _REGISTRY:
                drafter, _ = find_drafter(settings, kind, directory)
            else:
                drafter = LearningRun(experiment, recorded, kind, recipe, most).drafter(OFFLINE)
            drafters[kind] = trainable(drafter)
        exported = {kind: exports.export(drafter, directory, Path(scratch, kind)) for kind, drafter in drafters.items()}
        unseen = [tuple(trace.prompt_ids.numpy().tolist()) for trace in recorded.unseen]
        answered, engine_answers = [], {}
        for kind, drafter in drafters.items():
            engine = engine_with(_exact_settings(settings, exported[kind].depth), directory, drafter)
            with running(engine):
                answered = answered or answer_prompts(engine, unseen, tokens)
                if not answered:
                    fail(f"--prompts: none of {prompts} answers is long enough to be measured")
                say(f"{exports.engine_way(kind)}: {len(answered)} prompts")
                engine_answers[kind] = exports.measure_engine(engine, answered)
        models = _models(_exact_settings(settings, LOOKUP), directory, 1)
        Path(scratch, "path").mkdir()
        vllm_answers = exports.measure_vllm(models, settings.cache_dir, Path(scratch, "path"), exported, answered)
        return exports.rows(engine_answers, vllm_answers), len(answered)


def _learned(settings: Settings, stream: str, after: int, prompts: int, tokens: int) -> dict[str, Any]:
    """Show how drafters learn inside vLLM and next to it, and return the figures."""
    with loading():
        texts, directory = list(load(stream)), target_directory(settings)
    if len(texts) < after + prompts:
        fail(f"{stream} has {len(texts)} prompts: --after and --prompts need {after + prompts}")
    models = _models(settings, directory, learning.CLIENTS)
    with stop_signals():
        unseen = texts[after : after + prompts]
        results, costs = learning.compare(models, settings.cache_dir, texts[:after], unseen, tokens)
    for each in learning.tables(results, costs):
        show(each)
    return {"learned": [asdict(result) for result in results], "capture": asdict(costs)}


def _chains(depth: int) -> ChainSettings:
    return ChainSettings(depth=depth, governed=False)


def _exact_settings(settings: Settings, depth: int) -> Settings:
    """Return the settings in float32 with ungoverned chains of ``depth`` tokens."""
    exact = settings.target.model_copy(update={"dtype": "float32"})
    return settings.model_copy(update={"growth": _chains(depth), "verification": None, "target": exact})


def _models(settings: Settings, directory: Path, streams: int) -> PeerModels:
    threads = settings.engine.threads or os.cpu_count() or 1
    context = context_of(settings, directory)
    return PeerModels(directory, settings.target.dtype, context, threads, streams, None, directory, None)
