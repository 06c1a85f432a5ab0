"""Slowdown of decoding while a process trains on the same device."""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks.streams import updates_of
from benchmarks.turns import Spread
from osd.capture import trace
from osd.capture.trace import Trace
from osd.config import TrainerSettings
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.shapes import EagleShape
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams
from osd.learning.batch import collate
from osd.learning.distiller import Distiller

_START_SECONDS = 300.0


def measure_during_training(
    engine: Engine, drafter: Eagle, traces: list[Trace], prompts: Sequence[tuple[int, ...]], device: torch.device,
    small: bool,
) -> dict[str, Any]:  # fmt: skip
    """Decode ``prompts`` together, in turns with and without training on their captured traces.

    Returns:
        Gaps between tokens with and without training, at the median and the 99th percentile, and trained positions
        per second.
    """
    tokens, turns = (24, 1) if small else (192, 3)
    _gap_percentiles(engine, prompts, tokens)  # warm-up, which also fills the traces
    context = multiprocessing.get_context("spawn")
    is_training, is_ready, is_over = context.Event(), context.Event(), context.Event()
    trained_positions = context.Value("q", 0)
    records = [trace.encode(record) for record in traces]
    arguments = (drafter.shape, records, device.type, is_training, is_ready, is_over, trained_positions)
    process = context.Process(target=_train, args=arguments, name="training", daemon=True)
    process.start()
    alone, during, rates = [], [], []
    try:
        end = time.monotonic() + _START_SECONDS
        while not is_ready.wait(1.0):
            if not process.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the training process did not start; exit code {process.exitcode}")
        for _ in range(turns):
            alone.append(_gap_percentiles(engine, prompts, tokens))
            before, start = trained_positions.value, time.monotonic()
            is_training.set()
            during.append(_gap_percentiles(engine, prompts, tokens))
            is_training.clear()
            rates.append((trained_positions.value - before) / (time.monotonic() - start))
    finally:
        is_over.set()
        is_training.set()
        process.join(30)
        process.kill()
        process.join()
    percentiles = ("p50", "p99")

    def spreads(turns: Sequence[tuple[float, float]]) -> dict[str, Any]:
        return {
            name: Spread.of(values).__dict__ for name, values in zip(percentiles, zip(*turns, strict=True), strict=True)
        }

    pairs = zip(alone, during, strict=True)
    return {
        "streams": len(prompts),
        "alone_seconds": spreads(alone),
        "beside_seconds": spreads(during),
        "ratios": [{name: b[index] / a[index] for index, name in enumerate(percentiles)} for a, b in pairs],
        "positions_per_second": Spread.of(rates).__dict__,
    }


def _gap_percentiles(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of the gaps."""
    ordered = gaps(engine, prompts, tokens)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def gaps(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[float]:
    """Return the seconds between updates of greedy requests that decode together, in ascending order."""
    greedy = SamplingParams(temperature=0.0)
    requests = [
        Request(f"r{n}", prompt, tokens, greedy, ignore_eos=True, capture=True) for n, prompt in enumerate(prompts)
    ]
    moments: dict[str, list[float]] = defaultdict(list)
    for moment, update in updates_of(engine, requests):
        if update.token_ids:
            moments[update.request_id].append(moment)
    return sorted(b - a for times in moments.values() for a, b in pairwise(times))


def _train(
    shape: EagleShape, records: list[bytes], device: str, is_training: Any, is_ready: Any, is_over: Any, positions: Any
) -> None:
    torch.set_num_threads(1)
    ends = torch.randn(shape.target_vocabulary, shape.hidden, dtype=torch.bfloat16) * 0.02
    drafter = Eagle(shape, ends, ends)
    drafter.set_vocabulary(torch.arange(shape.vocabulary))
    distiller = Distiller(drafter.to(torch.device(device)), TrainerSettings())
    traces = [trace.decode(record) for record in records]
    number = 0
    while not is_over.is_set():
        batch = collate([traces[number % len(traces)]], drafter.device)
        distiller.step(batch)
        number += 1
        if number == 2:
            is_ready.set()
        if is_ready.is_set():
            with positions.get_lock():
                positions.value += batch.positions
            is_training.wait()
