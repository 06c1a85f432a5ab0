"""The trainer as a Ray Train job: rank 0 trains, the others help, and when one dies Ray Train starts all anew.

Nobody calls rank 0: it joins the trainer's actor, reports how it does, and is answered with what it is to do.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import ray

from osd import logs
from osd.config import Settings
from osd.registry.pointer_file import FencedError
from trainer.actor import REPORT_SECONDS, Orders, RemoteWorkers, Trainer, open_target

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trainer.domain_workers import DomainWorkers

CALLS = 8
"""Calls to the actor at the same time: rank 0 waits for orders while somebody waits for the end."""

_SILENCE_SECONDS = 365 * 86_400
"""How long ranks wait for each other: serving may need the machine for days. A death is noticed without it."""

_TOKEN = {"memory": 1}
"""What each worker takes from Ray's books, one byte: it may not be nothing, and every node has that."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What carries tensors between ranks, by the device that they train on: messages are on the host everywhere."""

_CALM_SECONDS = 5.0
"""An error that comes again and again is not to keep the nodes busy with starts. A death is answered at once."""

_POLL_SECONDS = 1.0


class DistributedTrainer(Trainer):
    """A ``Trainer`` whose training runs in ``trainer.workers`` processes of a Ray Train job, spread over the nodes.

    Like the trainer of one process they reserve no CPU with Ray. When one of them dies, or its node is taken
    away, all end, and as many go on from the checkpoint on the nodes that are left: what was acknowledged is in there,
    and the rest is delivered again.
    """

    _group: RemoteWorkers | None = None
    _told = False  # the error that ended the group that is there now

    def join(self) -> Orders:
        """Take up rank 0 of a new group; returns its first orders."""
        with self._lock:
            before = self._group
            if before is not None:
                before.end()
                if not self._told:
                    self._failure = "a process of the group died"
            orders = Orders(before.orders.group + 1 if before else 0, 0, self._paused, self._stop.is_set())
            self._worker = self._group = RemoteWorkers(orders)
            self._told = False
            return orders

    def report(self, done: Orders, status: dict[str, Any], resting: bool) -> Orders:
        """See ``RemoteWorkers.report``; a group that another one has replaced is to stop."""
        group = self._group
        if group is None or group.orders.group != done.group:
            return done._replace(stopped=True)
        return group.report(done, status, resting)

    def fail(self, failure: str) -> None:
        """See ``Trainer.fail``; of a rank too, but one that was killed cannot tell."""
        with self._lock:
            super().fail(failure)
            self._told = True

    def train(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(_POLL_SECONDS))
        # Told that its node will go, a rank could do nothing but go on: nobody needs to watch for that.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # a relative home means the same in every process
        config = {
            "settings": self._settings,
            "redis_url": self._redis_url,
            "group": ray.get_runtime_context().current_actor,
        }
        settings = self._settings.trainer
        on_gpu = settings.device == "cuda"
        scaling = ScalingConfig(
            num_workers=settings.workers,
            use_gpu=on_gpu,
            resources_per_worker={**_TOKEN, "GPU": settings.gpu_share} if on_gpu else _TOKEN,
            placement_strategy="SPREAD",
            label_selector=settings.labels or None,
        )
        trainer = TorchTrainer(
            work,
            train_loop_config=config,
            torch_config=TorchConfig(backend=BACKENDS[settings.device], timeout_s=_SILENCE_SECONDS),
            scaling_config=scaling,
            run_config=RunConfig(
                name="ray-train",
                storage_path=str(self._settings.home_dir / "trainer"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        trainer.fit()


def work(config: dict[str, Any]) -> None:
    """What every rank of the group runs, in a thread of an actor of Ray Train's."""
    import torch.distributed as dist

    from osd.registry.replica_loads import ReplicaLoads
    from trainer.ranks import Rank

    logging.getLogger("trainer").setLevel(logging.INFO)
    settings, group = config["settings"], config["group"]
    rank = dist.get_rank()
    logs.set_up(settings.log, f"trainer rank {rank}")
    try:
        if rank:
            loads = ReplicaLoads(config["redis_url"])
            Rank(settings.trainer, open_target(settings).build, loads).run()
            loads.close()
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

    executor = RankZero()
    workers = DomainWorkers(settings, redis_url, open_target(settings, executor))
    orders = cast(Orders, ray.get(group.join.remote()))
    if orders.paused:
        workers.pause(timeout=0)
    if orders.stopped:
        workers.stop()
    threading.Thread(target=_follow, args=(workers, orders, group), name="trainer-orders", daemon=True).start()
    try:
        workers.run()
    except FencedError as error:
        ray.get(group.lose.remote(str(error)))  # an error would bring a new group
    executor.end()


def _follow(workers: DomainWorkers, orders: Orders, group: ActorHandle[Any]) -> None:
    """Report to the trainer's actor, and do what it answers, until that is to stop or cannot be had."""
    try:
        while not orders.stopped:
            resting = workers.pause(REPORT_SECONDS) if orders.paused else False
            wanted = cast(Orders, ray.get(group.report.remote(orders, workers.status(), resting)))
            if orders.paused and not wanted.paused:
                workers.resume()
            orders = wanted
    finally:
        workers.stop()
