"""How much of a long context is read, by a drafter or by the target itself."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from osd.config.base import Section, by_kind, of_kind

_LONGEST = 1 << 20

Threshold = Annotated[
    float, Field(ge=0, le=1, description="cosine of queries from which on they read what an earlier one selected")
]


class SelectionSettings(Section):
    """Tokens of the context that a layer reads; shorter contexts it reads whole."""

    top: int = Field(default=2048, ge=1, le=_LONGEST, description="tokens of the context that a layer selects")
    initial: int = Field(default=128, ge=0, le=_LONGEST, description="first tokens, which it reads beside them")
    local: int = Field(default=512, ge=1, le=_LONGEST, description="last tokens, which it reads beside them")


class FullAttentionSettings(Section):
    """Every token reads all before it, as the model was trained."""

    kind: Literal["full"] = "full"

    @property
    def selected(self) -> SelectedAttentionSettings | None:
        """How a part is read, None where everything is; answers are not the target's own then."""
        return None


class SelectedAttentionSettings(SelectionSettings):
    """Each layer reads the tokens that it selects, side by side: contexts may be longer than the trained one."""

    kind: Literal["token_select"] = "token_select"
    threshold: Threshold = 0.9

    @property
    def selected(self) -> SelectedAttentionSettings | None:
        """See ``FullAttentionSettings``."""
        return self


_Kinds = FullAttentionSettings | SelectedAttentionSettings

AttentionSettings = Annotated[_Kinds, Field(discriminator="kind"), of_kind(by_kind(get_args(_Kinds)), "full")]
"""How the target attends."""
