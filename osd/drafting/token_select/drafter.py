"""The drafter that is the target itself over selected keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from osd.config import TokenSelectSettings
from osd.drafting.base import Drafter, DrafterError, Needs
from osd.drafting.session import Runtime
from osd.drafting.shapes import check_sizes
from osd.drafting.token_select.session import TokenSelectSession
from osd.runtime.attention.selection import SelectionSizes
from osd.target.model import check_rotary


class TokenSelect(Drafter):
    """All layers of the target draft, on the target's own keys and values; each reads the tokens that it selects.

    Long-context self-speculation: verification reads everything. What is selected, and when anew, is after Wu et al.,
    "TokenSelect", EMNLP 2025 (arXiv 2411.02886); see ``osd.runtime.attention.selection``. Every token stays in its
    place, as the target that verifies has it.
    """

    kind: ClassVar[str] = "token_select"

    def __init__(self, sizes: SelectionSizes, layers: int) -> None:
        """Draft with all ``layers`` of a target.

        Raises:
            DrafterError: a size cannot be.
        """
        check_sizes(top=sizes.top, local=sizes.local)
        if sizes.initial != 0:
            check_sizes(initial=sizes.initial)
        if type(sizes.threshold) not in (int, float) or not 0 <= sizes.threshold <= 1:
            raise DrafterError(f"threshold is {sizes.threshold!r}, but must be a number from 0 to 1")
        self._sizes, self._layers = sizes, layers

    @classmethod
    def initial(cls, settings: TokenSelectSettings, target_dir: Path, home: Path) -> Self:
        """See ``Kind.initial``.

        Raises:
            DrafterError: the target has no rotary positions.
        """
        sizes = SelectionSizes(settings.initial, settings.top, settings.local, settings.threshold)
        return cls(sizes, _check_target(target_dir))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """See ``Kind.from_config``."""
        return cls(
            SelectionSizes(**{name: value for name, value in config.items() if name != "kind"}),
            _check_target(target_dir),
        )

    @property
    def needs(self) -> Needs:
        """All layers of the target."""
        return Needs(layers=range(self._layers))

    def config(self) -> dict[str, Any]:
        sizes = self._sizes
        return {
            "kind": self.kind, "initial": sizes.initial, "top": sizes.top, "local": sizes.local,
            "threshold": sizes.threshold,
        }  # fmt: skip

    def session(self, runtime: Runtime) -> TokenSelectSession:
        return TokenSelectSession(self._sizes, runtime)


def _check_target(directory: Path) -> int:
    """How many layers the target in ``directory`` has, which must have rotary positions.

    Raises:
        DrafterError: it has none.
    """
    try:
        return check_rotary(directory)
    except ValueError as error:
        raise DrafterError(f"drafter.kind token_select needs a target with rotary positions, and {error}") from None
