"""The drafter that recalls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from osd.config import RecallDrafterSettings
from osd.drafting.base import Drafter, DrafterError, Needs
from osd.drafting.recall.session import RecallSession
from osd.drafting.session import Runtime


class Recall(Drafter):
    """Drafts what the target said after the same last tokens; see ``osd.recall.memory``."""

    kind: ClassVar[str] = "recall"

    @classmethod
    def initial(cls, settings: RecallDrafterSettings, target_dir: Path, home: Path) -> Recall:
        """See ``Kind.initial``."""
        return cls()

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Recall:
        """See ``Kind.from_config``."""
        drafter = cls()
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        """What the target says at every verified row."""
        return Needs(target_rows=True)

    def config(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def session(self, runtime: Runtime) -> RecallSession:
        """See ``Drafter.session``.

        Raises:
            DrafterError: the runtime has no memories.
        """
        if runtime.memories is None:
            raise DrafterError("a recall drafter needs the memories of its domain")
        return RecallSession(runtime.memories, runtime)
