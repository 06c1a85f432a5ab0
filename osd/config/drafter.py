"""Which drafter a fresh registry starts with: one class of settings for each kind."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import Section, by_kind, of_kind
from osd.config.selection import SelectionSettings, Threshold


class _Drafter(Section):
    mixes: ClassVar[bool] = False
    """Whether recall drafts beside what is trained."""
    trainable: ClassVar[bool] = True
    """Whether there is anything to train; a table learns while it serves."""
    judges: ClassVar[bool] = False
    """Whether a controller judges what it reads: where to leave the target, and whether that goes wrong."""

    @property
    def reproducible(self) -> bool:
        """Whether the same settings make the same drafter for the same target."""
        return True

    @property
    def longest(self) -> tuple[str, int] | None:
        """The setting that says how many tokens its longest path has, and the number; None without end."""
        return None

    @property
    def distilled(self) -> Any:
        """The settings of what versions hold."""
        return self

    @property
    def selected(self) -> SelectionSettings | None:
        """How it reads a part of long contexts, None where it reads no part of its choice."""
        return None


Vocabulary = Annotated[int, Field(ge=16, description="most frequent target ids that it may draft")]


class EagleSettings(_Drafter):
    """One layer on the target's hidden states."""

    kind: Literal["eagle"] = "eagle"
    vocabulary: Vocabulary = 8192


class EarlyExitSettings(_Drafter):
    """Heads inside the target, and a controller that says where to leave it, or that what comes is wrong."""

    judges: ClassVar[bool] = True
    kind: Literal["early_exit"] = "early_exit"
    vocabulary: Vocabulary = 8192


class FalconSettings(_Drafter):
    """One layer on the target's hidden states that says several tokens in one call."""

    kind: Literal["falcon"] = "falcon"
    block: int = Field(default=2, ge=2, le=4, description="tokens of one call")
    vocabulary: Vocabulary = 8192


class KangarooSettings(_Drafter):
    """The target's own first layers, and an attention behind them."""

    kind: Literal["kangaroo"] = "kangaroo"
    vocabulary: Vocabulary = 8192
    exit_layer: int | None = Field(
        default=None, ge=1, description="target layers that draft, else one more than a sixth of them"
    )


class MedusaSettings(_Drafter):
    """Heads that look further ahead from the target's last hidden state."""

    kind: Literal["medusa"] = "medusa"
    heads: int = Field(default=4, ge=1, le=8, description="tokens that it looks ahead, each by a head of its own")
    vocabulary: Vocabulary = 8192

    @property
    def longest(self) -> tuple[str, int]:
        """See ``EagleSettings``: one for each head."""
        return "heads", self.heads


class PromptTokensSettings(_Drafter):
    """Prompt tokens of its own, which the target reads behind each draft."""

    kind: Literal["prompt_tokens"] = "prompt_tokens"
    tokens: int = Field(default=3, ge=1, le=8, description="tokens that it looks ahead, each by a prompt token")
    copies: int = Field(default=1, ge=1, le=8, description="embeddings of a prompt token, whose answers are averaged")
    rows: int = Field(
        default=32,
        ge=1,
        le=512,
        validate_default=True,
        description="rows that a sequence has for prompt tokens in a forward of the target at most",
    )

    @field_validator("rows")
    @classmethod
    def _holds_all(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("tokens", 1) * info.data.get("copies", 1)
        if value < least:
            raise PydanticCustomError("no_room", "must be at least tokens times copies, {least}", {"least": least})
        return value

    @property
    def longest(self) -> tuple[str, int]:
        """See ``EagleSettings``: one for each prompt token."""
        return "tokens", self.tokens


class LanguageModelSettings(_Drafter):
    """A smaller language model."""

    kind: Literal["language_model"] = "language_model"
    layers: int = Field(default=2, ge=1, description="target layers that it keeps where it has no source")
    source: str | None = Field(default=None, description="model that it starts from, of any tokenizer")
    revision: str | None = Field(default=None, description="branch, tag or commit of a source from a hub")
    prompt_tokens: int = Field(
        default=0, ge=0, le=8, description="prompt tokens of its own: so many tokens more come of one call"
    )

    @property
    def reproducible(self) -> bool:
        """See ``EagleSettings``; the files of another model may change."""
        return self.source is None


class RecallSettings(Section):
    """The table of what the target said after the same last tokens."""

    megabytes: int = Field(default=26, ge=1, le=65536, description="memory of a domain's table, 64 bytes an entry")
    shared: bool = Field(default=True, description="one table for all clients of a domain, not one for each API key")


class RecallDrafterSettings(_Drafter):
    """What the target said after the same last tokens."""

    trainable: ClassVar[bool] = False
    kind: Literal["recall"] = "recall"
    recall: RecallSettings = RecallSettings()


class TokenSelectSettings(_Drafter, SelectionSettings):
    """The target itself, reading of a long context only the tokens that it selects."""

    trainable: ClassVar[bool] = False
    kind: Literal["token_select"] = "token_select"
    threshold: Threshold = 0.7

    @property
    def selected(self) -> SelectionSettings | None:
        return self


_Trained = (
    EagleSettings
    | EarlyExitSettings
    | FalconSettings
    | KangarooSettings
    | LanguageModelSettings
    | MedusaSettings
    | PromptTokensSettings
)

TRAINED_SETTINGS = by_kind(get_args(_Trained))


class MixedSettings(_Drafter):
    """Recall, and beside it a trained drafter where that is expected to pay."""

    mixes: ClassVar[bool] = True
    kind: Literal["mixed"] = "mixed"
    trained: Annotated[_Trained, Field(discriminator="kind"), of_kind(TRAINED_SETTINGS, "eagle")] = EagleSettings()
    recall: RecallSettings = RecallSettings()

    @property
    def reproducible(self) -> bool:
        return self.trained.reproducible

    @property
    def distilled(self) -> Any:
        """The trained drafter's."""
        return self.trained


class NoDrafterSettings(_Drafter):
    """Plain decoding."""

    trainable: ClassVar[bool] = False
    kind: Literal["none"] = "none"


_Kinds = _Trained | RecallDrafterSettings | TokenSelectSettings | MixedSettings | NoDrafterSettings

DRAFTER_SETTINGS = by_kind(get_args(_Kinds))
"""The settings of each drafter, by kind."""

DrafterSettings = Annotated[_Kinds, Field(discriminator="kind"), of_kind(DRAFTER_SETTINGS, "mixed")]
"""Those of one of them."""


def drafter_of(kind: str, given: DrafterSettings) -> DrafterSettings:
    """The settings of a drafter of ``kind``: those ``given`` where they are or train one, else the defaults."""
    return next((one for one in (given, given.distilled) if one.kind == kind), DRAFTER_SETTINGS[kind]())
