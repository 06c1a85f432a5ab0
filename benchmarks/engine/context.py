"""``osd bench context``: drafts that read selected tokens of a long context, verified over all tokens."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import typer
from transformers import AutoConfig

from benchmarks.engines import BenchError, engine_with, loading, running
from benchmarks.streams import decoding_rate, updates_of
from osd import drafting
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.config import ChainSettings, TokenSelectSettings, drafter_of
from osd.drafting.token_select import TokenSelectSession
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.target.load import target_directory

_DEEPEST = 3  # tokens of a draft


def context(
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", min=512, max=1 << 20, help="Tokens of a context; repeat the option for several."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to read; default: Python's language reference.", exists=True, dir_okay=False),
    ] = None,
    thresholds: Annotated[
        list[float] | None,
        typer.Option(
            "--threshold",
            min=0,
            max=1,
            help="Selection threshold; default: the configured one. Repeat the option for several.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 64,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure token selection on long contexts."""
    settings = settings_of(config, overrides)
    check_files(json_file)
    sizes = sorted(set(lengths or [1024 << power for power in range(6)]))
    selection = drafter_of("token_select", settings.drafter)
    assert isinstance(selection, TokenSelectSettings)  # noqa: S101  the requested kind
    about = {"target": settings.target.source, "settings": selection.model_dump()}
    context = sizes[-1] + tokens
    engine_settings = settings.engine.model_copy(
        update={"slots": 1, "context": context, "prefill_chunk": 512, "prefix_cache": True}
    )
    growth = ChainSettings(depth=_DEEPEST, governed=False)
    settings = settings.model_copy(update={"engine": engine_settings, "drafter": selection, "growth": growth})
    with loading(), extend_context(target_directory(settings), context) as directory:
        drafter = drafting.initial(selection, directory, settings.cache_dir)
        engine = engine_with(settings, directory, drafter)
    ids = _ids(engine.tokenizer, text, sizes[-1])
    with running(engine):
        speeds = list(measure(engine, ids, sizes, thresholds or [selection.threshold], tokens))
    figures = {**about, "drafting": [asdict(speed) for speed in speeds]}
    conclude([table(speeds)], figures, json_file, notes=[break_even_note(speeds)])


def _ids(tokenizer: Any, text: Path | None, least: int) -> list[int]:
    """Return the token ids of the text, or of Python's language reference; end the command if there are too few."""
    content = text.read_text(encoding="utf-8") if text else "\n\n".join(part for _, part in sorted(topics.items()))
    ids: list[int] = tokenizer(content, add_special_tokens=False)["input_ids"]
    if len(ids) < least:
        fail(f"--text has {len(ids)} tokens, but --length asks for {least}")
    return ids


@contextmanager
def extend_context(directory: Path, longest: int) -> Generator[Path]:
    """Yield a target that reads ``longest`` tokens: ``directory``, or a copy with YaRN (Peng et al., ICLR 2024)."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    trained = int(config.max_position_embeddings)
    if longest <= trained:
        yield directory
        return
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for file in directory.iterdir():
            if file.suffix == ".safetensors":
                (copy / file.name).symlink_to(file.resolve())
            elif file.is_file():
                shutil.copy(file, copy)
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": "yarn",
            "factor": longest / trained,
            "original_max_position_embeddings": trained,
        }
        config.save_pretrained(copy)
        yield copy


@dataclass(frozen=True)
class ContextSpeed:
    """Speed of greedy answers after ``length`` tokens of a text."""

    length: int  # tokens of the context
    threshold: float  # cosine similarity from which an earlier selection is reused
    plain: float  # tokens per second of plain decoding
    drafted: float  # tokens per second with drafts
    acceptance: float  # accepted / drafted tokens of drafts over selected tokens
    full_acceptance: float  # accepted / drafted tokens of drafts over all tokens
    made: float  # share of selections that were computed again
    same: bool  # True if all answers are equal


def measure(
    engine: Engine, text: Sequence[int], lengths: Sequence[int], thresholds: Sequence[float], tokens: int
) -> Iterator[ContextSpeed]:
    """Decode an answer after each of the ascending ``lengths`` of ``text``; each call reads only the new tokens.

    Raises:
        BenchError: the engine's drafter is of another kind.
    """
    session = None if engine.pool is None else engine.pool.default.session
    if not isinstance(session, TokenSelectSession):
        raise BenchError("drafter.kind must be token_select: other drafters do not select tokens")
    selection, sizes = session.selection, session.selection.sizes
    for length in lengths:
        say(f"answers after {length} tokens")
        prompt = text[:length]
        _answer(engine, "reading", prompt, 2, speculate=False)
        plain, expected, _ = _answer(engine, "plain", prompt, tokens, speculate=False)
        session.selection = selection.resized(replace(sizes, top=engine.target.context))
        _, full_answer, full_acceptance = _answer(engine, "everything", prompt, tokens, speculate=True)
        for threshold in thresholds:
            session.selection = selection.resized(replace(sizes, threshold=threshold))
            drafted, answer, acceptance = _answer(engine, "drafted", prompt, tokens, speculate=True)
            made, kept = session.selection.counts.tolist()
            same = expected == answer == full_answer
            yield ContextSpeed(
                length, threshold, plain, drafted, acceptance, full_acceptance, made / max(made + kept, 1), same
            )


def _answer(
    engine: Engine, name: str, prompt: Sequence[int], tokens: int, speculate: bool
) -> tuple[float, list[int], float]:
    """Return tokens per second of decoding, the answer, and the acceptance rate of its drafts."""
    request = Request(
        name, tuple(prompt), tokens, SamplingParams(temperature=0.0), ignore_eos=True, speculate=speculate
    )
    arrivals: dict[str, list[tuple[float, int]]] = {name: []}
    answer: list[int] = []
    rate = 0.0
    for moment, update in updates_of(engine, [request]):
        arrivals[name].append((moment, len(update.token_ids)))
        answer += update.token_ids
        if update.counts is not None and update.counts.drafted:
            rate = update.counts.accepted / update.counts.drafted
    return decoding_rate(arrivals), answer, rate


def table(speeds: Sequence[ContextSpeed]) -> Table:
    """Return a table with a row for each length and threshold."""
    names = (
        "tokens", "threshold", "plain, tokens/s", "drafted", "times plain", "acceptance", "over everything", "ratio",
        "choices made", "same text",
    )  # fmt: skip
    rows = [
        (
            str(speed.length), f"{speed.threshold:g}", f"{speed.plain:.1f}", f"{speed.drafted:.1f}",
            f"{speed.drafted / speed.plain:.2f}", f"{speed.acceptance:.3f}", f"{speed.full_acceptance:.3f}",
            f"{speed.acceptance / speed.full_acceptance:.2f}", f"{speed.made:.0%}",
            "yes" if speed.same else "NO",
        )
        for speed in speeds
    ]  # fmt: skip
    return Table("", names, rows)


def break_even_note(speeds: Sequence[ContextSpeed]) -> str:
    """Return a sentence with the length from which drafting is faster than plain decoding at some threshold."""
    lengths = sorted({speed.length for speed in speeds})
    best = {
        length: max(speed.drafted / speed.plain for speed in speeds if speed.length == length) for length in lengths
    }
    slower = [length for length, ratio in best.items() if ratio <= 1]
    faster = [length for length in best if length > max(slower, default=0)]
    return f"drafting is faster from {min(faster)} tokens on" if faster else "drafting is faster at no measured length"
