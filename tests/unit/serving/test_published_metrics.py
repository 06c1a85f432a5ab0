"""The contract of ``/metrics``: the names, types and labels that dashboards and alerts of users rely on."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.serving.exposition import everything

PAGE = (Path(__file__).parents[3] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+?)(?:_total)?` \| (counter|gauge|histogram) \| (.*?) \|", re.MULTILINE)


def test_published_metrics_are_those_of_the_page_with_their_types_and_labels():
    promised = {(name, kind, *sorted(re.findall(r"\w+", labels))) for name, kind, labels in ROW.findall(PAGE)}
    published = set()
    for family in text_string_to_metric_families(everything()):
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        assert all(labels == sample.labels.keys() - {"le"} for sample in family.samples), family.name
        published.add((family.name, family.type, *sorted(labels)))
    assert len(promised) > 80
    assert published == promised
