"""Table of all metrics; ``docs/metrics.md`` prints it, and ``osd.metrics.Metric`` describes its columns.

Each row is defined next to its values: metrics of the engine in ``osd.engine.counters`` and ``osd.engine.lifetime``,
metrics of drafts in ``osd.metrics``, and all remaining metrics here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from osd.capture.streams import StreamState
from osd.capture.writer import TraceWriter
from osd.economy.effect import bounds
from osd.economy.report import Measured
from osd.engine import counters, lifetime
from osd.engine.counters import EngineCounters, EngineLoad
from osd.metrics import SPECULATION_METRICS, Labels, Listed, Metric, Name
from osd.registry.training import FundReport, Training
from serving.metrics.report import Report, ServiceTotals, TracedDrafts

Source = TypeVar("Source")


@dataclass(frozen=True)
class ReplicaState:
    """Source of a replica's metrics.

    Attributes:
        load: requests and memory of the engine.
        writer: writer of traces, if traces are captured.
        rejected: number of rejected drafter versions.
        tables: (entries, bytes) of the recall table of each domain.
        measured: measurement of the speed-up, if any.
    """

    load: EngineLoad
    writer: TraceWriter | None
    rejected: int
    tables: Mapping[str, tuple[int, int]]
    measured: Measured | None = None


def _written(key: str) -> Callable[[ReplicaState], float | None]:
    return lambda state: state.writer and state.writer.counters()[key]


def _measured(name: str, read: Callable[[Measured], float], sentence: str) -> Metric[ReplicaState]:
    return Metric(
        f"osd_{name}", name, sentence, kind="gauge", read=lambda state: state.measured and read(state.measured)
    )


def measured(totals: ServiceTotals) -> Measured:
    """Return the measurement of the speed-up over all live replicas."""
    gauges: Counter[Name] = Counter()
    for report in totals.replicas:
        gauges.update(report.gauges)
    return Measured(
        int(gauges["speedup_trials"]), gauges["speedup_drafted_seconds"], gauges["speedup_plain_seconds"],
        gauges["speedup_variance"], totals.counters.get("measuring_seconds", 0.0), int(gauges["guarded_replicas"]),
    )  # fmt: skip


def _speedup(service: ServiceState) -> dict[Labels, float] | None:
    effect = measured(service.totals).effect
    if effect is None:
        return None
    low, high = effect.interval
    bounds = {} if math.isinf(effect.width) else {("low",): low, ("high",): high}
    return {("estimate",): math.exp(effect.log), **bounds}


_REPLICA: tuple[Metric[ReplicaState], ...] = (
    Metric("osd_rejected_versions", "rejected_versions", "Drafter versions that a replica rejected.",
           read=lambda state: state.rejected, listed=Listed("stream", "Versions rejected by a replica", alarm=True)),
    Metric("osd_traces_written", "traces_written", "Trace records written to the stream.", read=_written("written"),
           history=True, listed=Listed("stream", "Traces written")),
    Metric("osd_traces_dropped", "traces_dropped", "Trace records dropped before the stream.",
           read=_written("dropped"), history=True, listed=Listed("stream", "Traces dropped", alarm=True)),
    Metric("osd_traces_bytes", "traces_bytes", "Bytes of the trace records written to the stream.",
           read=lambda state: state.writer and state.writer.bytes_written),
    Metric("osd_traces_lost", "traces_lost",
           "Trace records that were not written, by reason; reason budget counts records outside the sample.",
           ("reason",),
           lambda state: {(reason,): n for reason, n in state.writer.losses().items()} if state.writer else None),
    Metric("vllm:num_requests_running", "running", "Sequences being decoded now.", kind="gauge", history=True,
           read=lambda state: state.load.running),
    Metric("vllm:num_requests_waiting", "waiting", "Sequences waiting for a slot now.", kind="gauge", history=True,
           read=lambda state: state.load.waiting),
    Metric("osd_running_requests", "running", "Sequences being decoded now.", ("replica",), kind="gauge",
           read=lambda state: state.load.running, merge="each"),
    Metric("osd_waiting_requests", "waiting", "Sequences waiting for a slot now.", ("replica",), kind="gauge",
           read=lambda state: state.load.waiting, merge="each"),
    Metric("vllm:kv_cache_usage_perc", "memory", "Share of the memory for keys and values in use now, from 0 to 1.",
           kind="gauge", read=lambda state: state.load.memory, merge="mean"),
    Metric("osd_recall_entries", "recall_entries", "Entries in use in the recall tables of all replicas.",
           ("domain",), lambda state: {(domain,): entries for domain, (entries, _) in state.tables.items()},
           kind="gauge"),
    Metric("osd_recall_bytes", "recall_bytes", "Memory of the recall tables of all replicas.", ("domain",),
           lambda state: {(domain,): size for domain, (_, size) in state.tables.items()}, kind="gauge", unit="bytes"),
    _measured("speedup_trials", lambda measured: measured.trials, "Trials in the last busy hour."),
    _measured("speedup_drafted_seconds", lambda measured: measured.drafted,
              "Seconds of steps with drafting in the last busy hour, over which the speed-up is measured."),
    _measured("speedup_plain_seconds", lambda measured: measured.plain,
              "Seconds that plain decoding would take for the same tokens and prompts, estimated from trials."),
    _measured("speedup_variance", lambda measured: measured.variance,
              "Variance of osd_speedup_plain_seconds, in square seconds."),
    _measured("guarded_replicas", lambda measured: measured.guarded,
              "Replicas in which drafting is off because it lost time."),
    Metric("osd_measuring_seconds", "measuring_seconds",
           "Estimated cost of the measurement of the speed-up, in seconds.", unit="seconds",
           read=lambda state: state.measured and state.measured.spent),
)  # fmt: skip

REPORTED: tuple[Metric[Report], ...] = (
    Metric("osd_drafter_version", "drafter_version", "Drafter version in service.", ("domain", "replica"),
           lambda report: {(): report.version, **{(domain,): number for domain, number in report.domains.items()}},
           kind="gauge", merge="each"),
    Metric("osd_replicas", "replicas", "Replicas by drafter version.", ("domain", "version"),
           lambda report: {(report.version,): 1, **dict.fromkeys(report.domains.items(), 1)}, kind="gauge"),
)  # fmt: skip
"""Metrics that are read from the reports of replicas."""

PROXY: tuple[Metric[Mapping[Labels, int]], ...] = (
    Metric("osd_http_responses", "http_responses",
           "HTTP answers by path and status, including answers of the proxy.", ("path", "status"),
           lambda answers: answers, has_service_label=False),
)  # fmt: skip
"""Metrics that the HTTP proxies count."""


@dataclass(frozen=True)
class ServiceState:
    """Source of the metrics of training and of the whole service; ``domain`` is the service's domain."""

    totals: ServiceTotals
    domain: str

    def trained(self) -> dict[str, Training]:
        """Return the trainer's counters by domain, with zeros for the service's domain without a trainer."""
        return {self.domain: Training(), **self.totals.training}

    def accounts(self) -> dict[str, FundReport]:
        """Return the accounts of training by domain."""
        accounts = {domain: training.account for domain, training in self.totals.training.items()}
        return {domain: account for domain, account in accounts.items() if account is not None}


