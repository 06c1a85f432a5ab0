"""Readers of the exposition for tests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from osd.capture.streams import StreamState
from osd.engine.counters import OLDER_VERSIONS
from osd.metrics import Name, named
from osd.registry.training import FundReport, Training, VersionEffect
from serving.metrics.exposition import render
from serving.metrics.report import Report, ServiceTotals, TracedDrafts
from serving.metrics.table import PROXY, REPLICA

_LABELS = {"domain": "general", "version": 1, "position": 0, "status": 200}


def everything() -> str:
    """Return the exposition of a service in which every metric has a value."""
    values: dict[str, dict[Name, float]] = {"counter": {}, "gauge": {}, "histogram": {}}
    for row in (*REPLICA, *PROXY):
        labels = tuple(_LABELS.get(label, label) for label in row.by if label != "replica")
        if row.kind == "histogram":
            bucket, total = row.keys
            labels = (*labels, OLDER_VERSIONS)[: 2 * len(labels)]
            values["histogram"] |= {named(bucket, (*labels, 1)): 1.0, named(total, labels): 1.0}
        else:
            values[row.kind][named(row.key, labels)] = 1.0
    report = Report("r", 0.0, 1, True, {}, values["gauge"])
    alone = VersionEffect(2, 0, 0.1, 0.01)
    account = FundReport(
        effects=(VersionEffect(2, 1, 0.1, 0.01),), over_recall=alone, log=0.1, width=0.01, paid_back=1.0
    )
    training = {"general": Training(lag=0, lag_seconds=0.0, loss=1.0, account=account)}
    streams = {"general": StreamState(1, 64, None)}
    counters = values["counter"] | values["histogram"]
    traced = TracedDrafts(domain="general", version=1, requests=1, tested=[1], accepted=[1])
    totals = ServiceTotals(counters, [report], training, {"general": 0.0}, streams, [traced])
    return render(totals, "general", "model").decode()


def samples_of(totals: ServiceTotals) -> dict[tuple, float]:
    """Return the samples of a service of the domain "general" by name and sorted labels, without the model name."""
    text = render(totals, "general", "tiny").decode()
    return {
        (sample.name, *(item for item in sorted(sample.labels.items()) if item[0] != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
