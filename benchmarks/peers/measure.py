"""``osd bench peers``: other engines and our engine on the same prompts and lengths, greedily, in turns."""

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

from benchmarks import engines
from benchmarks.options import After, Parallel, Prompts, Tokens, Turns
from benchmarks.peers.environments import PeerError
from benchmarks.peers.models import write_drafter, write_first_layers
from benchmarks.peers.roster import PEERS, PeerEntry, PeerModels
from benchmarks.peers.worker_process import WorkerProcess, command
from benchmarks.streams import decode
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.config import LanguageModelSettings
from osd.drafting.language_model.drafter import LanguageModel
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.target.load import gguf_of, target_directory
from osd.traffic import load

_SHORTEST = 8  # tokens of the shortest answer that is timed


def peers(
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Peer to measure; repeat the option for several. Default: all.", metavar="NAME"),
    ] = None,
    streams: Parallel = 1,
    turns: Turns = 5,
    tokens: Tokens = 96,
    draft: Annotated[
        str, typer.Option(help="recall, mixed, or a kind of osd bench decode --draft.", metavar="KIND")
    ] = "recall",
    prompts: Prompts = "unittest",
    after: After = 200,
    unseen: Annotated[int, typer.Option(min=1, help="Number of following prompts to measure on.")] = 24,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare with other engines, each in its own environment.

    All engines get the same prompts, lengths and threads and decode greedily, in turns; an answer ends where the target
    ends it. If a peer cannot be installed or run, its row shows the reason. Peers that draft with a small model get our
    drafter if it is one, or else the first layers of the target.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    engines.check_draft(draft, recalling=True)
    for name in peer or ():
        if name not in PEERS:
            fail(f"--peer must be one of {', '.join(PEERS)}, not {name}")
    engines.check_slots(settings, streams)
    cache = settings.cache_dir
    with tempfile.TemporaryDirectory() as scratch:
        with engines.loading():
            texts = load(prompts)
            directory = target_directory(settings, say)
            gguf = gguf_of(settings.target.source, cache, say)
            drafter, name = engines.find_drafter(settings, draft, directory)
            engine = engines.engine_with(engines.without_prefix_cache(settings), directory, drafter)
            small, draft_gguf = drafter, None
            if not isinstance(small, LanguageModel):
                chosen = settings.drafter
                small_settings = LanguageModelSettings()
                if chosen.kind == "language_model":
                    small_settings = chosen.model_copy(update={"source": None})
                layers = settings.model_copy(update={"drafter": small_settings})
                small, _ = engines.find_drafter(layers, "language_model", directory)
                if gguf is not None:
                    folder = Path(scratch, "gguf")
                    folder.mkdir()
                    draft_gguf = write_first_layers(gguf, small_settings.layers, folder / "draft.gguf")
            assert isinstance(small, LanguageModel)  # noqa: S101 - a language model in both cases
            models = PeerModels(
                directory,
                settings.target.dtype,
                engine.target.context,
                settings.engine.threads or os.cpu_count() or 1,
                streams,
                gguf,
                write_drafter(small, settings.target.dtype, Path(scratch, "draft")),
                draft_gguf,
            )
        token_ids = engines.encode_short(
            engine.tokenizer, texts, engine.target.context - tokens, prompts, after + unseen
        )
        entries = {key: entry for key, entry in PEERS.items() if peer is None or key in peer}
        with engines.running(engine):
            say(f"serving {after} prompts")
            serve(engine, token_ids[:after], tokens)
            answered = answer_prompts(engine, token_ids[after : after + unseen], tokens)
            if not answered:
                fail(f"--prompts: none of {unseen} answers is long enough to be timed")
            rows = measure(entries, models, cache, engine_runner(engine), answered, turns)
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "tokens": tokens}
    figures = {**about, "after": after, "turns": turns, "peers": [asdict(row) for row in rows]}
    conclude([table(rows)], figures, json_file)


@dataclass(frozen=True)
class PeerResult:
    """Speed of a peer, prompts included, and of our engine in the same turn, with ratios of ours to the peer's.

    ``same`` is the share of the peer's tokens that equal ours at the same position. ``problem`` is the reason for
    missing figures.
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
class AnsweredPrompt:
    """Prompt with the ``length`` of the target's answer in tokens."""

    prompt: tuple[int, ...]
    length: int


EngineRunner = Callable[[Sequence[Sequence[int]], int, bool], tuple[float, list[list[int]]]]
"""Function that decodes prompts on our engine: (prompts, tokens, speculate) -> (seconds, token ids)."""


def engine_runner(engine: Engine) -> EngineRunner:
    """Return a runner of our engine as configured, which does not learn from the decoded prompts."""

    def run(prompts: Sequence[Sequence[int]], tokens: int, speculate: bool) -> tuple[float, list[list[int]]]:
        greedy = SamplingParams(temperature=0)
        requests = [
            Request(str(n), tuple(prompt), tokens, greedy, ignore_eos=True, speculate=speculate, capture=False)
            for n, prompt in enumerate(prompts)
        ]
        return decode(engine, requests)

    return run


