"""Runs of a simulated deployment, its bill, and the search for the best trainers and capture budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from osd.config import Scenario, Settings
from osd.simulation.bill import Bill
from osd.simulation.deployment import Deployment, SimulationResult
from osd.simulation.knowledge import TRAINED, WAYS
from osd.simulation.step_costs import StepCosts, make_step_costs

Choice = tuple[int, int | None]
"""Number of trainers, and the capture budget of the service in bytes per second; None for no limit."""


NONE: Choice = (0, None)
"""No training."""

_PARTS = (4, 16, 64, 256, 1024)
"""Divisors of the bytes written without a budget, for the budgets to try."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: the best choice, its net gain, and the net gain of all choices in the order of trials."""

    choice: Choice
    net: float
    tried: dict[Choice, float]


class Simulation:
    """Simulation of a deployment with cached runs; all choices share the runs without training."""

    def __init__(
        self,
        settings: Settings,
        scenario: Scenario,
        report: Callable[[str], None] = lambda step: None,
        known: dict[str, SimulationResult] | None = None,
    ) -> None:
        """Prepare a simulation.

        Args:
            settings: of the deployment.
            scenario: assumptions.
            report: called with a description of each run.
            known: results of runs that need not be simulated, by way.

        Raises:
            CostsError: the step costs cannot be read.
        """
        self.settings, self.scenario, self._report = settings, scenario, report
        self._costs: StepCosts = make_step_costs(settings, scenario)
        self._known = dict(known or {})
        self._chosen: dict[Choice, Simulation] = {}

    def run(self, way: str) -> SimulationResult:
        """Return the result of a way, one of ``WAYS``.

        Raises:
            osd.traffic.prompt.TrafficError: a trace cannot be read.
        """
        if way not in self._known:
            trainers, budget = self.scenario.trainers.count, self.settings.capture.service_bytes_per_second
            limit = "" if budget is None else f", capture {budget / 1e6:.1f} MB per second"
            self._report(f"simulating {way}" + (f": trainers {trainers}{limit}" if way == TRAINED else ""))
            self._known[way] = Deployment(self.settings, self.scenario, self._costs, way).run()
        return self._known[way]

    def runs(self) -> dict[str, SimulationResult]:
        """Return the results by way; ways that have not run yet run now."""
        return {way: self.run(way) for way in WAYS}

    def bill(self) -> Bill:
        """Return the savings and cost of all ways."""
        return Bill.of(self.settings, self.scenario, self._costs, self.runs())

    def choose(self, trainers: int, budget: int | None) -> Simulation:
        """Return the simulation with another number of trainers and capture budget in bytes per second."""
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

    def search(self) -> SearchResult:
        """Search over 1, 2, 4, ... trainers up to one per domain, several budgets, and no training."""
        for way in WAYS[:-1]:
            self.run(way)
        everything = self.choose(1, None).run(TRAINED)
        rate = everything.captured.written / everything.seconds
        budgets = [None, *(int(rate / part) for part in _PARTS)]
        most = self.scenario.domains.count
        counts = sorted({most, *(2**n for n in range(most.bit_length()) if 2**n <= most)})
        return search(lambda count, budget: self.choose(count, budget).bill().net, counts, budgets)


def search(
    net: Callable[[int, int | None], float], trainers: Sequence[int], budgets: Sequence[int | None]
) -> SearchResult:
    """Maximise the net gain by coordinate ascent, alternating over all budgets and all numbers of trainers.

    The search ends when neither coordinate improves the net gain; the result is then compared with no training. It
    finds the maximum if the net gain has a single peak along each coordinate, as with diminishing returns.

    Args:
        net: deterministic function of trainers and budget; called once per choice.
        trainers: numbers of trainers to try; the search starts at the first.
        budgets: budgets to try; the search starts at the first.
    """
    tried: dict[Choice, float] = {}

    def gain(choice: Choice) -> float:
        if choice not in tried:
            tried[choice] = net(*choice)
        return tried[choice]

    best: Choice = (trainers[0], budgets[0])
    before = None
    while best != before:
        before = best
        best = max([best, *((best[0], budget) for budget in budgets)], key=gain)
        best = max([best, *((count, best[1]) for count in trainers)], key=gain)
    best = max([best, NONE], key=gain)
    return SearchResult(best, gain(best), tried)
