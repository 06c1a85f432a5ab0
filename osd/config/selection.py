"""Settings of selective attention: the share of a long context that a drafter or the target reads."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from osd.config.base import Section, by_kind, of_kind

_LONGEST = 1 << 20

Threshold = Annotated[
    float, Field(ge=0, le=1, description="cosine similarity of queries above which a query reuses an earlier selection")
]


class SelectionSettings(Section):
    """Context tokens that a layer reads; it reads a shorter context whole."""

    top: int = Field(default=2048, ge=1, le=_LONGEST, description="context tokens that a layer selects")
    initial: int = Field(default=128, ge=0, le=_LONGEST, description="first tokens, which a layer reads in addition")
    local: int = Field(default=512, ge=1, le=_LONGEST, description="last tokens, which a layer reads in addition")


class FullAttentionSettings(Section):
    """Full attention over the context, as in training of the model."""

    kind: Literal["full"] = "full"

    @property
    def selection(self) -> SelectedAttentionSettings | None:
        """Settings of selective attention, which changes answers; None for full attention."""
        return None


class SelectedAttentionSettings(SelectionSettings):
    """Attention of each layer to selected tokens; contexts may be longer than the model's trained context."""

    kind: Literal["token_select"] = "token_select"
    threshold: Threshold = 0.9

    @property
    def selection(self) -> SelectedAttentionSettings | None:
        """Settings of selective attention: these settings themselves."""
        return self


_Kinds = FullAttentionSettings | SelectedAttentionSettings

AttentionSettings = Annotated[_Kinds, Field(discriminator="kind"), of_kind(by_kind(get_args(_Kinds)), "full")]
"""Settings of the target's attention."""
