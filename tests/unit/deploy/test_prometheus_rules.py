"""Prometheus rules: alerts fire only when they should, and recorded series have the right values."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus import promtool

DEPLOY = Path(__file__).parents[3] / "deploy"
RULES = [DEPLOY / "recording.yml", DEPLOY / "alerts.yml"]
OF = '{domain="general"}'


def case(series: dict[str, str], **expected: Any) -> dict[str, Any]:
    """Return a test case of promtool with minute values of series and the expected results."""
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": inputs, **expected}


def check(tmp_path: Path, *cases: dict[str, Any]) -> None:
    file = tmp_path / "rules_test.yml"
    file.write_text(yaml.safe_dump({"rule_files": list(map(str, RULES)), "tests": list(cases)}))
    promtool("test", "rules", file)


def test_files_are_valid_for_prometheus(tmp_path: Path):
    for name in ("prometheus.yml", "recording.yml", "alerts.yml"):
        shutil.copy(DEPLOY / name, tmp_path)
    config, key = tmp_path / "prometheus.yml", tmp_path / "api-key"
    key.touch()  # promtool looks for the file
    config.write_text(config.read_text().replace("/run/secrets/api-key", str(key)))
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")


def test_recorded_series_have_the_right_values(tmp_path: Path):
    series = {
        'vllm:spec_decode_num_drafts_total{model_name="m"}': "0+10x10",
        'vllm:spec_decode_num_draft_tokens_total{model_name="m"}': "0+40x10",
        'vllm:spec_decode_num_accepted_tokens_total{model_name="m"}': "0+20x10",
        'osd_source_draft_tokens_total{domain="general",source="recall"}': "0+30x10",
        'osd_source_accepted_tokens_total{domain="general",source="recall"}': "0+6x10",
    }
    values = {
        "model:osd_draft_acceptance:ratio_rate5m": ('{model_name="m"}', 0.5),
        "model:osd_acceptance_length:rate5m": ('{model_name="m"}', 3.0),
        "source:osd_draft_acceptance:ratio_rate5m": ('{domain="general",source="recall"}', 0.2),
    }
    expectations = [
        {"expr": name, "eval_time": "10m", "exp_samples": [{"labels": name + labels, "value": value}]}
        for name, (labels, value) in values.items()
    ]
    check(tmp_path, case(series, promql_expr_test=expectations))


LATER, DAY = 120, 1500  # minutes
ALERTS: dict[str, tuple[int, dict[str, str], dict[str, str]]] = {  # after how many minutes, bad series, good ones
    "OsdNoReplica": (10, {}, {"osd_running_requests" + OF: "0x20"}),
    "OsdAnswersFail": (
        20,
        {'osd_http_responses_total{status="503"}': "0+6x30", 'osd_http_responses_total{status="200"}': "0+94x30"},
        {'osd_http_responses_total{status="503"}': "0+4x30", 'osd_http_responses_total{status="200"}': "0+96x30"},
    ),
    "OsdQueueIsFull": (
        20,
        {'osd_http_responses_total{status="429"}': "0+1x30"},
        {'osd_http_responses_total{status="429"}': "5x30"},
    ),
    "OsdRequestsWait": (20, {"vllm:num_requests_waiting": "1x30"}, {"vllm:num_requests_waiting": "1 0x30"}),
    "OsdTracesDropped": (20, {"osd_traces_dropped_total" + OF: "0+1x30"}, {"osd_traces_dropped_total" + OF: "3x30"}),
    "OsdVersionRejected": (
        12,
        {"osd_rejected_versions_total" + OF: "0x5 1x10"},
        {"osd_rejected_versions_total" + OF: "1x20"},
    ),
    "OsdAcceptanceFell": (
        1000,
        {
            "osd_version_draft_tokens_total" + OF: "0+100x1000",
            "osd_version_accepted_tokens_total" + OF: "0+50x940 47000+30x60",
        },
        {
            "osd_version_draft_tokens_total" + OF: "0+100x1000",
            "osd_version_accepted_tokens_total" + OF: "0+50x940 47000+40x60",
        },
    ),
    "OsdDraftsCost": (
        LATER,
        {
            'osd_speedup{bound="high",domain="general"}': "0.98x120",
            'osd_speedup{bound="low",domain="general"}': "0.9x120",
        },
        {
            'osd_speedup{bound="high",domain="general"}': "1.02x120",
            'osd_speedup{bound="low",domain="general"}': "0.9x120",
        },
    ),
    "OsdTrainerStalled": (
        LATER,
        {"osd_training_lag" + OF: "5x120", "osd_training_records_total" + OF: "40x120"},
        {"osd_training_lag" + OF: "5x120", "osd_training_records_total" + OF: "40+1x120"},
    ),
    "OsdStreamLags": (LATER, {"osd_training_lag" + OF: "1+1x120"}, {"osd_training_lag" + OF: "200-1x120"}),
    "OsdCanaryStuck": (20, {"osd_canary_seconds" + OF: "3000+60x30"}, {"osd_canary_seconds" + OF: "0+60x30"}),
    "OsdNeverPaysBack": (
        DAY + LATER,
        {"osd_training_beside_seconds_total" + OF: "0+1x3000"},
        {
            "osd_training_beside_seconds_total" + OF: "0+1x3000",
            "osd_training_paid_back_timestamp_seconds" + OF: "5x3000",
        },
    ),
}


OF_THE_WHOLE = {"OsdNoReplica", "OsdAnswersFail", "OsdQueueIsFull", "OsdRequestsWait"}
"""Alerts without a domain."""


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_cases_cover_every_alert():
    assert {rule["alert"] for rule in alerts()} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_alert_fires_only_on_bad_series(name: str, tmp_path: Path):
    minutes, bad, good = ALERTS[name]
    (rule,) = (rule for rule in alerts() if rule["alert"] == name)
    labels = {} if name in OF_THE_WHOLE else {"domain": "general"}
    summary = rule["annotations"]["summary"].replace("{{ $labels.domain }}", "general")
    fires = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
    at = {"eval_time": f"{minutes}m", "alertname": name}
    check(
        tmp_path,
        case(bad, alert_rule_test=[{**at, "exp_alerts": fires}]),
        case(good, alert_rule_test=[{**at, "exp_alerts": []}]),
    )
