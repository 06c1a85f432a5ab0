"""``osd bench prediction``: the speed-up by a prediction of the answer, right for the most part or useless."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from benchmarks import engines
from benchmarks.options import Prompts, Tokens, TopP, Turns
from benchmarks.streams import TokenTimes, answers_of, decoding_rate, updates_of, wait_until_idle
from benchmarks.turns import Spread, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, Temperature, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude
from osd.config import BestFirstSettings
from osd.drafting.recall.drafter import Recall
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.runtime.machine import Machine
from osd.target.load import target_directory
from osd.traffic import load

PLAIN, RECALL, PREDICTED, USELESS = "plain", "without", "prediction", "useless"
_LINE, _EVERY = 12, 20  # tokens of a line, and number of lines for each changed line
_USELESS = 2000
"""Tokens of a useless prediction."""


def prediction(
    stream: Prompts = "unittest",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 5,
    tokens: Tokens = 400,
    turns: Turns = 3,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure the speed-up by a prediction of the answer.

    Recall's table is empty. The prediction is the target's own answer with one line of 12 tokens in twenty changed. A
    useless prediction has 2,000 tokens of another text. No answer depends on a prediction, up to rounding on GPUs.
    """
    settings = settings_of(config, overrides)
    check_files(json_file)
    with engines.loading():
        texts = load(stream)
        directory = target_directory(settings)
        growth = settings.growth if settings.growth.kind == "best_first" else BestFirstSettings()
        settings = settings.model_copy(update={"growth": growth, "verification": None})
        engine = engines.engine_with(settings, directory, Recall())
    longest = engine.target.context - tokens
    token_ids = engines.encode_short(engine.tokenizer, texts, longest, stream, prompts)[:prompts]
    useless = _useless(engine, [text.turns[0] for text in texts])
    sampling = SamplingParams(temperature=temperature, top_p=top_p, repeatable=temperature > 0)
    results: list[PredictionResult] = []
    with engines.running(engine):
        for number, prompt in enumerate(token_ids):
            results.append(_measure(engine, number, prompt, tokens, replace(sampling, seed=number), useless, turns))
    about = {"target": settings.target.source, "stream": stream, "tokens": tokens, "turns": turns}
    about |= {"temperature": temperature, "top_p": top_p, "machine": asdict(Machine.here())}
    figures = {**about, "prompts": [asdict(result) for result in results]}
    typer.echo(json.dumps(figures))
    conclude([table(results)], figures, json_file, stderr=True)


@dataclass(frozen=True)
class PredictionResult:
    """Ratios of speeds for a prompt, within each turn: over plain decoding, and useless over no prediction.

    ``accepted`` and ``drafted`` are draft tokens with the prediction. ``different`` is the number of answers that are
    not equal to plain decoding's.
    """

    prompt: int
    without: Spread
    prediction: Spread
    useless: Spread
    accepted: int
    drafted: int
    different: int


def _useless(engine: Engine, texts: Sequence[str]) -> tuple[int, ...]:
    """Return tokens of the last texts of the stream."""
    ids: list[int] = []
    for text in reversed(texts):
        ids += engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= _USELESS:
            break
    return tuple(ids[: min(_USELESS, engine.target.context)])


def changed(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return tokens with one line of ``_LINE`` tokens in ``_EVERY`` reversed."""
    lines = [list(tokens[start : start + _LINE]) for start in range(0, len(tokens), _LINE)]
    return tuple(
        token for number, line in enumerate(lines) for token in (line[::-1] if number % _EVERY == _EVERY // 2 else line)
    )


def _measure(
    engine: Engine, number: int, prompt: tuple[int, ...], tokens: int, sampling: SamplingParams,
    useless: tuple[int, ...], turns: int,
) -> PredictionResult:  # fmt: skip
    plain = Request(f"{number}", prompt, tokens, sampling, ignore_eos=True, speculate=False)
    (answer,) = answers_of(engine, [plain]).values()
    guesses = {RECALL: (), PREDICTED: changed(answer.tokens), USELESS: useless}
    counts, different = SpeculationCounts(), list[str]()

    def run(way: str, turn: int) -> float:
        name = f"{number}-{way}-{turn}"
        request = replace(plain, id=name, speculate=way != PLAIN, prediction=guesses.get(way, ()))
        arrivals: TokenTimes = defaultdict(list)
        received: list[int] = []
        for moment, update in updates_of(engine, [request]):
            arrivals[name].append((moment, len(update.token_ids)))
            received += update.token_ids
            if way == PREDICTED and update.counts is not None:
                counts.add(update.counts)
        different.extend([way] * (received != answer.tokens))
        wait_until_idle(engine)
        return decoding_rate(arrivals)

    speeds: dict[str, list[float]] = defaultdict(list)
    for way, speed in in_turns({way: lambda turn, way=way: run(way, turn) for way in (PLAIN, *guesses)}, turns):
        speeds[way].append(speed)
    return PredictionResult(
        number,
        ratios(speeds[RECALL], speeds[PLAIN]),
        ratios(speeds[PREDICTED], speeds[PLAIN]),
        ratios(speeds[USELESS], speeds[RECALL]),
        counts.accepted,
        counts.drafted,
        len(different),
    )


def table(results: Sequence[PredictionResult]) -> Table:
    """Return the table: a row for each prompt, and a last row with the medians over the prompts."""
    columns = (
        "no prediction, x plain",
        "prediction, x plain",
        "useless, x no prediction",
        "accepted",
        "drafted",
        "different answers",
    )
    made = Table("predictions", ("prompt", *columns), list(_rows(results)))
    medians = (Spread.of([getattr(result, name).median for result in results]) for name in (RECALL, PREDICTED, USELESS))
    made.rows.append(("all", *(spread.text() for spread in medians), "", "", ""))
    return made


def _rows(results: Sequence[PredictionResult]) -> Iterator[tuple[Any, ...]]:
    for result in results:
        spreads = (spread.text() for spread in (result.without, result.prediction, result.useless))
        yield (str(result.prompt), *spreads, str(result.accepted), str(result.drafted), str(result.different))
