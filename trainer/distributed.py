"""Trainer as a Ray Train job: rank 0 trains with the help of the other ranks; after a death all ranks restart.

Rank 0 has no address to call. It joins the trainer's actor, reports its status, and gets its orders in return.
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
from osd.sealed import SealedSettings
from trainer.actor import REPORT_SECONDS, Orders, RemoteWorkers, Trainer, open_target

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from trainer.domain_workers import DomainWorkers

MAX_CALLS = 8
"""Concurrent calls to the actor: rank 0 waits for orders while other calls run."""

_TIMEOUT_SECONDS = 365 * 86_400
"""Longest wait of ranks for each other, as serving may need the machine for days. Ray detects a death."""

_RESERVED = {"memory": 1}
"""Resources that each worker reserves with Ray: one byte of memory, as nothing is not allowed."""

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Communication backend by device; messages are on the host with all devices."""

_ERROR_DELAY = 5.0
"""Delay after an error, so that repeated errors do not keep the nodes busy. A death restarts at once."""

_POLL_SECONDS = 1.0


class DistributedTrainer(Trainer):
    """``Trainer`` whose training runs in ``trainer.workers`` processes of a Ray Train job, spread over the nodes.

    They reserve no CPU with Ray, like the trainer of one process. When a process or its node dies, all processes end,
    and the same number restarts from the checkpoint on the remaining nodes. Acknowledged records are in the checkpoint;
    the stream delivers all others again.
    """

    _group: RemoteWorkers | None = None
    _failure_reported = False  # whether the current group has reported an error

    def join(self) -> Orders:
        """Register rank 0 of a new group and return its first orders."""
        with self._lock:
            before = self._group
            if before is not None:
                before.mark_dead()
                if not self._failure_reported:
                    self._failure = "a process of the group died"
            orders = Orders(before.orders.group + 1 if before else 0, 0, self._paused, self._stop.is_set())
            self._worker = self._group = RemoteWorkers(orders)
            self._failure_reported = False
            return orders

    def report(self, executed: Orders, status: dict[str, Any], resting: bool) -> Orders:
        """Store a report, see ``RemoteWorkers.report``; tell a replaced group to stop."""
        group = self._group
        if group is None or group.orders.group != executed.group:
            return executed._replace(stopped=True)
        return group.report(executed, status, resting)

    def fail(self, failure: str) -> None:
        """Store an unexpected error, also of a rank; a killed rank cannot report one."""
        with self._lock:
            super().fail(failure)
            self._failure_reported = True

    def train(self) -> None:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(_POLL_SECONDS))
        # A rank cannot react to the announced end of its node, so it need not watch for it.
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # so that a relative home is the same directory in every process
        config = {"sealed": self._sealed, "group": ray.get_runtime_context().current_actor}
        settings = self._settings.trainer
        on_gpu = settings.device == "cuda"
        scaling = ScalingConfig(
            num_workers=settings.workers,
            use_gpu=on_gpu,
            resources_per_worker={**_RESERVED, "GPU": settings.gpu_share} if on_gpu else _RESERVED,
            placement_strategy="SPREAD",
            label_selector=settings.labels or None,
        )
        trainer = TorchTrainer(
            run_rank,
            train_loop_config=config,
            torch_config=TorchConfig(backend=BACKENDS[settings.device], timeout_s=_TIMEOUT_SECONDS),
            scaling_config=scaling,
            run_config=RunConfig(
                name="ray-train",
                storage_path=str(self._settings.home_dir / "trainer"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        trainer.fit()


def run_rank(config: dict[str, Any]) -> None:
    """Run one rank of the group, in a thread of Ray Train's actor."""
    import torch.distributed as dist

    from osd.registry.replica_loads import ReplicaLoads
    from trainer.ranks import Rank

    logging.getLogger("trainer").setLevel(logging.INFO)
    sealed: SealedSettings = config["sealed"]
    (settings, redis_url), group = sealed.open(), config["group"]
    rank = dist.get_rank()
    logs.set_up(settings.log, f"trainer rank {rank}")
    try:
        if rank:
            loads = ReplicaLoads(redis_url)
            Rank(settings.trainer, open_target(settings).build, loads).run()
            loads.close()
        else:
            _lead(settings, redis_url, group)
    except Exception as error:
        group.fail.remote(f"rank {rank}: {type(error).__name__}: {error}")
        dist.destroy_process_group()  # ends the waits of other ranks for this rank
        time.sleep(_ERROR_DELAY)
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
    threading.Thread(target=_follow_orders, args=(workers, orders, group), name="trainer-orders", daemon=True).start()
    try:
        workers.run()
    except FencedError as error:
        ray.get(group.lose.remote(str(error)))  # Ray Train would answer an error with a new group
    executor.end()


def _follow_orders(workers: DomainWorkers, orders: Orders, group: ActorHandle[Any]) -> None:
    """Report to the trainer's actor and carry out its orders, until it orders the end or is dead."""
    try:
        while not orders.stopped:
            resting = workers.pause(REPORT_SECONDS) if orders.paused else False
            next_orders = cast(Orders, ray.get(group.report.remote(orders, workers.status(), resting)))
            if orders.paused and not next_orders.paused:
                workers.resume()
            orders = next_orders
    finally:
        workers.stop()
