"""What a training process on the same device costs those that decode."""

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


def beside_training(
    engine: Engine,
    drafter: Eagle,
    traces: list[Trace],
    prompts: Sequence[tuple[int, ...]],
    device: torch.device,
    small: bool,
) -> dict[str, Any]:
    """Decode ``prompts`` together, in turns alone and beside training on what was captured of them before.

    Returns the gaps between tokens of both ways, at the median and the 99th percentile, and positions a second.
    """
    tokens, turns = (24, 1) if small else (192, 3)
    _middle_and_late(engine, prompts, tokens)  # warms up, and fills the traces
    context = multiprocessing.get_context("spawn")
    going, ready, over = context.Event(), context.Event(), context.Event()
    trained = context.Value("q", 0)
    records = [trace.encode(one) for one in traces]
    given = (drafter.shape, records, device.type, going, ready, over, trained)
    process = context.Process(target=_train, args=given, name="training", daemon=True)
    process.start()
    alone, beside, rates = [], [], []
    try:
        end = time.monotonic() + _START_SECONDS
        while not ready.wait(1.0):
            if not process.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the training process did not begin, its code is {process.exitcode}")
        for _ in range(turns):
            alone.append(_middle_and_late(engine, prompts, tokens))
            before, begun = trained.value, time.monotonic()
            going.set()
            beside.append(_middle_and_late(engine, prompts, tokens))
            going.clear()
            rates.append((trained.value - before) / (time.monotonic() - begun))
    finally:
        over.set()
        going.set()
        process.join(30)
        process.kill()
        process.join()
    names = ("p50", "p99")
    ratios = [{name: b[at] / a[at] for at, name in enumerate(names)} for a, b in zip(alone, beside, strict=True)]
    return {
        "streams": len(prompts),
        "alone_seconds": {name: Spread.of([one[at] for one in alone]).__dict__ for at, name in enumerate(names)},
        "beside_seconds": {name: Spread.of([one[at] for one in beside]).__dict__ for at, name in enumerate(names)},
        "ratios": ratios,
        "positions_per_second": Spread.of(rates).__dict__,
    }


def _middle_and_late(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> tuple[float, float]:
    """The median and the 99th percentile of the gaps."""
    found = gaps(engine, prompts, tokens)
    return found[len(found) // 2], found[min(len(found) - 1, int(0.99 * len(found)))]


def gaps(engine: Engine, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[float]:
    """Seconds between updates of greedy requests that decode together, the shortest first."""
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
    shape: EagleShape, records: list[bytes], device: str, going: Any, ready: Any, over: Any, trained: Any
) -> None:
    torch.set_num_threads(1)
    ends = torch.randn(shape.target_vocabulary, shape.hidden, dtype=torch.bfloat16) * 0.02
    drafter = Eagle(shape, ends, ends)
    drafter.set_vocabulary(torch.arange(shape.vocabulary))
    distiller = Distiller(drafter.to(torch.device(device)), TrainerSettings())
    traces = [trace.decode(record) for record in records]
    number = 0
    while not over.is_set():
        batch = collate([traces[number % len(traces)]], drafter.device)
        distiller.step(batch)
        number += 1
        if number == 2:
            ready.set()
        if ready.is_set():
            with trained.get_lock():
                trained.value += batch.positions
            going.wait()
