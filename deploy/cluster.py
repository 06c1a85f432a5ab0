"""The same loop on an existing Ray cluster: the builder that ``serve deploy`` and KubeRay's RayService call."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import ray
from ray import serve

import serving.app
import trainer.app
from deploy.contradictions import check_settings
from deploy.preparation import check_rules, prepare
from osd.capture.server import open_redis
from osd.config import ConfigError, Settings, load_settings
from osd.target.load import target_directory

logger = logging.getLogger(__name__)

_NAMESPACE = "osd"
_GONE_SECONDS = 30.0


def build(args: dict[str, str]) -> serve.Application:
    """Prepare target and first drafter version, start the trainers, and return the application.

    Every node must see the same ``home``. Deploying again replaces the trainers; they resume from their checkpoints.
    ``args`` are settings by their dotted keys, over those of the environment; ``redis_url`` must be among the two.

    Raises:
        ConfigError: a setting is refused, settings contradict each other, or there is no ``redis_url``.
        osd.target.load.TargetError: the target cannot be had.
        osd.capture.server.RedisError: Redis does not answer, or is a cluster.
    """
    settings = load_settings(None, [f"{key}={value}" for key, value in args.items()])
    if settings.redis_url is None:
        raise ConfigError("redis_url must be set on a cluster: all nodes share one Redis")
    check_settings(settings)
    check_rules(settings)
    open_redis(settings).close()
    prepare(settings, settings.redis_url, target_directory(settings))
    if settings.drafts:
        _end_trainers()
        if trainer.app.wanted(settings):
            _look_for_nodes(settings)
            trainer.app.start(settings, settings.redis_url, namespace=_NAMESPACE, lifetime="detached")
    return serving.app.build(settings, settings.redis_url)


def _look_for_nodes(settings: Settings) -> None:
    """Say that the trainer waits, where no node has its labels now."""
    labels = settings.trainer.labels.items()
    nodes: list[dict[str, Any]] = ray.nodes()
    if not any(node["Alive"] and labels <= node["Labels"].items() for node in nodes):
        named = ", ".join(settings.trainer.node_labels)
        logger.warning("trainer.node_labels %s: no node has them, and the trainer waits for one", named)


def _end_trainers() -> None:
    """End the trainers of an earlier deployment, however many it had, and wait until their names are free."""
    deadline = time.monotonic() + _GONE_SECONDS
    while (left := trainer.app.running(_NAMESPACE)) and time.monotonic() < deadline:
        for name in left:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, _NAMESPACE))
        time.sleep(0.2)
