"""What serving and training ask of a cluster's GPUs."""

from __future__ import annotations

from osd.config.settings import Settings


def replica_gpus(settings: Settings, there: float) -> float:
    """GPUs of a replica where ``there`` are so many, 0 where it computes on a CPU.

    Where ``target.device`` asks for one it is had, or waited for.
    """
    target = settings.target
    on_gpu = target.device == "cuda" or (target.device == "auto" and there > 0)
    return target.tensor_parallel * settings.serving.gpu_share if on_gpu else 0


def trainer_gpus(settings: Settings, there: float) -> float:
    """GPUs of a training process, 0 where it trains on a CPU: by itself it takes what replicas leave over."""
    trainer = settings.trainer
    left = there - settings.serving.most_replicas * replica_gpus(settings, there)
    fits = left >= trainer.processes * trainer.workers * trainer.gpu_share
    return trainer.gpu_share if trainer.device == "cuda" or (trainer.device == "auto" and fits) else 0
