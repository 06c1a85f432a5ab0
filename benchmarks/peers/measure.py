"""``osd bench peers``: other engines and ours, on the same prompts and lengths, greedily, in turns."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engines import (
    check_draft,
    check_slots,
    engine_with,
    find_drafter,
    loading,
    reading_anew,
    running,
    short_enough,
)
from benchmarks.options import After, Parallel, Prompts, Tokens, Turns
from benchmarks.peers.conversation import Worker, command
from benchmarks.peers.environments import PeerError
from benchmarks.peers.models import write_drafter, write_first_layers
from benchmarks.peers.roster import PEERS, Entry, Models
from benchmarks.streams import decode
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import Json, Table, check_files, conclude, say
from osd.config import LanguageModelSettings
from osd.drafting.language_model.drafter import LanguageModel
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.target.load import gguf_of, target_directory
from osd.traffic import load

_SHORTEST = 8  # tokens of an answer that is timed


def peers(
    peer: Annotated[
        list[str] | None, typer.Option(help="Only this one; may be given again. All of them otherwise.", metavar="NAME")
    ] = None,
    streams: Parallel = 1,
    turns: Turns = 5,
    tokens: Tokens = 96,
    draft: Annotated[
        str, typer.Option(help="recall, mixed, or what other commands take for --draft.", metavar="KIND")
    ] = "recall",
    prompts: Prompts = "unittest",
    after: After = 200,
    unseen: Annotated[int, typer.Option(min=1, help="Prompts after these, which turns take from.")] = 24,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare with other engines, each in its own environment.

    Same prompts, lengths and threads, greedily, in turns; answers end where the target ends them. A peer that cannot be
    installed or does not run is a row that says why. Peers that draft with a small model have ours if it is one, else
    the first layers of the target.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    check_draft(draft, recalling=True)
    for name in peer or ():
        if name not in PEERS:
            fail(f"--peer must be one of {', '.join(PEERS)}, not {name}")
    check_slots(settings, streams)
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
        short = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, prompts, after + unseen)
        entries = {key: entry for key, entry in PEERS.items() if peer is None or key in peer}
        with running(engine):
            say(f"serving {after} prompts")
            serve(engine, short[:after], tokens)
            asked = answered(engine, short[after : after + unseen], tokens)
            if not asked:
                fail(f"--prompts: none of {unseen} answers is long enough to be timed")
            rows = measure(entries, models, home, ours(engine), asked, turns)
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "tokens": tokens}
    figures = {**about, "after": after, "turns": turns, "peers": [asdict(row) for row in rows]}
    conclude([table(rows)], figures, json_file)


@dataclass(frozen=True)
class Row:
    """A peer's tokens a second, prefill included, and ours within the same turn, each divided by it.

    ``same`` is the share of its tokens that are ours at the same place. ``problem`` says why there are no figures.
    """

    peer: str
    version: str = ""
    tokens_per_second: Spread | None = None
    plain: Spread | None = None
    plain_ratio: Spread | None = None
    speculative: Spread | None = None
    speculative_ratio: Spread | None = None
    same: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Asked:
    """A prompt, and how many tokens the target answers with before it ends, as far as that was looked at."""

    prompt: tuple[int, ...]
    answer: int


Ours = Callable[[Sequence[Sequence[int]], int, bool], tuple[float, list[list[int]]]]
"""Decodes prompts on our engine, so many tokens each, speculatively or not: seconds and tokens."""


def ours(engine: Engine) -> Ours:
    """Our engine as it is configured; nothing of what it decodes is remembered."""

    def run(prompts: Sequence[Sequence[int]], tokens: int, speculate: bool) -> tuple[float, list[list[int]]]:
        greedy = SamplingParams(temperature=0)
        requests = [
            Request(str(n), tuple(prompt), tokens, greedy, ignore_eos=True, speculate=speculate, capture=False)
            for n, prompt in enumerate(prompts)
        ]
        return decode(engine, requests)

    return run


def serve(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
    """Answer prompts of the stream one after the other, up to ``tokens`` each; drafters that remember do."""
    for number, prompt in enumerate(prompts):
        decode(engine, [Request(f"served-{number}", prompt, tokens, SamplingParams(temperature=0))])


def answered(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[Asked]:
    """Prompts with the lengths of our plain greedy answers: up to ``tokens``, and what is shorter than 8 left out.

    What a model goes on to write behind the end of its answer repeats itself, and would flatter whoever copies.
    """
    greedy = SamplingParams(temperature=0)
    found = []
    for number, prompt in enumerate(prompts):
        _, (answer,) = decode(engine, [Request(str(number), prompt, tokens, greedy, speculate=False, capture=False)])
        found.append(Asked(prompt, len(answer)))
    return [one for one in found if one.answer >= _SHORTEST]


def measure(
    chosen: Mapping[str, Entry],
    models: Models,
    home: Path,
    run: Ours,
    asked: Sequence[Asked],
    turns: int,
) -> list[Row]:
    """One row for each peer, whatever became of it.

    Args:
        chosen: the peers.
        models: what they decode with.
        home: where their environments are.
        run: our engine.
        asked: ``models.streams`` a turn, in order and from the start again; all of a turn get as many tokens as the
            shortest answer of theirs.
        turns: to take medians of, after one to warm up.
    """
    rows = []
    for name, entry in chosen.items():
        say(f"{name}: starting")
        try:
            load = entry.load(models)  # what has nothing to decode with needs no environment
            python = Path(sys.executable) if entry.environment is None else entry.environment.python(home, say)
            shared = {"OMP_NUM_THREADS": str(models.threads), "HF_HUB_OFFLINE": "1"}
            environment = shared | entry.variables(models, python.parent.parent)
            with Worker(command(python, entry.script), load, environment) as worker:
                rows.append(compare(name, worker, run, asked, models.streams, turns))
        except PeerError as error:
            say(f"{name}: {error}")
            rows.append(Row(name, problem=str(error)))
    return rows


def compare(name: str, worker: Worker, run: Ours, asked: Sequence[Asked], streams: int, turns: int) -> Row:
    """Let a peer and both ways of ours decode the same prompts in turns."""

    def of_turn(decode: Ours, speculate: bool, way: str, turn: int) -> tuple[float, list[list[int]]]:
        mine = [asked[(turn * streams + n) % len(asked)] for n in range(streams)]
        tokens = min(one.answer for one in mine)
        seconds, ids = decode([one.prompt for one in mine], tokens, speculate)
        if [len(row) for row in ids] != [tokens] * streams:
            raise PeerError(f"{way} decoded {[len(row) for row in ids]} tokens, not {tokens} of each prompt")
        return streams * tokens / seconds, ids

    ways = {
        "peer": partial(of_turn, lambda prompts, tokens, speculate: worker.decode(prompts, tokens), False, "peer"),
        "plain": partial(of_turn, run, False, "plain"),
        "speculative": partial(of_turn, run, True, "speculative"),
    }
    found = by_way(in_turns(ways, turns, lambda step: say(f"{name}: {step}")))
    peer, plain, speculative = ([speed for speed, _ in found[way]] for way in ways)
    pairs = [
        a == b
        for (_, theirs), (_, mine) in zip(found["peer"], found["plain"], strict=True)
        for one, other in zip(theirs, mine, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return Row(
        name,
        worker.version,
        Spread.of(peer),
        Spread.of(plain),
        ratios(plain, peer),
        Spread.of(speculative),
        ratios(speculative, peer),
        sum(pairs) / len(pairs),
    )


def table(rows: Sequence[Row]) -> Table:
    """Make a table of medians with their spread, and of what kept a peer from being measured."""
    names = ("tokens/s", "ours plain", "is times it", "ours speculative", "is times it", "same", "version or problem")
    table, digits = Table("", ("peer", *names), []), (1, 1, 2, 1, 2)
    for row in rows:
        spreads = (row.tokens_per_second, row.plain, row.plain_ratio, row.speculative, row.speculative_ratio)
        cells = ["" if spread is None else spread.text(digits=d) for spread, d in zip(spreads, digits, strict=True)]
        same = "" if row.same is None else f"{row.same:.2f}"
        table.rows.append((row.peer, *cells, same, row.problem or row.version))
    return table
