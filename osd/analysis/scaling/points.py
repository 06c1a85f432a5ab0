"""Measurements of drafters of several sizes after several amounts of traffic, as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from osd.files import replace


class ScalingError(ValueError):
    """Error of points that are invalid or do not allow the prediction; the message is one line with the reason."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration of a run; only points of the same run can be compared.

    Attributes:
        target: source of the target.
        dtype: data type of the target.
        weights: format of the target's weights.
        stream: name of the recorded prompts.
        records: number of records for training.
        unseen: number of further records for measurements only.
        tokens: largest number of tokens per completion.
        passes: number of training passes over each completion.
        interval: number of records between two training passes.
        depth: tokens of a draft chain.
        turns: number of pairs of runs for the speed-up.
        trainer: settings of the trainer.
        threads: number of threads.
        machine: machine of the measurement.
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
    """Median times of forwards of a single sequence, measured outside of the engine.

    Attributes:
        plain: seconds of the target's forward of a token.
        step: time of the drafter's forward, in units of ``plain``.
        verify: time of the target's forward of n + 2 tokens, which verifies n + 1 draft tokens, at index n, in units
            of ``plain``.
    """

    plain: float
    step: float
    verify: tuple[float, ...]


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed-up of greedy decoding in the engine with a single stream and drafts of ``Run.depth`` tokens.

    Attributes:
        speedup: median over the turns.
        least: smallest speed-up.
        most: largest speed-up.
        length: mean acceptance length, bonus token included.
    """

    speedup: float
    least: float
    most: float
    length: float


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Drafter after an amount of traffic, measured on unseen records.

    Attributes:
        run: configuration of the run.
        layers: layers of the drafter.
        parameters: trained parameters N.
        used: parameters for computing a draft token: the trained parameters and the target's head.
        records: records of the stream that were used for training.
        tokens: distinct completion tokens D of these records.
        positions: completion tokens in training, repeats included.
        cpu_seconds: CPU seconds of training.
        entropy: entropy H of the target's distribution, in nats per token.
        divergence: forward KL from target to drafter, in nats per token.
        total_variation: mean total variation; one minus it is the acceptance at temperature 1.
        rounds: number of greedy drafts along the recorded text.
        drafted: tokens of these drafts.
        tested: draft tokens whose predecessors in the draft were accepted.
        accepted: draft tokens that equal the recorded text.
        costs: times of forwards.
        speed: speed-up in the engine.
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
        """Acceptance of greedy drafts, accepted / tested."""
        return self.accepted / self.tested

    @property
    def length(self) -> float:
        """Mean acceptance length along the unseen records, bonus token included."""
        return 1 + self.accepted / self.rounds

    @property
    def round_cost(self) -> float:
        """Time of a decoding step of the engine, in plain forwards."""
        return self.speed.length / self.speed.speedup

    @property
    def speedup(self) -> float:
        """Speed-up of the engine at the acceptance length of all unseen records; ``speed`` used a few of them."""
        return self.length / self.round_cost


def read(path: Path) -> list[Point]:
    """Read the points of a file; a missing file has none, and an incomplete last line is ignored.

    Raises:
        ScalingError: the file cannot be read, or a line is not a point.
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
            raise ScalingError(f"{path}, line {number} is not a point of osd bench scaling: {error}") from None
    return points


def write(path: Path, points: Sequence[Point]) -> None:
    """Replace the file at ``path`` with these points."""
    replace(path, b"".join(msgspec.json.encode(point) + b"\n" for point in points))
