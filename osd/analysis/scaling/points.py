"""Measured drafters of several sizes after several amounts of traffic, in files of JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from osd.files import replace


class ScalingError(ValueError):
    """Points cannot be used, or do not say what is asked; the message is one line that says why."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What points must share to be compared.

    Attributes:
        target: source of the model that is drafted for, its ``dtype`` and ``weights``.
        stream: name of the recorded prompts, of which ``records`` arrive and ``unseen`` more are only measured on.
        tokens: of each completion at most.
        passes: over each completion that is trained on, after every ``interval`` records.
        depth: tokens of a draft, a chain.
        turns: wave pairs of the measured speed-up.
        trainer: its settings.
        threads: that compute.
        machine: that measured.
    """

    target: str
    dtype: str
    weights: str
    stream: str
    records: int
    unseen: int
    tokens: int
    passes: float
    interval: int
    depth: int
    turns: int
    trainer: dict[str, Any]
    threads: int
    machine: str


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forwards of one sequence, timed apart from the engine; medians.

    ``plain`` is the seconds of the target's forward of one token. In units of it: ``step`` is a forward of the drafter,
    and ``verify`` [n] the target's forward of n + 2 tokens, which verifies n + 1 drafted ones.
    """

    plain: float
    step: float
    verify: tuple[float, ...]


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Greedy decoding in the engine, one stream, drafts of ``Run.depth`` tokens beside plain decoding.

    ``speedup`` is the median of the turns, ``length`` the mean acceptance length, bonus token included.
    """

    speedup: float
    least: float
    most: float
    length: float


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One drafter after one amount of traffic, measured on records that it never saw.

    Attributes:
        run: what it shares with the others.
        layers: of the drafter.
        parameters: N, those that are trained.
        used: those that a drafted token is computed with: the trained ones and the target's head.
        records: of the stream that have come.
        tokens: D, their completion tokens that were trained on, repeats not counted.
        positions: completion tokens trained on, repeats counted.
        cpu_seconds: of training.
        entropy: H, of the target's distribution, in nats a token.
        divergence: forward KL from target to drafter, in nats a token; their sum is the cross-entropy.
        total_variation: of both, the mean; one minus it is the acceptance at temperature 1.
        rounds: of drafting greedily along the recorded text; of ``drafted`` tokens ``tested`` stood where
            the text went on, and ``accepted`` became output.
        costs: of forwards.
        speed: in the engine.
    """

    run: Run
    layers: int
    parameters: int
    used: int
    records: int
    tokens: int
    positions: int
    cpu_seconds: float
    entropy: float
    divergence: float
    total_variation: float
    rounds: int
    drafted: int
    accepted: int
    tested: int
    costs: Costs
    speed: Speed

    @property
    def agreement(self) -> float:
        """Accepted / tested: acceptance of greedy drafts."""
        return self.accepted / self.tested

    @property
    def length(self) -> float:
        """Mean acceptance length along the unseen records, bonus token included."""
        return 1 + self.accepted / self.rounds

    @property
    def round_cost(self) -> float:
        """A round of the engine, in plain forwards."""
        return self.speed.length / self.speed.speedup

    @property
    def speedup(self) -> float:
        """Of the engine at the acceptance length of all unseen records; ``speed`` is that of a few of them."""
        return self.length / self.round_cost


def read(path: Path) -> list[Point]:
    """The points of a file, none where it does not exist; a last line that a crash cut off is left out.

    Raises:
        ScalingError: it cannot be read, or holds something else.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise ScalingError(f"{path} cannot be read: {error.strerror}") from None
    points: list[Point] = []
    for number, line in enumerate(lines, 1):
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ScalingError(f"{path}, line {number} is no point of osd bench scaling: {error}") from None
    return points


def write(path: Path, points: Sequence[Point]) -> None:
    """Put these points in the place of a file."""
    replace(path, b"".join(msgspec.json.encode(point) + b"\n" for point in points))
