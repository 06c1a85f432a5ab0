"""Looks of ``osd doctor --cluster`` at a node, with a real Ray and a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import redis

from deploy.doctor.cluster import ProbeError, ask_nodes, probing
from deploy.doctor.findings import configured_redis_finding
from deploy.doctor.node import NodeProbe, NodeReport, versions
from osd.config import Settings
from tests.redis_servers import PASSWORD, acl_rules
from tests.waiting import HANG_SECONDS


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[dict[str, Any]]]:
    """Nodes of a Ray with one node."""
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.nodes()
    ray.shutdown()


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", redis_url=redis_url)


def report_of(nodes: list[dict[str, Any]], probe: NodeProbe) -> NodeReport | str:
    (report,) = ask_nodes(nodes, probe, HANG_SECONDS).values()
    return report


def test_node_with_the_same_home_and_redis_has_no_fault(nodes, settings, redis_client):
    with probing(settings, asks_redis=True) as probe:
        assert report_of(nodes, probe) == NodeReport(versions(), shares_home=True)
        assert redis_client.get(f"osd:doctor:{probe.token}") == probe.token.encode()
    assert list(settings.home_dir.iterdir()) == []
    assert redis_client.keys() == []


def test_node_with_another_home_does_not_share_it(nodes, settings, tmp_path):
    with probing(settings, asks_redis=True) as probe:
        assert report_of(nodes, replace(probe, home=tmp_path / "other")) == NodeReport(versions(), shares_home=False)


def test_node_with_another_redis_says_so(nodes, settings, redis_client):
    with probing(settings, asks_redis=True) as probe:
        redis_client.flushall()
        report = report_of(nodes, probe)
    assert isinstance(report, NodeReport)
    assert report.redis.endswith("is another server than here: name the same server for all nodes")
    assert settings.redis_url is not None
    assert settings.redis_url.partition("@")[0] not in report.redis


def test_node_without_an_answer_has_no_report(nodes, settings):
    with probing(settings, asks_redis=False) as probe:
        (report,) = ask_nodes(nodes, probe, 0.0).values()
        assert report == "no answer within 0 seconds; check that RAY_AUTH_TOKEN_PATH can be read there"
        gone = [{**nodes[0], "NodeID": "ab" * 28}]
        assert str(report_of(gone, probe)).startswith("the check fails there (")


def test_redis_that_cannot_be_written_is_a_finding(settings, redis_client):
    redis_client.execute_command("CONFIG SET maxmemory 1")
    with pytest.raises(ProbeError) as refused, probing(settings, asks_redis=True):
        pass
    assert refused.value.finding.check == "Redis"
    assert "cannot be written: " in refused.value.finding.says
    assert list(settings.home_dir.iterdir()) == []


def test_redis_user_without_info_is_no_failure(redis_url: str, redis_client: redis.Redis):
    redis_client.execute_command("ACL SETUSER", "osd", "reset", "on", f">{PASSWORD}", *acl_rules("osd"))
    try:
        url = f"redis://osd:{PASSWORD}@{redis_url.rpartition('@')[2]}"
        finding = configured_redis_finding(Settings(redis_url=url))
        assert (finding.state, "may not read version" in finding.says) == ("ok", True)
    finally:
        redis_client.execute_command("ACL DELUSER", "osd")