def serve(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> None:
    """Answer the prompts of the stream one after another, up to ``tokens`` tokens each; recall learns the answers."""
    for number, prompt in enumerate(prompts):
        decode(engine, [Request(f"served-{number}", prompt, tokens, SamplingParams(temperature=0))])


def answer_prompts(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[AnsweredPrompt]:
    """Answer prompts plainly and greedily with our engine, and return them with the lengths of their answers.

    An answer ends after at most ``tokens`` tokens. Prompts with answers of fewer than 8 tokens are left out. No engine
    is measured beyond these lengths: text after the end of an answer repeats itself, which favours engines that copy.
    """
    greedy = SamplingParams(temperature=0)
    answered = []
    for number, prompt in enumerate(prompts):
        _, (answer,) = decode(engine, [Request(str(number), prompt, tokens, greedy, speculate=False, capture=False)])
        answered.append(AnsweredPrompt(prompt, len(answer)))
    return [prompt for prompt in answered if prompt.length >= _SHORTEST]


def measure(
    chosen: Mapping[str, PeerEntry],
    models: PeerModels,
    cache: Path,
    run: EngineRunner,
    prompts: Sequence[AnsweredPrompt],
    turns: int,
) -> list[PeerResult]:
    """Return a result for each peer, with a problem if the peer failed.

    Each turn takes ``models.streams`` prompts in order, repeated from the start, and decodes as many tokens as their
    shortest answer has. The first turn is the warm-up; ``turns`` turns follow.
    """
    rows = []
    for name, entry in chosen.items():
        say(f"{name}: starting")
        try:
            load = entry.load(models)  # before the installation, because it fails if there is no model for the peer
            python = Path(sys.executable) if entry.environment is None else entry.environment.python(cache, say)
            shared = {"OMP_NUM_THREADS": str(models.threads), "HF_HUB_OFFLINE": "1"}
            environment = shared | entry.variables(models, python.parent.parent)
            with WorkerProcess(command(python, entry.script), load, environment) as worker:
                rows.append(compare(name, worker, run, prompts, models.streams, turns))
        except PeerError as error:
            say(f"{name}: {error}")
            rows.append(PeerResult(name, problem=str(error)))
    return rows


def compare(
    name: str, worker: WorkerProcess, run: EngineRunner, prompts: Sequence[AnsweredPrompt], streams: int, turns: int
) -> PeerResult:
    """Let a peer and both ways of our engine decode the same prompts in turns."""

    def of_turn(decode: EngineRunner, speculate: bool, way: str, turn: int) -> tuple[float, list[list[int]]]:
        batch = [prompts[(turn * streams + n) % len(prompts)] for n in range(streams)]
        tokens = min(prompt.length for prompt in batch)
        seconds, ids = decode([prompt.prompt for prompt in batch], tokens, speculate)
        if [len(row) for row in ids] != [tokens] * streams:
            raise PeerError(f"{way} decoded {[len(row) for row in ids]} tokens, not {tokens} of each prompt")
        return streams * tokens / seconds, ids

    ways = {
        "peer": partial(of_turn, lambda prompts, tokens, speculate: worker.decode(prompts, tokens), False, "peer"),
        "plain": partial(of_turn, run, False, "plain"),
        "speculative": partial(of_turn, run, True, "speculative"),
    }
    by_name = by_way(in_turns(ways, turns, lambda step: say(f"{name}: {step}")))
    peer, plain, speculative = ([speed for speed, _ in by_name[way]] for way in ways)
    equal = [
        a == b
        for (_, peer_ids), (_, our_ids) in zip(by_name["peer"], by_name["plain"], strict=True)
        for peer_row, our_row in zip(peer_ids, our_ids, strict=True)
        for a, b in zip(peer_row, our_row, strict=True)
    ]
    return PeerResult(
        name,
        worker.version,
        Spread.of(peer),
        Spread.of(plain),
        ratios(plain, peer),
        Spread.of(speculative),
        ratios(speculative, peer),
        sum(equal) / len(equal),
    )


def table(rows: Sequence[PeerResult]) -> Table:
    """Return a table of medians with their spread, and of the problems."""
    names = ("tokens/s", "ours, plain", "times peer", "ours, speculative", "times peer", "same", "version or problem")
    table, digits = Table("", ("peer", *names), []), (1, 1, 2, 1, 2)
    for row in rows:
        spreads = (row.tokens_per_second, row.plain, row.plain_ratio, row.speculative, row.speculative_ratio)
        cells = ["" if spread is None else spread.text(digits=d) for spread, d in zip(spreads, digits, strict=True)]
        same = "" if row.same is None else f"{row.same:.2f}"
        table.rows.append((row.peer, *cells, same, row.problem or row.version))
    return table
