"""Deployment of the service to a Ray cluster: the file of ``osd deploy``, and the API of the cluster's head."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from pydantic import ValidationError

from osd.addresses import uses_proxies
from osd.config import ConfigError
from osd.config.sources import read_yaml

BUILDER = "deploy.cluster:build"
TOKEN_FILE = Path.home() / ".ray" / "auth_token"
"""File in which Ray looks for the token if the environment names no other."""

_ANSWER_SECONDS, _DEPLOY_SECONDS = 10.0, 60.0
"""Limits of an answer of the head, and of one for which it may have to start Serve."""

_MISSING = object()
_APPLICATIONS, _VERSION = "/api/serve/applications/", "/api/version"
_REFUSALS = (401, 403)


class ClusterError(RuntimeError):
    """Error of a cluster that does not answer or refuses; its message is one line that says what to do."""


@dataclass(frozen=True)
class Deployment:
    """Content of a deployment file: the configuration for Ray Serve, and the arguments of our application."""

    config: dict[str, Any]
    args: dict[str, Any]


def read_deployment(file: Path) -> Deployment:
    """Read and check a deployment file such as ``deploy/serve.yaml``.

    Raises:
        ConfigError: there is no such file, or it does not deploy this service and nothing else.
    """
    from ray.serve.schema import ServeDeploySchema

    config = read_yaml(file)
    applications = config.get("applications") if isinstance(config, dict) else None
    builders = [application.get("import_path") for application in applications or () if isinstance(application, dict)]
    if builders != [BUILDER]:
        raise ConfigError(f"{file} is not a deployment of osd: it needs one application with import_path: {BUILDER}")
    try:
        known = ServeDeploySchema.model_validate(config).model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if known != config:
        ignored = ", ".join(_ignored(config, known))
        raise ConfigError(f"{file}: Ray Serve ignores {ignored}: correct the name or remove it")
    return Deployment(config, config["applications"][0].get("args", {}))


def _ignored(config: Any, known: Any, path: str = "") -> list[str]:
    """Return the paths in a configuration that are missing in the configuration that Serve has read."""
    if isinstance(config, dict) and isinstance(known, dict):
        return [name for key in config for name in _ignored(config[key], known.get(key, _MISSING), f"{path}.{key}")]
    if isinstance(config, list) and isinstance(known, list):
        return [name for part, seen in zip(config, known, strict=True) for name in _ignored(part, seen, path)]
    return [] if config == known else [path.removeprefix(".")]


def read_token() -> str:
    """Return the token that Ray's servers require.

    Raises:
        ClusterError: there is none.
    """
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", TOKEN_FILE))
    advice = "write the token of the cluster into it; for a new cluster ray get-auth-token --generate makes one"
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ClusterError(f"RAY_AUTH_TOKEN_PATH {file} cannot be read ({reason}): {advice}") from None
    if not token:
        raise ClusterError(f"RAY_AUTH_TOKEN_PATH {file} is empty: {advice}")
    return token


class Head:
    """Client of the API of the cluster's head, at ``RAY_DASHBOARD_ADDRESS`` or on this machine."""

    def __init__(self, token: str) -> None:
        self.url = os.environ.get("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:8265").rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}

    def ray_version(self) -> str:
        """Return the version of Ray on the cluster.

        Raises:
            ClusterError: the head does not answer, or refuses the token.
        """
        return str(self._ask("GET", _VERSION).json()["ray_version"])

    def requires_token(self) -> bool:
        """Return whether the head refuses a request without a token.

        Raises:
            ClusterError: the head does not answer.
        """
        return self._send("GET", _VERSION, {}).status_code in _REFUSALS

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy the applications of a configuration.

        Raises:
            ClusterError: the head does not answer, or refuses the token or the configuration.
        """
        self._ask("PUT", _APPLICATIONS, config, _DEPLOY_SECONDS)

    def state(self, name: str) -> tuple[str, str, int]:
        """Return the status of an application, its message, and the number of its running replicas.

        Raises:
            ClusterError: the head does not answer, or refuses the token.
        """
        application = self._ask("GET", _APPLICATIONS).json()["applications"].get(name, {})
        deployments = application.get("deployments", {}).values()
        running = sum(replica["state"] == "RUNNING" for part in deployments for replica in part["replicas"])
        reasons = [application.get("message", ""), *(part["message"] for part in deployments)]
        return application.get("status", "NOT_STARTED"), "\n".join(filter(None, reasons)), running

    def _ask(
        self, method: str, path: str, content: dict[str, Any] | None = None, seconds: float = _ANSWER_SECONDS
    ) -> httpx2.Response:
        answer = self._send(method, path, self._headers, content, seconds)
        if answer.status_code in _REFUSALS:
            raise ClusterError(f"Ray's head at {self.url} refuses the token: every node needs the same token")
        if answer.is_error:
            reason = " ".join(answer.text.split())[:300]
            raise ClusterError(f"Ray's head at {self.url} answers {answer.status_code}: {reason}")
        return answer

    def _send(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        content: dict[str, Any] | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> httpx2.Response:
        try:
            return httpx2.request(
                method, f"{self.url}{path}", json=content, headers=headers, timeout=seconds,
                trust_env=uses_proxies(self.url),
            )  # fmt: skip
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            advice = "run this on the head, or set RAY_DASHBOARD_ADDRESS"
            raise ClusterError(f"Ray's head does not answer at {self.url} ({reason}): {advice}") from None
