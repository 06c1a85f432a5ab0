"""Findings of ``osd doctor --cluster`` from the reports of nodes, and the report of one node."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from deploy.doctor.cluster import judge, places_finding, probing
from deploy.doctor.limit import CallTimeout, within
from deploy.doctor.node import NodeProbe, NodeReport, folder_of, look, versions
from osd.config import Settings
from osd.sealed import seal

SAME = NodeReport(versions(), shares_home=True)
SILENT = "no answer within 20 seconds"
UNREACHABLE = "redis://127.0.0.1:1/0"


def failures(*reports: NodeReport | str, **settings: Any) -> list[str]:
    """Return the failures that follow from the reports of nodes a, b, ..."""
    findings = judge(dict(zip("abc", reports, strict=False)), Settings(home="/data", **settings))  # type: ignore[arg-type]
    return [finding.says for finding in findings if finding.state == "failure"]


def report(**fields: Any) -> NodeReport:
    return NodeReport(**{"versions": versions(), "shares_home": True, **fields})


def test_equal_nodes_have_no_failure():
    assert failures(SAME, SAME) == []
    home = next(finding for finding in judge({"a": SAME, "b": SAME}, Settings(home="/data")) if finding.check == "home")
    assert (home.state, home.says) == ("ok", "/data is the same folder on 2 nodes")


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ((SAME, SILENT, SILENT), "b, c: no answer within 20 seconds"),
        ((SAME, report(shares_home=False)), "home /data of b is not the folder of this node: mount one folder on all"),
        ((report(home="cannot be written: Read-only file system"), SAME), "home /data of a cannot be written: Read-"),
        ((SAME, report(secrets="serving.api_key_file /key is empty")), "on b: serving.api_key_file /key is empty"),
        ((report(redis="redis_url r: lost"), SAME, report(redis="redis_url r: lost")), "on a, c: redis_url r: lost"),
        ((SAME, report(engine="engine.vllm.python /p cannot be used")), "on b: engine.vllm.python /p cannot be used"),
        ((SAME, report(versions=versions() | {"Ray": "2.1.0"})), "on b: Ray 2.1.0, and here Ray "),
        ((SAME, report(versions=versions() | {"osd": "0.0.1"})), "on b: osd 0.0.1, and here osd "),
    ],
)
def test_fault_of_a_node_is_one_failure_with_its_address(reports: tuple[NodeReport | str, ...], says: str):
    (failure,) = failures(*reports)
    assert failure.startswith(says)
    assert "\n" not in failure


def test_separate_homes_are_a_warning_with_an_object_store():
    separate = report(shares_home=False)
    assert failures(SAME, separate, registry={"url": "s3://bucket/osd"}) == []
    assert len(failures(SAME, separate)) == 1


@pytest.mark.parametrize(
    ("gpus", "settings", "says"),
    [
        ((0, 0), {"target": {"device": "cuda"}}, "target.device is cuda, and no node of the cluster has a GPU"),
        ((0, 0), {"trainer": {"device": "cuda"}}, "trainer.device is cuda, and no node of the cluster has a GPU"),
        ((1, 2), {"target": {"tensor_parallel": 4}}, "target.tensor_parallel is 4, and no node has more than 2 GPUs"),
        ((0, 1), {"target": {"device": "cuda"}}, ""),
        ((0, 0), {"target": {"tensor_parallel": 4}}, ""),
    ],
)
def test_missing_gpu_is_a_failure(gpus: tuple[int, ...], settings: dict[str, Any], says: str):
    nodes = [{"Resources": {"CPU": 8, "GPU": count}} for count in gpus]
    finding = places_finding(Settings(**settings), nodes)
    assert (finding.says if finding.state == "failure" else "") == says


def probe_of(home: Path, **fields: Any) -> NodeProbe:
    return NodeProbe(**{"home": home, "token": "t", "secret_files": {}, "sealed": None, **fields})


def test_node_with_the_folder_of_the_probe_shares_home(tmp_path: Path):
    probe = probe_of(tmp_path)
    assert look(probe, "node", True) == report(shares_home=False)
    folder = folder_of(tmp_path, "t")
    folder.mkdir()
    assert look(probe, "node", True) == SAME
    assert [file.name for file in folder.iterdir()] == ["node"]


def test_node_that_cannot_write_home_says_why(tmp_path: Path):
    (tmp_path / "file").touch()
    assert look(probe_of(tmp_path / "file"), "node", True).home == "cannot be written: File exists"


def test_node_that_cannot_read_a_secret_asks_no_redis(tmp_path: Path):
    sealed = seal(Settings(home=tmp_path, redis_url=UNREACHABLE), UNREACHABLE)
    missing = probe_of(tmp_path, secret_files={"serving.api_key_file": str(tmp_path / "key")}, sealed=sealed)
    seen = look(missing, "node", True)
    assert seen.secrets == f"serving.api_key_file {tmp_path / 'key'} cannot be read: No such file or directory"
    assert seen.redis == ""


def test_node_that_cannot_reach_redis_says_why(tmp_path: Path):
    sealed = seal(Settings(home=tmp_path, redis_url=UNREACHABLE), UNREACHABLE)
    assert look(probe_of(tmp_path, sealed=sealed), "node", True).redis.startswith(
        f"redis_url {UNREACHABLE}: cannot connect"
    )


def test_interpreter_of_vllm_is_checked_where_replicas_run(tmp_path: Path):
    probe = probe_of(tmp_path, python=tmp_path / "python")
    assert look(probe, "node", True).engine.startswith(f"engine.vllm.python {tmp_path / 'python'} cannot be used")
    assert look(probe, "node", False).engine == ""


def test_secrets_of_a_probe_leave_those_of_a_service(tmp_path: Path):
    settings = Settings(home=tmp_path, serving={"api_key": "of the service"}, redis_url=UNREACHABLE)  # type: ignore[arg-type]
    seal(settings, UNREACHABLE)
    before = (tmp_path / "secrets.json").read_text()
    changed = settings.model_copy(update={"redis_url": "redis://:hush@127.0.0.1:1/0"})
    with probing(changed, asks_redis=False) as probe:
        (folder,) = tmp_path.glob(".osd-doctor-*")
        assert folder == folder_of(tmp_path, probe.token)
        assert "hush" in (folder / "secrets.json").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["secrets.json"]
    assert (tmp_path / "secrets.json").read_text() == before


def test_call_that_hangs_ends_at_its_limit():
    over = threading.Event()
    with pytest.raises(CallTimeout, match="no answer within 0 seconds"):
        within(0.05, over.wait)
    over.set()
    assert within(60, over.is_set)
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)
