"""A deployment in all ways, its bill, and the trainers and capture budget that leave most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osd.config import Scenario, Settings
from osd.simulation.bill import Bill
from osd.simulation.deployment import Deployment, Outcome
from osd.simulation.knowledge import TRAINED, WAYS
from osd.simulation.round_costs import RoundCosts, round_costs

Choice = tuple[int, int | None]
"""Trainers, and bytes a second that the whole service captures, None for everything."""


NONE: Choice = (0, None)
"""No training."""

_PARTS = (4, 16, 64, 256, 1024)
"""Of what is written without a budget, the budgets that are tried."""


@dataclass(frozen=True)
class Best:
    """The best choice, what it leaves, and everything that was tried with what it left, in that order."""

    choice: Choice
    net: float
    tried: dict[Choice, float]


class Simulation:
    """Runs what it is asked for once; runs without training are the same for every choice."""

    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        report: Callable[[str], None] = lambda step: None,
        known: dict[str, Outcome] | None = None,
    ) -> None:
        """Of a deployment; ``report`` is told what is simulated, ``known`` are runs that are as here.

        Raises:
            CostsError: what rounds cost cannot be read.
        """
        self.settings, self.scenario, self._report = settings, scenario, report
        self._costs: RoundCosts = round_costs(settings, scenario)
        self._known = dict(known or {})
        self._chosen: dict[Choice, Simulation] = {}

    def run(self, way: str) -> Outcome:
        """One of ``WAYS``.

        Raises:
            osd.traffic.prompt.TrafficError: a trace cannot be read.
        """
        if way not in self._known:
            trainers, budget = self.scenario.trainers.count, self.settings.capture.service_bytes_per_second
            limit = "" if budget is None else f", {budget / 1e6:.1f} MB a second captured"
            self._report(f"simulating {way}" + (f": trainers {trainers}{limit}" if way == TRAINED else ""))
            self._known[way] = Deployment(self.settings, self.scenario, self._costs, way).run()
        return self._known[way]

    def runs(self) -> dict[str, Outcome]:
        """All ways."""
        return {way: self.run(way) for way in WAYS}

    def bill(self) -> Bill:
        """What all ways save and pay."""
        return Bill.of(self.settings, self.scenario, self._costs, self.runs())

    def choose(self, trainers: int, budget: int | None) -> Simulation:
        """The same with so many trainers, and so many bytes a second captured in the whole service."""
        if (trainers, budget) in self._chosen:
            return self._chosen[trainers, budget]
        capture = self.settings.capture.model_copy(update={"service_bytes_per_second": budget})
        counts = {"trainers": self.scenario.trainers.model_copy(update={"count": trainers})}
        same = {way: run for way, run in self._known.items() if way != TRAINED}
        chosen = Simulation(
            self.settings.model_copy(update={"capture": capture}),
            self.scenario.model_copy(update=counts),
            self._report,
            same,
        )
        self._chosen[trainers, budget] = chosen
        return chosen

    def search(self) -> Best:
        """Try 1, 2, 4, ... trainers up to one for each domain, ever smaller budgets, and no training."""
        for way in WAYS[:-1]:
            self.run(way)
        everything = self.choose(1, None).run(TRAINED)
        rate = everything.captured.written / everything.seconds
        budgets = [None, *(int(rate / part) for part in _PARTS)]
        most = self.scenario.domains.count
        counts = sorted({most, *(2**n for n in range(most.bit_length()) if 2**n <= most)})
        return search(lambda count, budget: self.choose(count, budget).bill().net, counts, budgets)


def search(net: Callable[[int, int | None], float], trainers: Sequence[int], budgets: Sequence[int | None]) -> Best:
    """Look along one of both at a time, through all of its values, until neither gives more.

    It begins with the first of ``trainers``, and compares what it finds with no trainers, for whom no budget counts.
    What ``net`` says of a choice must not change, and is asked for once. Where it has one summit in each of both, as
    more trainers and more records bring less and less and cost what they cost, the best of all is found.
    """
    tried: dict[Choice, float] = {}

    def leaves(choice: Choice) -> float:
        if choice not in tried:
            tried[choice] = net(*choice)
        return tried[choice]

    best: Choice = (trainers[0], budgets[0])
    before = None
    while best != before:
        before = best
        best = max([best, *((best[0], budget) for budget in budgets)], key=leaves)
        best = max([best, *((count, best[1]) for count in trainers)], key=leaves)
    best = max([best, NONE], key=leaves)
    return Best(best, leaves(best), tried)
