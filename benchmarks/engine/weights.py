"""``osd bench weights``: quality and speed of int8 weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.engines import CONTEXT, encode_short, loading, plain_engine, running
from benchmarks.options import Prompts, Tokens
from benchmarks.streams import decode
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, fail, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.config import NoDrafterSettings
from osd.engine.request import Request, SamplingParams
from osd.runtime.batch import consecutive_rows
from osd.runtime.device import several_cores
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from osd.target.model import load_model
from osd.traffic import load

ROWS = (1, 4, 8)
_CHUNK = 64  # rows of a forward while texts are read
_REPEATS = 25


def weights(
    prompts: Prompts = "unittest",
    texts: Annotated[int, typer.Option(min=1, help="Number of texts to compare the weights on.")] = 16,
    tokens: Tokens = 96,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare int8 weights of the target with full ones."""
    forced_settings = ["target.weights=full", "target.device=cpu", f"engine.context={CONTEXT}"]
    settings = settings_of(config, [*(overrides or ()), *forced_settings])
    settings = settings.model_copy(update={"drafter": NoDrafterSettings()})
    check_files(json_file)
    if kernels() is None:
        fail("target.weights int8 needs the compiled kernels and a CPU with AVX2")
    with loading():
        loaded = load(prompts)
        engine, directory = plain_engine(settings)
        model = load_model(directory, settings.target.dtype, "cpu")
        narrow = SlotModel(model, slots=1, context=CONTEXT, scratch=1, weights="int8")
    token_ids = encode_short(engine.tokenizer, loaded, CONTEXT - tokens, prompts)[:texts]
    say(f"drawing {len(token_ids)} texts of {tokens} tokens")
    with running(engine):
        requests = [
            Request(str(n), prompt, tokens, SamplingParams(temperature=1.0, seed=n), ignore_eos=True, speculate=False)
            for n, prompt in enumerate(token_ids)
        ]
        _, answers = decode(engine, requests)
    several_cores(settings.engine.threads)
    say("reading the texts with both weights")
    completions = [((*prompt, *answer), len(prompt)) for prompt, answer in zip(token_ids, answers, strict=True)]
    result, times = quality(engine.target, narrow, completions), speedups(engine.target, narrow)
    figures = {"quality": asdict(result), "forwards": {count: asdict(time) for count, time in times.items()}}
    conclude([table(result, times)], {"target": settings.target.source, **figures}, json_file)


@dataclass(frozen=True)
class WeightQuality:
    """Agreement of q, with int8 weights, with p, with full weights, at ``positions`` of texts drawn from p."""

    positions: int
    divergence: float  # mean of KL(p || q) in nats
    overlap: float  # mean of sum min(p, q)
    agreement: float  # share of positions with the same most probable token
    perplexity: tuple[float, float]  # perplexity of the texts under p and under q


@torch.inference_mode()
def quality(full: SlotModel, narrow: SlotModel, texts: Sequence[tuple[Sequence[int], int]]) -> WeightQuality:
    """Read texts with both models, and compare the distributions after the prompts.

    Each text has its token ids and the length of its prompt; the tokens after the prompt were drawn from ``full``.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    positions = 0
    for ids, prompt in texts:
        p, q = (_after(model, ids, prompt).double().log_softmax(-1) for model in (full, narrow))
        drawn = torch.tensor(list(ids[prompt:]))[:, None]
        sums += torch.stack(
            [
                (p.exp() * (p - q)).sum(),
                torch.minimum(p.exp(), q.exp()).sum(),
                (p.argmax(-1) == q.argmax(-1)).sum(),
                -p.gather(-1, drawn).sum(),
                -q.gather(-1, drawn).sum(),
            ]
        )
        positions += len(drawn)
    divergence, overlap, agreement, by_full, by_narrow = (sums / positions).tolist()
    perplexity = (float(torch.tensor(by_full).exp()), float(torch.tensor(by_narrow).exp()))
    return WeightQuality(positions, divergence, overlap, agreement, perplexity)


@dataclass(frozen=True)
class ForwardTimes:
    """Milliseconds of a forward with full and with int8 weights, and their ratio."""

    full: Spread
    int8: Spread
    ratio: Spread


@torch.inference_mode()
def speedups(full: SlotModel, narrow: SlotModel) -> dict[int, ForwardTimes]:
    """Return the times of forwards of each number of tokens in ``ROWS``, in turns, by this number."""
    times = {}
    for count in ROWS:

        def milliseconds(model: SlotModel, count: int = count) -> float:
            start = time.perf_counter()
            model.forward(consecutive_rows(0, 32, [5] * count), torch.arange(count))
            return (time.perf_counter() - start) * 1e3

        ways = {"full": lambda turn, run=milliseconds: run(full), "int8": lambda turn, run=milliseconds: run(narrow)}
        turns = by_way(in_turns(ways, _REPEATS))
        full_times, int8_times = turns["full"], turns["int8"]
        times[count] = ForwardTimes(Spread.of(full_times), Spread.of(int8_times), ratios(full_times, int8_times))
    return times


def table(quality: WeightQuality, times: dict[int, ForwardTimes]) -> Table:
    """Return a table of int8 weights compared with full weights."""
    full, int8 = quality.perplexity
    rows: list[tuple[str, ...]] = [
        ("perplexity", f"{full:.3f}", f"{int8:.3f}", f"{int8 / full:.4f}"),
        ("KL(full || int8), nats", "", "", f"{quality.divergence:.4f}"),
        ("sum min(p, q)", "", "", f"{quality.overlap:.4f}"),
        ("same most probable token", "", "", f"{quality.agreement:.4f}"),
    ]
    for count, forward in times.items():
        cells = [forward.full.text(digits=1), forward.int8.text(digits=1), f"{forward.ratio.text()} times as fast"]
        rows.append((f"forward of {count}, ms", *cells))
    return Table("", (f"{quality.positions} positions", "full", "int8", ""), rows)


def _after(model: SlotModel, ids: Sequence[int], prompt: int) -> Tensor:
    """Return the logits [len(ids) - prompt, V] before each token after the prompt."""
    model.cache.length[0] = 0
    parts = []
    for start in range(0, len(ids) - 1, _CHUNK):
        part = list(ids[start : min(start + _CHUNK, len(ids) - 1)])
        selected = torch.arange(min(max(prompt - 1 - start, 0), len(part)), len(part))
        parts.append(model.forward(consecutive_rows(0, start, part), selected).logits)
    return torch.cat(parts)
