"""``osd bench context``: the target drafts over selected tokens of a long context, and verifies over all of them."""

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
from osd.cli.report import Json, Table, check_files, conclude, say
from osd.config import ChainSettings, TokenSelectSettings, drafter_of
from osd.drafting.token_select import TokenSelectSession
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.target.load import target_directory

_DEEPEST = 3  # tokens of a draft


def context(
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", min=512, max=1 << 20, help="Tokens of a context. May be given again."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text to read, by default Python's own language reference.", exists=True, dir_okay=False),
    ] = None,
    thresholds: Annotated[
        list[float] | None,
        typer.Option(
            "--threshold",
            min=0,
            max=1,
            help="Threshold of drafting, by default that of the settings. May be given again.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 64,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure token selection on long contexts."""
    settings = settings_of(config, overrides)
    check_files(json_file)
    asked = sorted(set(lengths or [1024 << power for power in range(6)]))
    given = drafter_of("token_select", settings.drafter)
    assert isinstance(given, TokenSelectSettings)  # noqa: S101  the kind that was asked for
    about = {"target": settings.target.source, "settings": given.model_dump()}
    engine_settings = settings.engine.model_copy(
        update={"slots": 1, "context": asked[-1] + tokens, "prefill_chunk": 512, "prefix_cache": True}
    )
    growth = ChainSettings(depth=_DEEPEST, governed=False)
    settings = settings.model_copy(update={"engine": engine_settings, "drafter": given, "growth": growth})
    with loading(), reaching(target_directory(settings), engine_settings.context) as directory:
        drafter = drafting.initial(given, directory, settings.home_dir)
        engine = engine_with(settings, directory, drafter)
    ids = _ids(engine.tokenizer, text, asked[-1])
    with running(engine):
        found = list(measure(engine, ids, asked, thresholds or [given.threshold], tokens))
    figures = {**about, "drafting": [asdict(one) for one in found]}
    conclude([table(found)], figures, json_file, notes=[pays(found)])


def _ids(tokenizer: Any, text: Path | None, least: int) -> list[int]:
    """The tokens of the text, or of Python's language reference."""
    written = text.read_text(encoding="utf-8") if text else "\n\n".join(part for _, part in sorted(topics.items()))
    ids: list[int] = tokenizer(written, add_special_tokens=False)["input_ids"]
    if len(ids) < least:
        fail(f"--text has {len(ids)} tokens, and a context of {least} was asked for")
    return ids


@contextmanager
def reaching(directory: Path, longest: int) -> Generator[Path]:
    """The target in ``directory``, with YaRN (Peng et al., ICLR 2024) where it was trained on less than ``longest``."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    trained = int(config.max_position_embeddings)
    if longest <= trained:
        yield directory
        return
    with tempfile.TemporaryDirectory() as made:
        there = Path(made)
        for file in directory.iterdir():
            if file.suffix == ".safetensors":
                (there / file.name).symlink_to(file.resolve())
            elif file.is_file():
                shutil.copy(file, there)
        config.rope_parameters = {
            **config.rope_parameters,
            "rope_type": "yarn",
            "factor": longest / trained,
            "original_max_position_embeddings": trained,
        }
        config.save_pretrained(there)
        yield there


@dataclass(frozen=True)
class Drafting:
    """Greedy answers behind ``length`` tokens of a text, ``plain`` and ``drafted``, in tokens a second.

    Choices are kept from the cosine ``threshold`` on, and ``made`` is the share of those that were not kept ones.
    ``acceptance`` is accepted / drafted with selected tokens, and ``full_acceptance`` with all of them. All answers are
    the ``same``.
    """

    length: int
    threshold: float
    plain: float
    drafted: float
    acceptance: float
    full_acceptance: float
    made: float
    same: bool


def measure(
    engine: Engine,
    text: Sequence[int],
    lengths: Sequence[int],
    thresholds: Sequence[float],
    tokens: int,
) -> Iterator[Drafting]:
    """Answer after each of the ascending ``lengths`` of ``text``; each call reads only the new tokens.

    Raises:
        BenchError: the engine drafts otherwise.
    """
    session = None if engine.pool is None else engine.pool.default.session
    if not isinstance(session, TokenSelectSession):
        raise BenchError("only token_select drafts over selected tokens")
    selection, sizes = session.selection, session.selection.sizes
    for length in lengths:
        say(f"answers behind {length} tokens")
        prompt = text[:length]
        _answer(engine, "reading", prompt, 2, speculate=False)
        plain, goal, _ = _answer(engine, "plain", prompt, tokens, speculate=False)
        session.selection = selection.resized(replace(sizes, top=engine.settings.engine.context))
        _, everything, full = _answer(engine, "everything", prompt, tokens, speculate=True)
        for threshold in thresholds:
            session.selection = selection.resized(replace(sizes, threshold=threshold))
            drafted, found, acceptance = _answer(engine, "drafted", prompt, tokens, speculate=True)
            made, kept = session.selection.counts.tolist()
            same = goal == found == everything
            yield Drafting(length, threshold, plain, drafted, acceptance, full, made / max(made + kept, 1), same)


def _answer(
    engine: Engine, name: str, prompt: Sequence[int], tokens: int, speculate: bool
) -> tuple[float, list[int], float]:
    """Tokens a second while it decodes, the answer, and the share of its draft that was accepted."""
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


def table(found: Sequence[Drafting]) -> Table:
    """Make a table with a row for each length and threshold."""
    names = (
        "tokens", "threshold", "plain, tokens/s", "drafted", "times plain", "acceptance", "over everything", "ratio",
        "choices made", "same text",
    )  # fmt: skip
    rows = [
        (
            str(one.length), f"{one.threshold:g}", f"{one.plain:.1f}", f"{one.drafted:.1f}",
            f"{one.drafted / one.plain:.2f}", f"{one.acceptance:.3f}", f"{one.full_acceptance:.3f}",
            f"{one.acceptance / one.full_acceptance:.2f}", f"{one.made:.0%}",
            "yes" if one.same else "NO",
        )
        for one in found
    ]  # fmt: skip
    return Table("", names, rows)


def pays(found: Sequence[Drafting]) -> str:
    """From which length on drafting is faster than plain decoding at some threshold, in a sentence."""
    lengths = sorted({one.length for one in found})
    best = {length: max(one.drafted / one.plain for one in found if one.length == length) for length in lengths}
    slower = [length for length, speed in best.items() if speed <= 1]
    faster = [length for length in best if length > max(slower, default=0)]
    return f"drafting pays from {min(faster)} tokens on" if faster else "drafting pays at no length that was measured"