def _trained(name: str, attribute: str, sentence: str) -> Metric[ServiceState]:
    return Metric(name, name, sentence, ("domain",), lambda service: {
        (domain,): getattr(training, attribute) for domain, training in service.trained().items()})  # fmt: skip


def _training(name: str, read: Callable[[Training], float | None], sentence: str) -> Metric[ServiceState]:
    def values(service: ServiceState) -> dict[Labels, float]:
        by_domain = {domain: read(training) for domain, training in service.totals.training.items()}
        return {(domain,): value for domain, value in by_domain.items() if value is not None}

    return Metric(name, name, sentence, ("domain",), values, kind="gauge")


def _account(name: str, read: Callable[[FundReport], float | None], sentence: str) -> Metric[ServiceState]:
    return _training(name, lambda training: training.account and read(training.account), sentence)


def _traced(key: str, read: Callable[[TracedDrafts], Sequence[int]], sentence: str) -> Metric[ServiceState]:
    def values(service: ServiceState) -> dict[Labels, float]:
        return {
            (row["domain"], row["version"], position): count
            for row in service.totals.traced
            for position, count in enumerate(read(row))
        }

    return Metric(f"osd_{key}", key, sentence, ("domain", "version", "position"), values)


def _stream(name: str, read: Callable[[StreamState], float], sentence: str) -> Metric[ServiceState]:
    return Metric(name, name, sentence, ("domain",), kind="gauge", read=lambda service: {
        (domain,): read(state) for domain, state in service.totals.streams.items()})  # fmt: skip


