"""Fund of a domain's training: what learning may spend, and whether the next slice begins.

    fund = one version + max_loss x busy seconds + 1/2 x certain savings - spent

All are core seconds. Certain savings use the lower bound of each version's measured effect. A slice of learning, from
one candidate to the next, begins when the fund covers it. Each slice without a certain gain doubles the amount that the
next slice needs, until a version is certainly better or an alarm reports drift. Free learning needs a fund as well, but
spends only what requests lose. Forecasts only rank domains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from osd.economy.effect import KNOWN_WIDTH, jackknife, log_ratio, ridge, without_each
from osd.economy.report import Measured

VERSION_SECONDS = 15.0
"""Expected core seconds of the first version: the cost of a version in the tests that simulate a fund."""

_MOST_DOUBLINGS = 32  # of what a slice needs, which stays finite: without replicas, slices end without a decision
_LEAST_SLOTS = 3  # of each kind: a jackknife of fewer is too narrow


@dataclass
class ServedVersion:
    """Measured effect of one version: the version in service, or an earlier version that it builds on.

    Attributes:
        number: number of the version.
        promised: natural logarithm of its tokens per step over those of the version before, as its gate measured it; at
            least 0.
        busy: core seconds that replicas computed for the domain while this or a later version served.
        log: measured natural logarithm of its speed-up over the version before; 0 before any measurement.
        width: half the width of the confidence interval of ``log``; None before any measurement.
        trials: number of trials in the measurement.
    """

    number: int
    promised: float = 0.0
    busy: float = 0.0
    log: float = 0.0
    width: float | None = None
    trials: int = 0

    @property
    def low(self) -> float:
        """Lower bound of the logarithm of the speed-up, ``log - width``; minus infinity before any measurement."""
        return -math.inf if self.width is None else self.log - self.width

    @property
    def certain(self) -> float:
        """Core seconds that the version certainly saved; negative if it certainly lost time."""
        if self.width is None or abs(self.log) <= self.width:
            return 0.0
        return math.expm1(self.low if self.log > 0 else self.log) * self.busy


class Fund(msgspec.Struct):
    """Account of one domain's training, in core seconds.

    A *slice* is the training from one candidate version to the next. A gain is *certain* if the lower bound of the
    logarithm of the speed-up is above 0. An *alarm* is a detected drift of the traffic.

    Attributes:
        mean_slice: mean CPU seconds of a slice, with ``VERSION_SECONDS`` as the first value; checkpoints name it
            ``version``.
        busy: core seconds that replicas computed for the domain.
        spent: CPU seconds of training times their price, plus ``lost``.
        lost: core seconds that requests lost to training.
        earlier: certain savings of versions that no longer serve, in core seconds.
        fruitless: number of slices since the last certain gain or alarm; a slice counts if most of its CPU seconds had
            a price.
        slices: number of slices that ended.
        slice: CPU seconds of the current slice, including seconds at price 0.
        paid: CPU seconds of the current slice at a price above 0.
        mixed: effect of the trained versions of a mixed drafter together, over recall alone; its ``number`` is 0, and
            its seconds are those in which the trained drafter does not rest. None for other drafters.
        resting: share of the replicas in which recall drafts alone.
        base: number of the version with which the account began, or of the version in service at the last alarm.
        versions: versions above ``base`` up to the version in service, in ascending order.
        measured: sum of the measured logarithms of the speed-ups of versions that no longer serve.
        promised: sum of the logarithms that the gates of these versions promised.
    """

    mean_slice: float = msgspec.field(default=VERSION_SECONDS, name="version")
    busy: float = 0.0
    spent: float = 0.0
    lost: float = 0.0
    earlier: float = 0.0
    fruitless: int = 0
    slices: int = 0
    slice: float = 0.0
    paid: float = 0.0
    mixed: ServedVersion | None = None
    resting: float = 1.0
    base: int = 0
    versions: list[ServedVersion] = msgspec.field(default_factory=list)
    measured: float = 0.0
    promised: float = 0.0

    @property
    def _saving(self) -> list[ServedVersion]:
        """Effects that saved core seconds: of all versions together, or else of each."""
        return self.versions if self.mixed is None else [self.mixed]

    @property
    def certain(self) -> float:
        """Core seconds that all versions certainly saved, by their lower bounds, less what they certainly lost."""
        return self.earlier + sum(version.certain for version in self._saving)

    @property
    def saved(self) -> float:
        """Estimate of the saved core seconds; versions out of service count with their certain savings."""
        return self.earlier + sum(math.expm1(version.log) * version.busy for version in self._saving)

    @property
    def kappa(self) -> float:
        """Ratio of measured gains to gains promised by gates; 1 without any."""
        measured = self.measured + sum(version.log for version in self.versions)
        promised = self.promised + sum(version.promised for version in self.versions if version.width is not None)
        return max(KNOWN_WIDTH + measured, 0.0) / (KNOWN_WIDTH + promised)

    @property
    def gain(self) -> tuple[float, float] | None:
        """Logarithm of the measured speed-up of the versions in service together, and half its interval.

        For a mixed drafter it is the speed-up over recall alone.
        """
        if self.mixed is not None:
            return None if self.mixed.width is None else (self.mixed.log, self.mixed.width)
        widths = [version.width for version in self.versions if version.width is not None]
        return (sum(version.log for version in self.versions), math.hypot(*widths)) if widths else None

    def serve(self, busy: float) -> None:
        """Add core seconds in which replicas computed for the domain."""
        self.busy += busy
        for version in self.versions:
            version.busy += busy
        if self.mixed is not None:
            self.mixed.busy += (1 - self.resting) * busy

    def learn(self, seconds: float, price: float, lost: float = 0.0) -> None:
        """Charge CPU ``seconds`` of training at a ``price``, and core seconds that requests ``lost`` to training.

        All ``seconds`` count for the current slice, also at price 0.
        """
        self.slice += seconds
        self.paid += seconds if price else 0.0
        self.spent += price * seconds + lost
        self.lost += lost

    def end_slice(self) -> None:
        """End the current slice with a candidate, whose gain is not certain yet."""
        self.slices += 1
        self.mean_slice += (self.slice - self.mean_slice) / (self.slices + 1)
        self.fruitless += self.paid > self.slice / 2
        self.slice = self.paid = 0.0

    def follow(self, number: int, promised: float = 0.0) -> None:
        """Set the version in service, with the logarithm of the gain that its gate ``promised``.

        A return to an older version retires the versions above it.
        """
        top = self.versions[-1].number if self.versions else self.base
        if not top or number < self.base:
            self.base = number
        elif number > top:
            self.versions.append(ServedVersion(number, max(promised, 0.0)))
        self._retire([version for version in self.versions if version.number > number])

    def measure(self, effects: Mapping[int, Measured]) -> None:
        """Update the measured speed-up of each version in service over the version before, by number."""
        for version in self.versions:
            if version.number in effects:
                self._update(version, effects[version.number])

    def measure_mixed(self, measured: Measured) -> None:
        """Update the measured speed-up of the trained versions of a mixed drafter over recall alone."""
        if self.mixed is None:
            self.mixed = ServedVersion(0)
        self.resting = measured.guarded / measured.replicas
        self._update(self.mixed, measured)

    def _update(self, version: ServedVersion, measured: Measured) -> None:
        effect = measured.effect
        if effect is None or math.isinf(effect.width):
            return
        was_better = version.low > 0
        version.log, version.width, version.trials = effect.log, effect.width, effect.trials
        if version.low > 0 and not was_better:
            self.fruitless = 0

    def drift(self) -> None:
        """Begin again at the version in service after an alarm; the certain savings so far stay in ``earlier``."""
        self.base = self.versions[-1].number if self.versions else self.base
        self._retire(self.versions)
        if self.mixed is not None:
            self.earlier += self.mixed.certain
        self.mixed, self.fruitless = None, 0

    def _retire(self, versions: Sequence[ServedVersion]) -> None:
        for version in versions:
            if self.mixed is None:
                self.earlier += version.certain
            if version.width is not None:
                self.measured, self.promised = self.measured + version.log, self.promised + version.promised
        self.versions = [version for version in self.versions if version not in versions]


@dataclass(frozen=True)
class Decision:
    """Decision whether the next slice of learning begins.

    Attributes:
        begins: whether it begins.
        fund: core seconds in the fund; negative if it is overdrawn.
        needed: core seconds that the slice needs.
    """

    begins: bool
    fund: float
    needed: float


def decide(fund: Fund, price: float, max_loss: float, begun: bool = False) -> Decision:
    """Decide on the next slice of learning.

    ``price`` is that of a CPU second, 0 if free; ``max_loss`` the share of the busy seconds that training may lose; and
    ``begun`` whether the fund covered this slice when it began. A free slice begins while the fund covers the seconds
    that requests lost. Training at a price does not count for it.
    """
    income = max(price, 1.0) * fund.mean_slice + max_loss * fund.busy + fund.certain / 2
    left = income - (fund.spent if price else fund.lost)
    rest = max(fund.mean_slice - fund.slice, 0.0)
    needed = 0.0 if begun else price * rest * 2.0 ** min(fund.fruitless, _MOST_DOUBLINGS)
    return Decision(begun or left >= needed, left, needed)


def forecast(fund: Fund, promised: float | None, busy: float) -> float:
    """Return the core seconds per second that the next version is expected to save, which rank the domains.

    ``promised`` is the logarithm of the last gain that a gate measured; None is unknown, and ranks first. ``busy`` are
    the core seconds per second that replicas compute for the domain.
    """
    return math.inf if promised is None else fund.kappa * max(promised, 0.0) * busy


@dataclass(frozen=True)
class Slot:
    """Short period of a machine that trains: decoding ``steps`` of its replicas, their ``rows`` and ``seconds``."""

    paused: bool
    steps: int
    rows: int
    seconds: float


def slowing(slots: Sequence[Slot]) -> tuple[float, float]:
    """Estimate by how much longer steps of the same rows take while training runs than while it is paused.

    Returns:
        The logarithm of the ratio and its jackknifed standard error; 0 and infinity for few slots of a kind.
    """
    paused = np.array([slot.paused for slot in slots], dtype=bool)
    if min(paused.sum(), (~paused).sum()) < _LEAST_SLOTS:
        return 0.0, math.inf
    sizes = np.array([(slot.steps, slot.rows) for slot in slots], dtype=float)
    seconds = np.array([slot.seconds for slot in slots])
    running = sizes * ~paused[:, None]
    gram, moments = running[:, :, None] * running[:, None, :], running * seconds[:, None]
    costs = ridge(without_each(gram), without_each(moments), len(slots))  # of steps while training runs

    def slowness(side: np.ndarray) -> np.ndarray:
        return without_each(seconds * side) / (without_each(sizes * side[:, None]) * costs).sum(1)

    return jackknife(log_ratio(slowness(~paused), slowness(paused)))
