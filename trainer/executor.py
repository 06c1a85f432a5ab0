"""Who computes micro-steps, and what a trainer has to know of the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from osd.config import TrainerSettings
from osd.drafters.trainable import Trainable
from osd.learning import online
from osd.learning.distiller import Distiller
from osd.target.identity import Identity

Build = Callable[[dict[str, Any]], Trainable]
"""Makes a drafter from a version's config."""


class Executor(online.Executor, Protocol):
    """Trains what ``distiller`` made."""

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> Distiller:
        """Train ``drafter`` for a domain."""
        ...

    def clock(self) -> float:
        """CPU seconds that all of them have computed."""
        ...


class Local(online.Local):
    """This process."""

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> Distiller:
        """See ``Executor.distiller``."""
        return Distiller(drafter, settings)

    def clock(self) -> float:
        """See ``Executor.clock``."""
        return time.process_time()


@dataclass(frozen=True)
class TargetContext:
    """A target's identity, vocabulary and hidden size, how a drafter for it is made, and who trains that."""

    target: Identity
    vocabulary: int
    hidden_size: int
    build: Build
    executor: Executor = field(default_factory=Local)
