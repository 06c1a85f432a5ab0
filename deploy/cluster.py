"""The loop on an existing Ray cluster: the builder for ``serve deploy`` and for KubeRay's RayService."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import ray
from ray import serve

import serving.app
import trainer.app
from deploy.contradictions import check_exposure, check_settings
from deploy.one_drafter import for_one_drafter
from deploy.preparation import check_rules, prepare
from osd.capture.server import open_redis
from osd.config import ConfigError, Settings, dotted, load_settings
from osd.config.secrets import holds_password
from osd.target.load import target_directory

logger = logging.getLogger(__name__)

_NAMESPACE = "osd"
_GONE_SECONDS = 30.0


def build(args: dict[str, Any]) -> serve.Application:
    """Prepare the target and the first drafter version, start the trainers, and return the application.

    Every node must see the same ``home``. A new deployment replaces the trainers, which resume from their checkpoints.

    Args:
        args: settings, nested or by dotted keys, which override the environment; ``redis_url`` must be set in either.

    Raises:
        ConfigError: a setting is invalid, settings contradict each other, an argument is a secret, or ``redis_url`` is
            missing.
        osd.target.load.TargetError: the target cannot be loaded.
        osd.capture.server.RedisSetupError: Redis does not answer, or is a Redis Cluster.
    """
    settings = checked_settings(args)
    check_rules(settings)
    redis_url = open_redis(settings).url
    prepare(settings, redis_url, target_directory(settings))
    if settings.engine.kind == "vllm":
        from deploy.vllm.exports import prepare_export

        prepare_export(settings)
    _end_trainers()
    if trainer.app.needs_trainer(settings):
        _look_for_nodes(settings)
        trainer.app.start(settings, redis_url, namespace=_NAMESPACE, lifetime="detached")
    return serving.app.build(settings, redis_url)


def checked_settings(args: dict[str, Any]) -> Settings:
    """Return the settings of a deployment with the arguments ``args``.

    Raises:
        ConfigError: see ``build``.
    """
    for key, value in dotted(args).items():
        if key in ("serving.api_key", "serving.admin_key") or (key == "redis_url" and holds_password(str(value))):
            instead = "redis.password_file" if key == "redis_url" else f"{key}_file"
            raise ConfigError(f"{key} in the arguments would stay readable in Ray's tables: use {instead}")
    settings = load_settings(arguments=args)
    if settings.redis_url is None:
        raise ConfigError("redis_url must be set on a cluster: all nodes share one Redis")
    if settings.engine.kind == "vllm":
        settings = for_one_drafter(settings)
    check_exposure(settings)
    check_settings(settings)
    return settings


def _look_for_nodes(settings: Settings) -> None:
    """Log a warning if no node has the trainer's labels, so that the trainer waits for one."""
    labels = settings.trainer.labels.items()
    nodes: list[dict[str, Any]] = ray.nodes()
    if not any(node["Alive"] and labels <= node["Labels"].items() for node in nodes):
        named = ", ".join(settings.trainer.node_labels)
        logger.warning("trainer.node_labels %s: no node has them, and the trainer waits for such a node", named)


def _end_trainers() -> None:
    """End the trainers of an earlier deployment and wait until their names are free."""
    deadline = time.monotonic() + _GONE_SECONDS
    while (names := trainer.app.running_trainers(_NAMESPACE)) and time.monotonic() < deadline:
        for name in names:
            with contextlib.suppress(ValueError):  # it has ended by itself
                ray.kill(ray.get_actor(name, _NAMESPACE))
        time.sleep(0.2)
