"""Plain decoding: one stream beside transformers' own generate(), and eight streams beside one."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.streams import arrivals_of, decoding_rate
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams

STREAMS = 8


@dataclass(frozen=True)
class Pair:
    """Tokens per second in one turn: one stream, transformers, and eight streams together.

    Prefill is included, except in ``one_decoding`` and ``eight_decoding``: those are of the time in which all streams
    decode.
    """

    one: float
    transformers: float
    eight: float
    one_decoding: float
    eight_decoding: float


def measure(
    engine: Engine,
    directory: Path,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> list[Pair]:
    """Decode the same prompts greedily in each way; the ways take turns, the first turn warms up and is left out.

    transformers runs in a process of its own, on the same weights in the engine's dtype, with as many threads.

    Args:
        engine: running.
        directory: of the target.
        prompts: one a turn for the single streams, ``STREAMS`` for the others, from the start again.
        tokens: of each completion, whatever its end.
        turns: to measure.
        report: told which turn begins.
    """
    threads = engine.settings.engine.threads or os.cpu_count() or 1
    dtype = engine.settings.target.dtype
    pairs = []
    with ProcessPoolExecutor(1, get_context("spawn"), _load, (str(directory), dtype, threads)) as other:
        for turn in range(turns + 1):
            report(f"turn {turn} of {turns}")
            asked = [prompts[(turn * STREAMS + n) % len(prompts)] for n in range(STREAMS)]
            ways: dict[str, Callable[[], dict[str, float]]] = {
                "one": lambda asked=asked: _decode(engine, asked[:1], tokens, "one"),
                "transformers": lambda asked=asked: {
                    "transformers": tokens / other.submit(_generate, asked[0], tokens).result()
                },
                "eight": lambda asked=asked: _decode(engine, asked, tokens, "eight"),
            }
            names = list(ways)
            order = names[turn % len(names) :] + names[: turn % len(names)]
            speeds = [ways[name]() for name in order]
            if turn:
                pairs.append(Pair(**{name: speed for way in speeds for name, speed in way.items()}))
    return pairs


def ratios(pairs: Sequence[Pair]) -> dict[str, tuple[float, float, float]]:
    """(median, least, largest) of what one stream is to transformers, and eight streams to one, within a turn."""
    found = {
        "one stream, times transformers": [pair.one / pair.transformers for pair in pairs],
        "eight streams, times one": [pair.eight / pair.one for pair in pairs],
        "eight streams, times one, while all decode": [pair.eight_decoding / pair.one_decoding for pair in pairs],
    }
    return {name: (statistics.median(values), min(values), max(values)) for name, values in found.items()}


def _decode(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int, name: str) -> dict[str, float]:
    sampling = SamplingParams(temperature=0)
    requests = [
        Request(str(index), prompt, tokens, sampling, ignore_eos=True, speculate=False)
        for index, prompt in enumerate(prompts)
    ]
    arrivals = arrivals_of(engine, requests)
    seconds = max(moments[-1][0] for moments in arrivals.values())
    return {name: len(prompts) * tokens / seconds, f"{name}_decoding": decoding_rate(arrivals)}


_model: Any = None


def _load(directory: str, dtype: str, threads: int) -> None:
    global _model
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    _model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))


def _generate(prompt: tuple[int, ...], tokens: int) -> float:
    """Seconds of transformers' greedy generate()."""
    import torch

    ids = torch.tensor([prompt])
    begun = time.perf_counter()
    _model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    return time.perf_counter() - begun
