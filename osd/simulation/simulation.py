"""A deployment in all ways, its bill, and the trainers and capture budget that leave most."""

from __future__ import annotations

from collections.abc import Callable

from osd.config import Scenario, Settings
from osd.simulation.bill import Bill
from osd.simulation.deployment import Deployment, Outcome
from osd.simulation.knowledge import TRAINED, WAYS
from osd.simulation.round_costs import RoundCosts, round_costs
from osd.simulation.search import Best, Choice, search

_PARTS = (4, 16, 64, 256, 1024)
"""Of what is written without a budget, the budgets that are tried."""


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
