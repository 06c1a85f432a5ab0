"""A trained drafter together with recall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from osd.drafting.base import Drafter, DrafterError, Needs
from osd.drafting.mixed.session import MixedSession
from osd.drafting.recall.session import RecallSession
from osd.drafting.session import Runtime


class Mixed(Drafter):
    """Drafts by the mixture of what recall and a trained drafter say.

    A version is one of the trained drafter's: recall has nothing to train, and belongs to whoever serves.
    """

    kind: ClassVar[str] = "mixed"

    def __init__(self, trained: Drafter) -> None:
        self.trained = trained

    @property
    def needs(self) -> Needs:
        """What the trained drafter needs, and what the target says at every verified row."""
        needs = self.trained.needs
        return replace(needs, target_rows=True)

    @property
    def calls(self) -> str:
        return f"chains of {self.trained.kind}"

    def config(self) -> dict[str, Any]:
        """See ``Drafter.config``: the trained drafter's."""
        return self.trained.config()

    def weights(self) -> dict[str, Tensor]:
        """See ``Drafter.weights``: the trained drafter's."""
        return self.trained.weights()

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.trained.load_weights(weights)

    def session(self, runtime: Runtime) -> MixedSession:
        """See ``Drafter.session``.

        Raises:
            DrafterError: the runtime has no memories.
        """
        if runtime.memories is None:
            raise DrafterError("a mixed drafter needs the memories of its domain")
        recall = RecallSession(runtime.memories, runtime)
        return MixedSession(recall, self.trained.session(runtime), self.trained.kind, self.calls)
