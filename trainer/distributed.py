"""The trainer as a Ray Train job: rank 0 trains, the others help, and when one dies Ray Train starts all anew."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from osd.config import Settings
from trainer.actor import Trainer, open_target
from trainer.status import Status

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trainer.domain_workers import DomainWorkers

CALLS = 8
"""Calls to the actor at the same time: rank 0 reports while somebody waits for the end."""

_SILENCE_SECONDS = 365 * 86_400
"""How long ranks wait for each other: serving may need the machine for days. A death is noticed without it."""

_TOKEN = {"memory": 1}
"""What each worker takes from Ray's books, one byte: it may not be nothing, and every node has that."""

_CALM_SECONDS = 5.0
"""An error that comes again and again is not to keep the nodes busy with starts. A death is answered at once."""

_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 15.0

_workers: DomainWorkers | None = None
"""Of rank 0, in its process."""


class DistributedTrainer(Trainer):
    """A ``Trainer`` whose training runs in ``trainer.workers`` processes of a Ray Train job, spread over the nodes.

    Like the trainer of one process they reserve no CPU with Ray. When one of them dies, or its node is taken
    away, all end, and as many go on from the checkpoint on the nodes that are left: what was acknowledged is in there,
    and the rest is delivered again.
    """

    _told = False  # the error that ended the group that is there now

    def join(self, actor: ActorHandle[Any]) -> tuple[bool, bool]:
        """Register rank 0 of a new group; returns whether it is to pause, and whether to stop."""
        with self._lock:
            if self._worker is not None and not self._told:
                self._failure = "a process of the group died"
            self._worker, self._told = Remote(actor), False
            return self._paused, self._stop.is_set()

    def fail(self, failure: str) -> None:
        """See ``Trainer.fail``; of a rank too, but one that was killed cannot tell."""
        with self._lock:
            super().fail(failure)
            self._told = True

    def _train(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(_POLL_SECONDS))
        # Told that its node will go, a rank could do nothing but go on: nobody needs to watch for that.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # a relative home means the same in every process
        config = {"settings": self._settings, "redis_url": self._redis_url, "group": _this_actor()}
        scaling = ScalingConfig(
            num_workers=self._settings.trainer.workers, resources_per_worker=_TOKEN, placement_strategy="SPREAD"
        )
        trainer = TorchTrainer(
            work,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo", timeout_s=_SILENCE_SECONDS),
            scaling_config=scaling,
            run_config=RunConfig(
                name="ray-train",
                storage_path=str(self._settings.home_dir / "trainer"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        trainer.fit()


class Remote:
    """The ``DomainWorkers`` of a group's rank 0. One that is gone trains nothing, and is at rest."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor

    def status(self) -> dict[str, Any]:
        """See ``DomainWorkers.status``."""
        return self._ask("status") or dict(Status().__dict__)

    def pause(self, timeout: float = 5.0) -> bool:
        """See ``DomainWorkers.pause``."""
        return self._ask("pause", timeout) is not False

    def resume(self) -> None:
        """See ``DomainWorkers.resume``."""
        self._ask("resume")

    def stop(self) -> None:
        """See ``DomainWorkers.stop``."""
        self._ask("stop")

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(self._actor.__ray_call__.remote(_answer, method, *arguments), timeout=_ANSWER_SECONDS)
        except GetTimeoutError:
            raise
        except RayError:
            return None


def _answer(actor: object, method: str, *arguments: Any) -> Any:
    """Call the workers of this process; ``actor`` is Ray Train's."""
    return getattr(_workers, method)(*arguments)


def _this_actor() -> ActorHandle[Any]:
    return ray.get_runtime_context().current_actor


def work(config: dict[str, Any]) -> None:
    """What every rank of the group runs, in a thread of an actor of Ray Train's."""
    import torch.distributed as dist

    from trainer.ranks import Rank

    logging.getLogger("trainer").setLevel(logging.INFO)
    settings, group = config["settings"], config["group"]
    rank = dist.get_rank()
    try:
        if rank:
            Rank(settings.trainer, open_target(settings).build).run()
        else:
            _lead(settings, config["redis_url"], group)
    except Exception as error:
        group.fail.remote(f"rank {rank}: {type(error).__name__}: {error}")
        dist.destroy_process_group()  # whoever waits for this rank learns of its end
        time.sleep(_CALM_SECONDS)
        raise


def _lead(settings: Settings, redis_url: str, group: ActorHandle[Any]) -> None:
    from trainer.domain_workers import DomainWorkers
    from trainer.ranks import RankZero

    global _workers
    executor = RankZero()
    _workers = DomainWorkers(settings, redis_url, open_target(settings, executor))
    paused, stopped = ray.get(group.join.remote(_this_actor()))
    if paused:
        _workers.pause(timeout=0)
    if stopped:
        _workers.stop()
    _workers.run()
    executor.end()
