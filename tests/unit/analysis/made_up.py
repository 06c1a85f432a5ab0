"""Points that lie on known curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from osd.analysis.scaling.law import AcceptanceMap, Law
from osd.analysis.scaling.points import Costs, Point, Run, Speed

LAW = Law(0.2, 300.0, 0.4, 60.0, 0.45)
SAMPLED = AcceptanceMap(0.9, 0.4, pinsker=True)
GREEDY = AcceptanceMap(0.8, 0.3, pinsker=False)
VERIFY = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4)
REST, PLAIN, ENTROPY = 0.1, 0.01, 1.25
SIZES, RECORDS = (2_000_000, 4_000_000, 8_000_000, 16_000_000), (32, 64, 128, 256)

RUN = Run(
    target="tiny", dtype="float32", weights="full", stream="tiny", records=256, unseen=48, tokens=48, passes=3.0,
    interval=8, depth=4, turns=5, trainer={}, threads=1, machine="one",
)  # fmt: skip


def step(parameters: float) -> float:
    return 0.04 + 1e-8 * parameters


def seconds(parameters: float) -> float:
    return 0.004 + 1e-9 * parameters


def point(parameters: int, records: int, noise: Sequence[float] = (0, 0, 0), run: Run = RUN) -> Point:
    """Return a point; a layer has 2 million parameters, and ``noise`` is added to divergence and acceptances."""
    tokens = 40 * records
    divergence = float(LAW.loss(parameters, tokens)) + noise[0]
    accepted = round(1e6 * (float(GREEDY.acceptance(divergence)) + noise[2]))
    length = 1 + accepted / 500_000
    cost = run.depth * step(parameters) + VERIFY[run.depth - 1] + REST
    return Point(
        run=run, layers=parameters // 2_000_000, parameters=parameters, used=parameters, records=records, tokens=tokens,
        positions=3 * tokens, cpu_seconds=tokens * seconds(parameters), entropy=ENTROPY, divergence=divergence,
        total_variation=1 - float(SAMPLED.acceptance(divergence)) - noise[1], rounds=500_000, drafted=2_000_000,
        accepted=accepted, tested=1_000_000, costs=Costs(PLAIN, step(parameters), VERIFY),
        speed=Speed(length / cost, length / cost, length / cost, length),
    )  # fmt: skip


def points(
    sizes: Iterable[int] = SIZES, records: Iterable[int] = RECORDS, noise: float = 0.0, run: Run = RUN, seed: int = 0
) -> list[Point]:
    """Return a point for each size and amount, with normal noise."""
    generator, amounts = np.random.default_rng(seed), list(records)
    return [
        point(size, amount, (noise * generator.normal(size=3)).tolist(), run) for size in sizes for amount in amounts
    ]