SERVICE: tuple[Metric[ServiceState], ...] = (
    _trained("osd_training_steps", "steps", "Micro-steps of training."),
    _trained("osd_training_skipped_steps", "skipped",
             "Micro-steps without an update, because their loss or gradient was not finite or far too large."),
    _trained("osd_training_positions", "positions", "Completion tokens trained on, repeats included."),
    _trained("osd_training_records", "records", "Trace records that the trainer accepted."),
    _trained("osd_training_trained_records", "trained", "Records trained on at least once."),
    _trained("osd_training_held_out_records", "held_out", "Held-out records, which are used to evaluate candidates."),
    _trained("osd_training_refused_records", "refused", "Records that do not fit the drafter."),
    _trained("osd_training_drifts", "drifts", "Detected drops of the live acceptance below its usual level."),
    _trained("osd_training_cpu_seconds", "cpu_seconds", "CPU seconds of the trainer."),
    _trained("osd_training_beside_seconds", "beside_seconds", "CPU seconds of the trainer while requests ran."),
    _trained("osd_training_slowed_seconds", "slowed_seconds", "Core seconds that replicas lost to training."),
    Metric("osd_gate_verdicts", "gate_verdicts", "Candidates by the verdict of the gate.", ("domain", "verdict"),
           lambda service: {(domain, verdict): getattr(training, verdict)
                            for domain, training in service.trained().items() for verdict in ("passed", "rejected")}),
    _training("osd_training_loss", lambda training: training.loss, "Loss of the last micro-step."),
    _training("osd_training_lag", lambda training: training.lag, "Trace records that are not acknowledged yet."),
    _training("osd_training_lag_seconds", lambda training: training.lag_seconds,
              "Age of the oldest trace record that is not acknowledged yet; 0 without such records."),
    _training("osd_replay_records", lambda training: training.replay_records, "Records in the replay memory."),
    _training("osd_replay_tokens", lambda training: training.replay_tokens,
              "Completion and prompt tokens in the replay memory."),
    _training("osd_replay_bytes", lambda training: training.replay_bytes, "Bytes of the replay memory."),
    _account("osd_training_fund_seconds", lambda account: account.fund,
             "Core seconds in the fund, which training may spend."),
    _account("osd_training_needed_seconds", lambda account: account.needed,
             "Core seconds that the fund needs before the next slice of training begins."),
    _account("osd_training_paid_back_timestamp_seconds", lambda account: account.paid_back,
             "Time at which the certain savings reached the cost of training; absent before."),
    Metric("osd_training_saved_seconds", "training_saved_seconds",
           "Measured core seconds that trained versions saved: the estimate, and the part that is certain.",
           ("domain", "bound"), kind="gauge",
           read=lambda service: {(domain, bound): value for domain, account in service.accounts().items()
                                 for bound, value in (("estimate", account.saved), ("certain", account.certain))}),
    Metric("osd_training_speedup", "training_speedup",
           "Measured speed-up of trained versions over the version before them, or over recall alone, with its bounds.",
           ("domain", "bound"), kind="gauge",
           read=lambda service: {(domain, bound): value for domain, account in service.accounts().items()
                                 for bound, value in bounds(account.log, account.width).items()}),
    Metric("osd_trained_speedup", "trained_speedup",
           "Measured speed-up of recall with the trained drafter over recall alone, with its bounds.",
           ("domain", "bound"), kind="gauge",
           read=lambda service: {(domain, bound): value for domain, account in service.accounts().items()
                                 if (effect := account.over_recall) is not None
                                 for bound, value in bounds(effect.log, effect.width).items()}),
    _account("osd_resting_replicas", lambda account: account.over_recall and account.over_recall.resting,
             "Replicas in which recall drafts alone, because no gain of the trained drafter is measured."),
    Metric("osd_version_speedup", "version_speedup",
           "Measured speed-up of a version in service or on trial over the version before it, with its bounds.",
           ("domain", "version", "bound"), kind="gauge",
           read=lambda service: {(domain, effect.number, bound): value
                                 for domain, account in service.accounts().items() for effect in account.measured
                                 for bound, value in bounds(effect.log, effect.width).items()}),
    Metric("osd_canary_seconds", "canary_seconds", "Duration of the running trial of a canary; absent without one.",
           ("domain",), kind="gauge",
           read=lambda service: {(domain,): max(time.time() - since, 0.0)
                                 for domain, since in service.totals.tried_since.items()}),
    Metric("osd_speedup", "speedup",
           "Measured speed-up of drafting at equal load in the last busy hour, and the bounds of its 95 % interval.",
           ("bound",), kind="gauge", read=_speedup),
    Metric("osd_traced_requests", "traced_requests", "Requests with traces from a vLLM, by drafter version.",
           ("domain", "version"), lambda service: {
               (row["domain"], row["version"]): row["requests"] for row in service.totals.traced}),
    _traced("traced_tested_tokens", lambda row: row["tested"],
            "Draft tokens in the traces of a vLLM that verification reached, by their position in the draft."),
    _traced("traced_accepted_tokens", lambda row: row["accepted"],
            "Accepted draft tokens in the traces of a vLLM, by their position in the draft."),
    _stream("osd_stream_records", lambda state: state.records, "Trace records on the stream of a domain."),
    _stream("osd_stream_bytes", lambda state: state.bytes, "Memory of the stream of a domain in Redis."),
)  # fmt: skip
"""Metrics of the whole service, read for each request of ``/metrics``."""

REPLICA: tuple[Metric[Any], ...] = (*counters.METRICS, *SPECULATION_METRICS, *lifetime.REQUEST_METRICS, *_REPLICA)
"""Metrics that replicas report."""

TABLE: tuple[Metric[Any], ...] = (*REPLICA, *REPORTED, *PROXY, *SERVICE)

REMEMBERED: Mapping[str, Metric[Any]] = {key: row for row in REPLICA if row.history for key in row.keys}
"""Metrics with a history, by the keys of their values."""


def read_replica(counts: EngineCounters, state: ReplicaState) -> tuple[dict[Name, float], dict[Name, float]]:
    """Return the counters and the gauges of a replica for its report."""
    values: dict[str, dict[Name, float]] = {"counter": {}, "gauge": {}, "histogram": {}}

    def read(rows: Iterable[Metric[Source]], source: Source) -> None:
        for row in rows:
            values[row.kind].update(row.values(source))

    read(counters.METRICS, counts)
    read(SPECULATION_METRICS, counts.speculation())
    read(lifetime.REQUEST_METRICS, counts.histograms)
    read(_REPLICA, state)
    return values["counter"] | values["histogram"], values["gauge"]
