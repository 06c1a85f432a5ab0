"""Starts the trainers: one process, several among which the domains are divided, or several that train together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import ray

from osd.config import Settings
from trainer.actor import Trainer
from trainer.distributed import CALLS, DistributedTrainer

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

NAME = "osd-trainer"
"""Of the first trainer's actor; see ``names``."""


class TrainerActors:
    """The trainers of a service: what one is told all are, within ``timeout`` seconds, None for as long as it takes.

    Raises:
        ray.exceptions.GetTimeoutError: one does not answer in time.
        ray.exceptions.RayError: one is gone.
    """

    def __init__(self, domain: str, actors: Sequence[ActorHandle[Any]]) -> None:
        """``domain`` is their service's own."""
        self.actors, self._domain = actors, domain

    def pause(self, timeout: float | None = None) -> bool:
        """See ``Trainer.pause``: whether all are at rest."""
        return all(ray.get([actor.pause.remote() for actor in self.actors], timeout=timeout))

    def resume(self, timeout: float | None = None) -> None:
        """See ``Trainer.resume``."""
        ray.get([actor.resume.remote() for actor in self.actors], timeout=timeout)

    def stop(self, seconds: float = 10.0, timeout: float | None = None) -> bool:
        """See ``Trainer.stop``: whether all have ended within so many ``seconds``."""
        return all(ray.get([actor.stop.remote(seconds) for actor in self.actors], timeout=timeout))

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """See ``Trainer.status``: of each domain what the trainer says that has it."""
        return merged(self._domain, ray.get([actor.status.remote() for actor in self.actors], timeout=timeout))

    def kill(self) -> None:
        """End them at once, for good."""
        for actor in self.actors:
            ray.kill(actor)


def merged(domain: str, statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One status of several trainers', whose own ``domain`` it is: of each domain what the one says that has it."""
    having = {name: status for status in reversed(statuses) for name in status.get("domains", ())}
    others = {name: said for status in statuses for name, said in status.get("extra_domains", {}).items()}
    others |= {name: having[name]["extra_domains"][name] for name in having.keys() & others.keys()}
    failure = next((status["failure"] for status in statuses if status["failure"]), "")
    own = having.get(domain, statuses[0])
    return {**own, "domains": sorted(having), "extra_domains": others, "failure": failure}


def wanted(settings: Settings) -> bool:
    """Whether there is to be a trainer; where there is nothing to train the log says so."""
    if settings.trainer.enabled and settings.drafts and not settings.drafter.trainable:
        logger.info("drafter.kind %s has nothing to train, there is no trainer", settings.drafter.kind)
    return settings.trains


def start(settings: Settings, redis_url: str, **options: Any) -> TrainerActors:
    """Start the trainers of all that ``settings`` name, the first as "osd-trainer" in the caller's Ray namespace.

    They reserve no CPU with Ray: they use what serving leaves over. Of a GPU each has its share. Ray starts one again
    whenever it dies, on a node with ``trainer.node_labels``, and waits for one where there is none; several are spread
    over the nodes. ``options`` are further ones of the actors.
    """
    gpus = settings.trainer_gpus(ray.cluster_resources().get("GPU", 0))
    trainer = settings.trainer.model_copy(update={"device": "cuda" if gpus else "cpu"})
    settings = settings.model_copy(update={"trainer": trainer})
    kind: type[Trainer] = Trainer
    if labels := settings.trainer.labels:
        options = {**options, "label_selector": labels}
    if settings.trainer.workers > 1:
        kind, options = DistributedTrainer, {**options, "max_concurrency": CALLS}
    elif gpus:
        options = {**options, "num_gpus": gpus}
    if trainer.processes > 1:
        # An actor that takes nothing goes to any node; of one byte of memory Ray keeps books, and every node has that.
        options = {**options, "scheduling_strategy": "SPREAD", "memory": 1}
    remote, lasting = ray.remote(kind), {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, **options}
    actors = [remote.options(name=name, **lasting).remote(settings, redis_url) for name in names(trainer.processes)]
    return TrainerActors(settings.domain, cast("Sequence[ActorHandle[Any]]", actors))


def names(count: int) -> list[str]:
    """Those of the actors of so many trainers."""
    return [NAME, *(f"{NAME}-{number}" for number in range(2, count + 1))]


def running(namespace: str) -> list[str]:
    """The names of all trainers in a Ray namespace."""
    found = cast(list[dict[str, str]], ray.util.list_named_actors(all_namespaces=True))
    ours = [actor["name"] for actor in found if actor["namespace"] == namespace]
    return sorted(name for name in ours if name == NAME or name.startswith(f"{NAME}-"))
