"""``osd deploy`` and ``osd doctor --cluster``: refusals before a running service is touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
import yaml

from deploy.deployment import read_deployment
from osd.config import ConfigError
from tests.command import refusal, run_cli
from tests.http_servers import answering

FILE = Path(__file__).parents[3] / "deploy" / "serve.yaml"
TOKEN = "5" * 32


class Head(BaseHTTPRequestHandler):
    """Head of a cluster that gives its version and accepts no deployment."""

    version = ray.__version__
    requires_token = True
    methods: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self._answer({"ray_version": self.version})

    def do_PUT(self) -> None:
        self._answer({})

    def _answer(self, content: Any) -> None:
        self.methods.append(self.command)
        is_allowed = self.headers["authorization"] == f"Bearer {TOKEN}" or not self.requires_token
        self.send_response(200 if is_allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Head]]:
    """Run a head with its token in the environment."""
    kind = type("OwnHead", (Head,), {"methods": []})
    with answering(kind) as server:
        monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # loopback is reached without it
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield kind


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Return ``deploy/serve.yaml`` with the files of this test."""
    config = yaml.safe_load(FILE.read_text())
    args = config["applications"][0]["args"]
    for section, key in (("redis", "password_file"), ("serving", "api_key_file")):
        args[section][key] = str(tmp_path / key)
        (tmp_path / key).write_text("secret")
    args |= {"home": str(tmp_path), "redis_url": "redis://127.0.0.1:1/0"}
    return config


def write(tmp_path: Path, config: Any) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_deployment_file_of_the_repository_is_read():
    assert read_deployment(FILE).args["serving"]["replicas"] == 2


def change(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config["applications"][0] |= changes
    return config


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda config: [], "is not a deployment of osd"),
        (lambda config: {"target": {"source": "a"}}, "is not a deployment of osd"),
        (lambda config: change(config, import_path="serving.app:build"), "import_path: deploy.cluster:build"),
        (lambda config: change(config, argz={}), r"applications.argz"),
        (lambda config: config | {"http_options": {"prt": 1}}, r"Ray Serve ignores http_options.prt"),
        (lambda config: config | {"proxy_location": "Nowhere"}, "proxy_location"),
    ],
)
def test_file_that_deploys_something_else_is_refused(broken, reason: str, config, tmp_path: Path):
    with pytest.raises(ConfigError, match=reason):
        read_deployment(write(tmp_path, broken(config)))


@pytest.mark.parametrize("name", ["deploy/serve.yaml", "not-yaml"])
def test_deploy_of_a_missing_or_broken_file_asks_no_head(name: str, head, tmp_path: Path):
    (tmp_path / "not-yaml").write_text("a: [")
    assert str(tmp_path / name) in refusal(run_cli("deploy", tmp_path / name))
    assert head.methods == []


def test_deploy_with_an_invalid_setting_asks_no_head(head, config, tmp_path: Path):
    config["applications"][0]["args"]["serving"]["replicaz"] = 3
    assert "serving.replicaz (args)" in refusal(run_cli("deploy", write(tmp_path, config)))
    assert head.methods == []


def test_deploy_without_a_file_of_a_secret_asks_no_head(head, config, tmp_path: Path):
    (tmp_path / "api_key_file").unlink()
    assert "serving.api_key_file" in refusal(run_cli("deploy", write(tmp_path, config)))
    assert head.methods == []


def test_deploy_to_another_version_of_ray_deploys_nothing(head, config, tmp_path: Path):
    head.version = "2.1.0"
    assert "the cluster runs Ray 2.1.0" in refusal(run_cli("deploy", write(tmp_path, config)))
    assert head.methods == ["GET"]


def test_deploy_with_another_token_deploys_nothing(head, config, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert "refuses the token" in refusal(run_cli("deploy", write(tmp_path, config)))
    assert head.methods == ["GET"]


def test_deploy_with_an_unreachable_redis_deploys_nothing(head, config, tmp_path: Path):
    assert "redis_url redis://127.0.0.1:1/0: cannot connect" in refusal(run_cli("deploy", write(tmp_path, config)))
    assert set(head.methods) == {"GET"}


def test_deploy_to_a_head_without_a_token_deploys_nothing(head, config, tmp_path: Path):
    head.requires_token = False
    assert "also answers without a token" in refusal(run_cli("deploy", write(tmp_path, config)))
    assert set(head.methods) == {"GET"}


def test_doctor_of_a_cluster_reports_a_missing_token(config, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray-token"))
    shown = run_cli("doctor", "--json", "--cluster", write(tmp_path, config))
    assert shown.exit_code == 1
    last = json.loads(shown.stdout.splitlines()[-1])
    assert (last["check"], last["state"]) == ("Ray", "failure")
    assert f"RAY_AUTH_TOKEN_PATH {tmp_path / 'ray-token'} cannot be read" in last["says"]


def test_doctor_of_a_cluster_reports_a_head_that_is_gone(head, config, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:1")
    shown = run_cli("doctor", "--json", "--cluster", write(tmp_path, config))
    assert "Ray's head does not answer at http://127.0.0.1:1" in shown.stdout
    assert shown.exit_code == 1


def test_doctor_of_a_cluster_takes_no_other_settings(config, tmp_path: Path):
    assert "leave out" in refusal(run_cli("doctor", "--cluster", write(tmp_path, config), "--set", "engine.slots=1"))
    assert "leave out" in refusal(run_cli("doctor", "a-model", "--cluster", write(tmp_path, config)))
