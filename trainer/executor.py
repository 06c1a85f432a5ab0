"""Who computes micro-steps, and the target that learners are made for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from osd.config import Settings, TrainerSettings
from osd.drafters import trainable
from osd.drafters.acceptance_head import suited
from osd.drafters.trainable import Trainable
from osd.learning import online
from osd.learning.distiller import Distiller
from osd.learning.gate import Gate
from osd.learning.online import Learner
from osd.learning.recalled import Recalled
from osd.learning.replay import Replay
from osd.registry.versions import Version
from osd.speculation.growth import make_growth
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

    def learner(self, version: Version, settings: Settings, replay: Replay, recalled: Recalled | None) -> Learner:
        """Make a learner that goes on from the weights of a version."""
        drafter = trainable(suited(self.build(version.config), settings.growth))
        drafter.load_weights(version.weights)
        distiller = self.executor.distiller(settings.domain, drafter, settings.trainer)
        gate = Gate(settings.growth.lookahead, settings.trainer.divergence)
        trees = make_growth(settings.growth).by_worth
        return Learner(distiller, settings.trainer, gate, self.vocabulary, replay, recalled, trees)
