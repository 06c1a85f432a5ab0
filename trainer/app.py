"""Start of the trainers: one process, several that divide the domains, or several that train one drafter together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import ray

from osd.config import Settings
from osd.sealed import seal
from trainer.actor import Trainer
from trainer.distributed import MAX_CALLS, DistributedTrainer

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

ACTOR_NAME = "osd-trainer"
"""Name of the first trainer's actor; see ``actor_names``."""


class TrainerActors:
    """Trainers of a service, called together. ``timeout`` is in seconds; None waits without limit.

    Raises:
        ray.exceptions.GetTimeoutError: a trainer does not answer in time.
        ray.exceptions.RayError: a trainer is dead.
    """

    def __init__(self, domain: str, actors: Sequence[ActorHandle[Any]]) -> None:
        """Wrap the actors of a service whose main domain is ``domain``."""
        self.actors, self._domain = actors, domain

    def pause(self, timeout: float | None = None) -> bool:
        """Pause all trainers; return whether all of them rest."""
        return all(ray.get([actor.pause.remote() for actor in self.actors], timeout=timeout))

    def resume(self, timeout: float | None = None) -> None:
        """Resume all trainers."""
        ray.get([actor.resume.remote() for actor in self.actors], timeout=timeout)

    def stop(self, seconds: float = 10.0, timeout: float | None = None) -> bool:
        """Stop all trainers; return whether all ended within ``seconds``."""
        return all(ray.get([actor.stop.remote(seconds) for actor in self.actors], timeout=timeout))

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the status of all trainers together; see ``merge_statuses``."""
        return merge_statuses(self._domain, ray.get([actor.status.remote() for actor in self.actors], timeout=timeout))

    def kill(self) -> None:
        """Kill all trainers; Ray does not restart them."""
        for actor in self.actors:
            ray.kill(actor)


def merge_statuses(domain: str, statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the statuses of several trainers into a dict of the same form, see ``DomainWorkers.status``.

    ``domain`` is the main domain, whose state is the top level of the result. The state of each domain is from the
    trainer that trains it now. ``failure`` is the error of the first trainer that failed, "" for none.
    """
    owners = {name: status for status in reversed(statuses) for name in status.get("domains", ())}
    extra = {name: state for status in statuses for name, state in status.get("extra_domains", {}).items()}
    extra |= {name: owners[name]["extra_domains"][name] for name in owners.keys() & extra.keys()}
    failure = next((status["failure"] for status in statuses if status["failure"]), "")
    main = owners.get(domain, statuses[0])
    return {**main, "domains": sorted(owners), "extra_domains": extra, "failure": failure}


def needs_trainer(settings: Settings) -> bool:
    """Return whether the service needs a trainer; log when the drafter cannot be trained."""
    if settings.trainer.enabled and settings.drafts and not settings.drafter.trainable:
        logger.info("drafter.kind %s cannot be trained, so no trainer starts", settings.drafter.kind)
    return settings.trains


def start(settings: Settings, redis_url: str, **options: Any) -> TrainerActors:
    """Start all trainers of ``settings``, the first one as "osd-trainer" in the caller's Ray namespace.

    They reserve no CPU with Ray, as they use spare capacity. On a GPU each trainer reserves its share. Ray restarts a
    dead trainer on a node with ``trainer.node_labels``, and waits for such a node. Several trainers are spread over the
    nodes. ``options`` are further options of the actors.
    """
    gpus = settings.trainer_gpus(ray.cluster_resources().get("GPU", 0))
    trainer = settings.trainer.model_copy(update={"device": "cuda" if gpus else "cpu"})
    settings = settings.model_copy(update={"trainer": trainer})
    kind: type[Trainer] = Trainer
    if labels := settings.trainer.labels:
        options = {**options, "label_selector": labels}
    if settings.trainer.workers > 1:
        kind, options = DistributedTrainer, {**options, "max_concurrency": MAX_CALLS}
    elif gpus:
        options = {**options, "num_gpus": gpus}
    if trainer.processes > 1:
        # Ray spreads only actors that reserve a resource, and every node has one byte of memory.
        options = {**options, "scheduling_strategy": "SPREAD", "memory": 1}
    remote, options_of_all = ray.remote(kind), {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, **options}
    names, sealed = actor_names(trainer.processes), seal(settings, redis_url)
    actors = [remote.options(name=name, **options_of_all).remote(sealed) for name in names]
    return TrainerActors(settings.domain, cast("Sequence[ActorHandle[Any]]", actors))


def actor_names(count: int) -> list[str]:
    """Return the actor names of ``count`` trainers; the numbers begin with the second trainer."""
    return [ACTOR_NAME, *(f"{ACTOR_NAME}-{number}" for number in range(2, count + 1))]


def running_trainers(namespace: str) -> list[str]:
    """Return the names of all trainers in a Ray namespace."""
    actors = cast(list[dict[str, str]], ray.util.list_named_actors(all_namespaces=True))
    names = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    return sorted(name for name in names if name == ACTOR_NAME or name.startswith(f"{ACTOR_NAME}-"))
