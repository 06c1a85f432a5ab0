"""Executor of micro-steps, and the target that learners are made for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from osd.config import Settings, TrainerSettings
from osd.drafting import trainable, with_required_head
from osd.drafting.trainable import Trainable
from osd.learning import online
from osd.learning.distiller import Distiller
from osd.learning.gate import Gate
from osd.learning.online import Learner
from osd.learning.replay import Replay
from osd.learning.trainer_recall import TrainerRecall
from osd.registry.versions import Version
from osd.target.identity import Identity

Build = Callable[[dict[str, Any]], Trainable]
"""Function that creates a drafter from a version's config."""


class Executor(online.LocalExecutor):
    """Executor that trains in this process; ``trainer.ranks.RankZero`` trains in several processes."""

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> Distiller:
        """Return the distiller of a domain's drafter; ``step`` accepts only distillers from here."""
        return Distiller(drafter, settings)

    def clock(self) -> float:
        """Return the CPU seconds of all processes."""
        return time.process_time()


@dataclass(frozen=True)
class TargetContext:
    """Target of the training: identity and sizes, with the function that builds drafters and the executor.

    Attributes:
        target: the identity of the target.
        vocabulary: the number of tokens.
        hidden_size: the width of a hidden state.
        build: creates a drafter.
        executor: runs the micro-steps.
    """

    target: Identity
    vocabulary: int
    hidden_size: int
    build: Build
    executor: Executor = field(default_factory=Executor)

    def learner(self, version: Version, settings: Settings, replay: Replay, recalled: TrainerRecall | None) -> Learner:
        """Create a learner that starts from the weights of a version."""
        drafter = trainable(with_required_head(self.build(version.config), settings.growth))
        drafter.load_weights(version.weights)
        distiller = self.executor.distiller(settings.domain, drafter, settings.trainer)
        gate = Gate(settings.growth.lookahead, settings.trainer.divergence)
        return Learner(distiller, settings.trainer, gate, self.vocabulary, replay, recalled)
