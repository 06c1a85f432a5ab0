"""What the governor earns on a stream whose load alternates between one request and many."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.streams import seconds_of
from osd.config import ChainSettings
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams

GOVERNED, PLAIN = "governed", "plain"


@dataclass(frozen=True)
class Load:
    """What a cycle sends: ``alone`` requests one after the other, then ``together`` at once, ``tokens`` tokens each."""

    depths: tuple[int, ...] = (1, 2, 3, 4)
    alone: int = 4
    together: int = 16
    tokens: int = 48
    cycles: int = 5


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one way of drafting, cycle by cycle."""

    way: str
    alone: list[float]
    together: list[float]
    stream: list[float]

    def times(self, other: Speed) -> list[tuple[float, float, float]]:
        """(median, least, largest) of the ratios to ``other`` within a cycle: alone, together, and of the stream."""
        found = []
        for mine, theirs in ((self.alone, other.alone), (self.together, other.together), (self.stream, other.stream)):
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            found.append((statistics.median(ratios), min(ratios), max(ratios)))
        return found


def measure(
    engine: Engine, prompts: Sequence[tuple[int, ...]], load: Load, report: Callable[[str], None] = lambda step: None
) -> list[Speed]:
    """Send the same prompts plainly, with each fixed draft length, and governed; the ways take turns.

    Args:
        engine: running, governed, with a slot for each request that is there at the same time.
        prompts: taken in order, and from the start again.
        load: what to send.
        report: told which cycle begins.
    """
    ways: dict[str, Policy | None] = {PLAIN: None, GOVERNED: None}
    for depth in load.depths:
        ways[f"depth {depth}"] = Policy.of(ChainSettings(depth=depth), "chain")
    speeds = {way: Speed(way, [], [], []) for way in ways}
    names = list(ways)
    each = load.alone + load.together
    for cycle in range(load.cycles + 1):  # the first warms up
        report(f"cycle {cycle} of {load.cycles}")
        asked = [prompts[(cycle * each + n) % len(prompts)] for n in range(each)]
        for way in names[cycle % len(names) :] + names[: cycle % len(names)]:
            phases = [[prompt] for prompt in asked[: load.alone]], [asked[load.alone :]]
            seconds = [sum(_send(engine, group, load, way, ways[way]) for group in phase) for phase in phases]
            if cycle:
                speed, tokens = speeds[way], (load.alone * load.tokens, load.together * load.tokens)
                speed.alone.append(tokens[0] / seconds[0])
                speed.together.append(tokens[1] / seconds[1])
                speed.stream.append(sum(tokens) / sum(seconds))
    return list(speeds.values())


def _send(engine: Engine, prompts: list[tuple[int, ...]], load: Load, way: str, policy: Policy | None) -> float:
    requests = [
        Request(
            f"{way}-{index}",
            prompt,
            load.tokens,
            SamplingParams(temperature=0),
            ignore_eos=True,
            speculate=way != PLAIN,
            policy=policy,
        )
        for index, prompt in enumerate(prompts)
    ]
    return seconds_of(engine, requests)
