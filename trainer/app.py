"""Starts the trainer: one process, or several that train together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import ray

from osd.config import Settings
from osd.config.gpus import trainer_gpus
from trainer.actor import Trainer
from trainer.distributed import CALLS, DistributedTrainer

if TYPE_CHECKING:
    from ray.actor import ActorProxy

logger = logging.getLogger(__name__)

NAME = "osd-trainer"


def wanted(settings: Settings) -> bool:
    """Whether there is to be a trainer; where there is nothing to train the log says so."""
    if settings.trainer.enabled and settings.drafts and not settings.drafter.trainable:
        logger.info("drafter.kind %s has nothing to train, there is no trainer", settings.drafter.kind)
    return settings.trains


def start(settings: Settings, redis_url: str, **options: Any) -> ActorProxy[Trainer]:
    """Start the trainer of all that ``settings`` name under the name "osd-trainer" in the caller's Ray namespace.

    It reserves no CPU with Ray: it uses what serving leaves over. Of a GPU it has its share. Ray starts it again
    whenever it dies, on a node with ``trainer.node_labels``, and waits for one where there is none. ``options`` are
    further ones of the actor.
    """
    gpus = trainer_gpus(settings, ray.cluster_resources().get("GPU", 0))
    trainer = settings.trainer.model_copy(update={"device": "cuda" if gpus else "cpu"})
    settings = settings.model_copy(update={"trainer": trainer})
    kind: type[Trainer] = Trainer
    if labels := settings.trainer.labels:
        options = {**options, "label_selector": labels}
    if settings.trainer.workers > 1:
        kind, options = DistributedTrainer, {**options, "max_concurrency": CALLS}
    elif gpus:
        options = {**options, "num_gpus": gpus}
    actor = ray.remote(kind).options(name=NAME, num_cpus=0, max_restarts=-1, max_task_retries=-1, **options)
    return actor.remote(settings, redis_url)
