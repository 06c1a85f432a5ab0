"""Probe of one node of a cluster, for ``osd doctor --cluster``; it imports little, because every node runs it."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from redis.exceptions import RedisError

import osd
from deploy.doctor.limit import CallTimeout, within
from deploy.vllm.environment import PythonError, check_environment
from osd import files
from osd.capture.server import RedisSetupError, open_redis, public_url
from osd.config import ConfigError
from osd.config.secrets import secret
from osd.redis_client import connect
from osd.sealed import SealedSettings

_HOME_SECONDS, _REDIS_SECONDS, _ENGINE_SECONDS = 4.0, 5.0, 5.0
"""Limits of the checks of a node, which together are below the limit for all nodes."""


@dataclass(frozen=True)
class NodeReport:
    """Report of one node; a reason is "" if there is no fault.

    Attributes:
        versions: versions of Ray, Python and osd, by name.
        shares_home: whether the node sees the folder of the probe in ``home``.
        home: reason why ``home`` cannot be used.
        secrets: reason why a file with a secret cannot be read.
        redis: reason why the Redis of the service cannot be used.
        engine: reason why replicas of vLLM cannot run.
    """

    versions: dict[str, str]
    shares_home: bool = False
    home: str = ""
    secrets: str = ""
    redis: str = ""
    engine: str = ""


def versions() -> dict[str, str]:
    """Return the versions of this process that must be the same on all nodes, by name."""
    return {"Ray": ray.__version__, "Python": platform.python_version(), "osd": osd.__version__}


def folder_of(home: Path, token: str) -> Path:
    """Return the folder in ``home`` of a probe with the name ``token``."""
    return home / f".osd-doctor-{token}"


def key_of(token: str) -> str:
    """Return the key in Redis of a probe with the name ``token``."""
    return f"osd:doctor:{token}"


@dataclass(frozen=True)
class NodeProbe:
    """Checks that all nodes make.

    Attributes:
        home: the ``home`` of the service. A node that finds the probe's folder there writes an empty file into it.
        token: random name of the probe.
        secret_files: files with secrets, by setting.
        sealed: settings with the Redis of the service, whose key of the probe must be ``token``; None asks no Redis.
        python: interpreter of nodes with replicas of vLLM; None without vLLM.
    """

    home: Path
    token: str
    secret_files: dict[str, str]
    sealed: SealedSettings | None
    python: Path | None = None


def look(probe: NodeProbe, node: str, runs_replicas: bool) -> NodeReport:
    """Return the report of this node.

    Args:
        probe: the checks.
        node: name of the file that the node writes.
        runs_replicas: whether the node can have replicas.
    """
    try:
        shares_home = within(_HOME_SECONDS, _use_home, probe, node)
    except OSError as error:
        return NodeReport(versions(), home=f"cannot be written: {error.strerror}")
    except CallTimeout as error:
        return NodeReport(versions(), home=f"gives {error}")
    secrets = _limited(", ".join(probe.secret_files), _HOME_SECONDS, _read_secrets, probe.secret_files)
    redis = engine = ""
    if probe.sealed is not None and not secrets:  # the password of Redis is one of the secrets
        redis = _limited("redis_url", _REDIS_SECONDS, _ask_redis, probe.sealed, probe.token)
    if probe.python is not None and runs_replicas:
        engine = _limited("engine.vllm.python", _ENGINE_SECONDS, _check_engine, probe.python)
    return NodeReport(versions(), shares_home, "", secrets, redis, engine)


def _limited(subject: str, seconds: float, check: Callable[..., str], *arguments: Any) -> str:
    """Return the reason that ``check`` returns, or that it takes too long."""
    try:
        return within(seconds, check, *arguments)
    except CallTimeout as error:
        return f"{subject}: {error}"


def _use_home(probe: NodeProbe, node: str) -> bool:
    """Return whether ``home`` has the folder of the probe.

    Raises:
        OSError: nothing can be written.
    """
    folder = folder_of(probe.home, probe.token)
    if folder.is_dir():
        files.write(folder / node)
        return True
    files.make_directory(probe.home)
    with tempfile.TemporaryFile(dir=probe.home):
        return False


def _read_secrets(secret_files: dict[str, str]) -> str:
    for name, file in secret_files.items():
        try:
            secret(name, Path(file))
        except ConfigError as error:
            return str(error)
    return ""


def _ask_redis(sealed: SealedSettings, token: str) -> str:
    try:
        settings, url = sealed.open()
        open_redis(settings)
        with connect(url, timeout=2.0) as client:
            value = client.get(key_of(token))
    except (ConfigError, RedisSetupError) as error:
        return str(error)
    except RedisError as error:
        return " ".join(str(error).split())
    if value != token.encode():
        return f"redis_url {public_url(url)} is another server than here: name the same server for all nodes"
    return ""


def _check_engine(python: Path) -> str:
    try:
        check_environment(python)
    except PythonError as error:
        return str(error)
    return ""
