"""Where the figures of training go, by name: ``trainer.tracking``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from osd.config import ConfigError, Settings
from trainer.tracking.base import Silent, Tracker
from trainer.tracking.mlflow import MLflow
from trainer.tracking.tensorboard import TensorBoard
from trainer.tracking.wandb import WeightsAndBiases

TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "none": Silent,
}
"""What ``trainer.tracking`` may name; each is made from a folder of its own and the domain."""

_PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}

__all__ = ["TRACKERS", "Tracker", "check", "make"]


def check(settings: Settings) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        ConfigError: names what to install.
    """
    name = settings.trainer.tracking
    package = _PACKAGES.get(name)
    if settings.trainer.enabled and package is not None and importlib.util.find_spec(package) is None:
        extra = package if name == "tensorboard" else f"osd[{name}]"
        raise ConfigError(f"trainer.tracking {name} needs a package that is not installed: pip install '{extra}'")


def make(settings: Settings) -> Tracker:
    """The tracker of ``settings``, below ``home``; training goes on without one that cannot be had."""
    name = settings.trainer.tracking
    return TRACKERS[name](settings.home_dir / "tracking" / name, settings.domain)
