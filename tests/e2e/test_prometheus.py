"""Queries of dashboards and rules on a real Prometheus that scrapes the service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import yaml

from osd.capture.server import free_port
from tests.prometheus import program
from tests.waiting import HANG_SECONDS, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
WITHOUT_TRAINER = (
    "osd_training_", "osd_replay_", "osd_gate_", "osd_canary_", "osd_version_speedup", "osd_trained_speedup",
)  # fmt: skip
"""Prefixes of metrics that need reports of a trainer."""


@contextmanager
def prometheus(folder: Path, scraped: str) -> Iterator[httpx.Client]:
    """Run a server with the project's rules that scrapes an address several times a second."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "500ms"}
    (folder / "api-key").write_text("a service without keys ignores it")
    config["scrape_configs"][0] |= {
        "static_configs": [{"targets": [scraped]}],
        "authorization": {"credentials_file": str(folder / "api-key")},
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, f"--storage.tsdb.path={folder / 'data'}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60) as http:
            wait_until(lambda: ready(http), every=0.2, what="the server")
            yield http
    finally:
        server.terminate()
        server.wait(HANG_SECONDS)


def ask(http: httpx.Client, expression: str) -> list[Any]:
    answer = http.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    return answer.json()["data"]["result"]


def alerts(http: httpx.Client) -> set[str]:
    """Return the names of the alerts that are pending or firing."""
    return {alert["labels"]["alertname"] for alert in http.get("/api/v1/alerts").json()["data"]["alerts"]}


def ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:  # it does not listen yet
        return False


def test_dashboard_and_rule_queries_have_data(service, tmp_path):
    dashboard = json.loads((DEPLOY / "grafana/osd.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    with prometheus(tmp_path, service.url.removeprefix("http://")) as http:
        wait_until(lambda: ask(http, "osd_requests_total"), every=0.2, what="a scrape of requests")
        rates = "domain:osd_draft_acceptance:ratio_rate5m"

        def rated() -> object:
            assert service.complete("the same text").status_code == 200  # until drafts pay, on a busy machine too
            return ask(http, rates)

        wait_until(rated, every=0.2, what="a value of the rules")
        for expression in queries:
            if not any(name in expression for name in (*WITHOUT_TRAINER, "osd_speedup")):
                # A scrape that was not answered in time leaves a metric without a value until the next.
                wait_until(lambda query=expression: ask(http, query), every=0.2, what=expression)
            else:
                ask(http, expression)
        rules = http.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
        # A scrape that was not answered in time makes the alert pending until a later scrape and evaluation.
        wait_until(lambda: "OsdNoReplica" not in alerts(http), every=0.2, what="a scrape of the replica")
