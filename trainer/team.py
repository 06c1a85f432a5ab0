"""Who computes the micro-steps: one worker alone, or several together."""

from __future__ import annotations

import time
from typing import Protocol

from osd.config import TrainerSettings
from osd.drafters.trainable import Trainable
from osd.learning.batch import collate
from osd.learning.distiller import Distiller, Step
from osd.learning.replay import Sample


class Team(Protocol):
    """Trains what ``distiller`` made."""

    @property
    def size(self) -> int:
        """How many compute, each a micro-batch of every micro-step."""
        ...

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> Distiller:
        """Train ``drafter`` for a domain."""
        ...

    def step(self, distiller: Distiller, samples: list[Sample]) -> Step:
        """Do one micro-step on ``size`` samples, one for each."""
        ...

    def clock(self) -> float:
        """CPU seconds that all of them have computed."""
        ...


class Alone:
    """This process."""

    size = 1

    def distiller(self, domain: str, drafter: Trainable, settings: TrainerSettings) -> Distiller:
        """See ``Team.distiller``."""
        return Distiller(drafter, settings)

    def step(self, distiller: Distiller, samples: list[Sample]) -> Step:
        """See ``Team.step``."""
        (sample,) = samples
        return distiller.step(collate(sample.traces))

    def clock(self) -> float:
        """See ``Team.clock``."""
        return time.process_time()
