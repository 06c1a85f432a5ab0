"""The drafters at work in one engine, and which of them a request gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from osd.config import EngineSettings
from osd.drafters.base import Drafter, Session
from osd.registry.pointer import Rollout


@dataclass(eq=False)
class Lane:
    """A drafter at work: its session, and the version whose weights that has.

    A sequence holds on to its lane from admission to its end. A lane that gets no new ones is freed with its last.
    """

    session: Session
    version: int


class Lanes:
    """The stable version's lane and, while there is one, the canary's; they share each forward of the target.

    The stable lane is there as long as the engine, and versions are swapped into it.
    """

    def __init__(self, drafter: Drafter, version: int, settings: EngineSettings) -> None:
        """Make the stable lane, with the weights that ``drafter`` has and their ``version``."""
        self._drafter, self._settings = drafter, settings
        self.stable = Lane(self._session(), version)
        self._canary: tuple[Lane, Rollout] | None = None

    @property
    def canary_version(self) -> int | None:
        """The canary's number."""
        canary = self._canary
        return canary[0].version if canary else None

    def choose(self, request_id: str) -> Lane:
        """The lane that a request gets."""
        if self._canary is not None:
            lane, rollout = self._canary
            if rollout.version_for(request_id) == lane.version:
                return lane
        return self.stable

    def make(self, version: int, weights: dict[str, Tensor]) -> Lane:
        """A lane of its own for a version; takes a while, on any thread.

        Raises:
            DrafterError: the weights do not fit.
        """
        session = self._session()
        staged = session.stage(weights)
        with torch.inference_mode():
            session.load(staged)
        return Lane(session, version)

    def try_canary(self, rollout: Rollout, lane: Lane | None) -> None:
        """Give new requests to the canary as ``rollout`` says; ``lane`` None when it runs already."""
        if lane is None and self._canary is not None:
            lane = self._canary[0]
        if lane is None or lane.version != rollout.canary:
            raise ValueError(f"there is no canary of version {rollout.canary}")
        self._canary = lane, rollout

    def end_canary(self) -> None:
        """Give no more requests to the canary; those that have it keep it."""
        self._canary = None

    def _session(self) -> Session:
        return self._drafter.session(self._settings.slots, self._settings.context, self._settings.max_draft + 1)
