"""Where the figures of training go, by name: ``trainer.tracking``."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from osd.config import ConfigError, Settings
from osd.registry.events import Events, Kind
from trainer.tracking.mlflow import MLflow
from trainer.tracking.tensorboard import TensorBoard
from trainer.tracking.wandb import WeightsAndBiases

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Keeps numbers and words by the step of training; used by one thread."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Keep ``values`` by name, at ``step``."""
        ...

    def text(self, step: int, name: str, words: str) -> None:
        """Keep one line of words."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


TRACKERS: dict[str, Callable[[Path, str], Tracker] | None] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "none": None,
}
"""What ``trainer.tracking`` may name; each, named after its package, is made from a folder and the domain."""


def check(settings: Settings) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        ConfigError: names what to install.
    """
    name = settings.trainer.tracking
    if settings.trainer.enabled and TRACKERS[name] and importlib.util.find_spec(name) is None:
        extra = name if name == "tensorboard" else f"osd[{name}]"
        raise ConfigError(f"trainer.tracking {name} needs a package that is not installed: pip install '{extra}'")


def make(settings: Settings) -> Tracker | None:
    """The tracker of ``settings``, below ``home``."""
    name = settings.trainer.tracking
    tracker = TRACKERS[name]
    return tracker and tracker(settings.home_dir / "tracking" / name, settings.domain)


class TrackedEvents(Events):
    """Events that are also kept as numbers, ``<kind>/<figure>``, and words by the step of training.

    A failure of the tracker is logged once; training goes on without it.
    """

    def __init__(self, url: str, make: Callable[[], Tracker | None]) -> None:
        super().__init__(url)
        self._step = 0
        self._tracker: Tracker | None = None
        self._try(lambda: setattr(self, "_tracker", make()))

    def add(self, kind: Kind, domain: str, version: int | None = None, **figures: Any) -> None:
        """See ``Events.add``."""
        self._step = max(self._step, int(figures.get("step", 0)))
        self._try(lambda: self._track(kind, {"version": version, **figures}))
        super().add(kind, domain, version, **figures)

    def close(self) -> None:
        """See ``Events.close``."""
        if self._tracker is not None:
            self._try(self._tracker.close)
        super().close()

    def _track(self, kind: str, figures: dict[str, Any]) -> None:
        if self._tracker is None:
            return
        numbers = {f"{kind}/{name}": float(value) for name, value in figures.items() if _is_number(value)}
        if numbers:
            self._tracker.numbers(self._step, numbers)
        if words := figures.get("reason"):
            self._tracker.text(self._step, f"{kind}/reason", str(words))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # whatever a tracker raises, it is not worth a training step
            logger.warning("training is not tracked any more: %s: %s", type(error).__name__, error)
            self._tracker = None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
