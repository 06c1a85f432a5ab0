"""The trainer's events, which its tracker gets too."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from osd.registry.events import Events, Kind
from trainer.tracking.base import Tracker

logger = logging.getLogger(__name__)


class TrackedEvents(Events):
    """Events that are also kept as numbers, ``<kind>/<figure>``, and words by the step of training.

    A failure of the tracker is logged once; training goes on without it.
    """

    def __init__(self, url: str, make: Callable[[], Tracker]) -> None:
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
