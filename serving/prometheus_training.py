"""What ``/metrics`` says of training: what it cost, what it has done, and what it is expected to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from osd.engine.counters import OLDER
from osd.registry.ledger import Spent
from osd.registry.training import Training

_COUNTERS: dict[str, tuple[str, Callable[[Training], float]]] = {
    "osd_training_steps": ("Micro-steps of training.", lambda training: training.steps),
    "osd_training_skipped_steps": (
        "Micro-steps that taught nothing: their loss or gradient was not finite, or far too large.",
        lambda training: training.skipped,
    ),
    "osd_training_positions": ("Completion tokens trained on, repeats included.", lambda training: training.positions),
    "osd_training_records": ("Trace records that the trainer took.", lambda training: training.records),
    "osd_training_trained_records": ("Records trained on at least once.", lambda training: training.trained),
    "osd_training_held_out_records": ("Records that only judge candidates.", lambda training: training.held_out),
    "osd_training_refused_records": ("Records that did not fit the drafter.", lambda training: training.refused),
    "osd_training_drifts": ("Falls of live acceptance below its own level.", lambda training: training.drifts),
    "osd_training_cpu_seconds": (
        "CPU seconds of the trainer, those since the last version too.",
        lambda training: training.cpu_seconds,
    ),
    "osd_training_slowed_seconds": (
        "Seconds of a core that rounds lost beside training.",
        lambda training: training.slowed_seconds,
    ),
}
_GAUGES: dict[str, tuple[str, Callable[[Training], float | None]]] = {
    "osd_training_loss": ("Loss of the last micro-step.", lambda training: training.loss),
    "osd_training_lag": ("Trace records that are not acknowledged yet.", lambda training: training.lag),
    "osd_training_lag_seconds": (
        "Age of the oldest trace record that is not acknowledged yet, 0 where there is none.",
        lambda training: training.lag_seconds,
    ),
    "osd_replay_records": ("Records in the trainer's memory.", lambda training: training.replay_records),
    "osd_replay_tokens": ("Completion and prompt tokens of these.", lambda training: training.replay_tokens),
    "osd_replay_bytes": ("Bytes of these.", lambda training: training.replay_bytes),
    "osd_investment_pays": (
        "1 where the next slice of training is expected to earn more than it costs.",
        lambda training: training.expected and training.expected.pays,
    ),
    "osd_investment_saving_rate": (
        "Seconds of an engine that the next slice of training is expected to save in each second.",
        lambda training: training.expected and training.expected.saving_rate,
    ),
    "osd_investment_earnings_seconds": (
        "Seconds of a core that it is expected to save until the traffic changes.",
        lambda training: training.expected and training.expected.earns,
    ),
    "osd_investment_cost_seconds": (
        "Seconds of a core that it costs.",
        lambda training: training.expected and training.expected.costs,
    ),
    "osd_investment_horizon_seconds": (
        "Seconds for which the traffic is expected to stay as it is.",
        lambda training: training.expected and training.expected.horizon,
    ),
}


def of_training(domain: str, spent: Spent, training: Mapping[str, Training]) -> Iterator[Metric]:
    """Families of all domains that are trained; what was ``spent`` on versions is of ``domain``, the service's own."""
    # What the ledger says of the service's own counts, also before its trainer has told anything else.
    known = {**training, domain: _with_spent(training.get(domain, Training()), spent)}
    for name, (help_text, counted) in _COUNTERS.items():
        family = CounterMetricFamily(name, help_text, labels=["domain"])
        for trained, one in known.items():
            family.add_metric([trained], counted(one))
        yield family
    verdicts = CounterMetricFamily(
        "osd_gate_verdicts", "Candidates that the gate judged.", labels=["domain", "verdict"]
    )
    for trained, one in known.items():
        verdicts.add_metric([trained, "passed"], one.passed)
        verdicts.add_metric([trained, "rejected"], one.rejected)
    yield verdicts
    for name, (help_text, measured) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, help_text, labels=["domain"])
        for trained, one in training.items():
            if (value := measured(one)) is not None:
                gauge.add_metric([trained], value)
        yield gauge
    yield from _of_versions(domain, spent)


def _with_spent(training: Training, spent: Spent) -> Training:
    return msgspec.structs.replace(training, cpu_seconds=spent.cpu, slowed_seconds=spent.slowed)


def _of_versions(domain: str, spent: Spent) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "osd_version_training_cpu_seconds",
        "CPU seconds of the trainer and what rounds lost beside it, by the version they led to.",
        labels=["domain", "version"],
    )
    seconds: dict[str | int, float] = {**dict(sorted(spent.by_version.items())), OLDER: spent.older}
    for version, value in seconds.items():
        if value:
            family.add_metric([domain, str(version)], value)
    yield family
    rate = GaugeMetricFamily(
        "osd_version_saving_rate",
        "Seconds of a core that a version was expected to save in each second, against the one before.",
        labels=["domain", "version"],
    )
    payback = GaugeMetricFamily(
        "osd_version_payback_seconds",
        "Expected seconds in service until a version has saved what it took; +Inf where it never will.",
        labels=["domain", "version"],
    )
    for version, saving in spent.saving.items():
        rate.add_metric([domain, str(version)], saving)
        payback.add_metric([domain, str(version)], _or_never(spent.payback(version)))
    yield rate
    yield payback
    everything = GaugeMetricFamily(
        "osd_payback_seconds",
        "Expected seconds until all versions together have saved all that training took; +Inf where never.",
        labels=["domain"],
    )
    if spent.saving:
        everything.add_metric([domain], _or_never(spent.payback_of_all))
    yield everything


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
