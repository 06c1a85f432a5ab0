"""Settings of the drafter of a new registry: one class for each kind."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import Section, by_kind, of_kind
from osd.config.selection import SelectionSettings, Threshold


class _Drafter(Section):
    mixes: ClassVar[bool] = False
    """Whether recall drafts together with the trained drafter."""
    trainable: ClassVar[bool] = True
    """Whether a trainer can train it; recall's table learns while it serves."""
    traced: ClassVar[bool] = False
    """Whether vLLM captures the hidden states that it learns from."""
    has_exit_controller: ClassVar[bool] = False
    """Whether it has a controller that chooses the exit layer and predicts wrong tokens."""

    @property
    def reproducible(self) -> bool:
        """Whether equal settings give an equal drafter for the same target."""
        return True

    @property
    def depth_limit(self) -> tuple[str, int] | None:
        """Setting that limits the path length, and the limit in tokens; None without a limit."""
        return None

    @property
    def distilled(self) -> Any:
        """Settings of the drafter that is trained and stored in versions."""
        return self

    @property
    def selection(self) -> SelectionSettings | None:
        """Settings of selective attention on long contexts; None for full attention."""
        return None


Vocabulary = Annotated[int, Field(ge=16, description="size of the draft vocabulary: the most frequent target ids")]


class DSparkSettings(_Drafter):
    """DSpark: one or two layers that draft a block of tokens in one call, and a bias by the token before each."""

    kind: Literal["dspark"] = "dspark"
    block: int = Field(default=4, ge=1, le=8, description="tokens per call, and so the longest path of a draft")
    layers: int = Field(default=2, ge=1, le=2, description="layers of the drafter")
    rank: int = Field(default=64, ge=1, le=512, description="rank of the bias by the token before")
    vocabulary: Vocabulary = 8192

    @property
    def depth_limit(self) -> tuple[str, int]:
        return "block", self.block


class EagleSettings(_Drafter):
    """EAGLE-3: one transformer layer on hidden states of the target."""

    traced: ClassVar[bool] = True
    kind: Literal["eagle"] = "eagle"
    vocabulary: Vocabulary = 8192


class EarlyExitSettings(_Drafter):
    """Exit heads on layers of the target, with a controller that chooses the exit layer or predicts an error."""

    has_exit_controller: ClassVar[bool] = True
    kind: Literal["early_exit"] = "early_exit"
    vocabulary: Vocabulary = 8192


class FalconSettings(_Drafter):
    """Falcon: one layer on hidden states of the target that predicts several tokens per call."""

    kind: Literal["falcon"] = "falcon"
    block: int = Field(default=2, ge=2, le=4, description="tokens per call")
    vocabulary: Vocabulary = 8192


class KangarooSettings(_Drafter):
    """Kangaroo: the first layers of the target and an adapter layer."""

    kind: Literal["kangaroo"] = "kangaroo"
    vocabulary: Vocabulary = 8192
    exit_layer: int | None = Field(
        default=None, ge=1, description="target layers that draft; by default one more than a sixth of all layers"
    )


class MedusaSettings(_Drafter):
    """Medusa: heads on the target's last hidden state, one for each position ahead."""

    kind: Literal["medusa"] = "medusa"
    heads: int = Field(default=4, ge=1, le=8, description="heads, one for each token ahead")
    vocabulary: Vocabulary = 8192

    @property
    def depth_limit(self) -> tuple[str, int]:
        return "heads", self.heads


class PromptTokensSettings(_Drafter):
    """Trained prompt tokens, which the target reads after each draft."""

    kind: Literal["prompt_tokens"] = "prompt_tokens"
    tokens: int = Field(default=3, ge=1, le=8, description="prompt tokens, one for each token ahead")
    copies: int = Field(
        default=1, ge=1, le=8, description="embeddings per prompt token, whose predictions are averaged"
    )
    rows: int = Field(
        default=32,
        ge=1,
        le=512,
        validate_default=True,
        description="maximum rows for prompt tokens per sequence in one forward of the target",
    )

    @field_validator("rows")
    @classmethod
    def _holds_all(cls, value: int, info: ValidationInfo) -> int:
        least = info.data.get("tokens", 1) * info.data.get("copies", 1)
        if value < least:
            raise PydanticCustomError("no_room", "must be at least tokens times copies, {least}", {"least": least})
        return value

    @property
    def depth_limit(self) -> tuple[str, int]:
        return "tokens", self.tokens


class LanguageModelSettings(_Drafter):
    """A small language model."""

    kind: Literal["language_model"] = "language_model"
    layers: int = Field(default=2, ge=1, description="target layers to copy when no source is set")
    source: str | None = Field(default=None, description="model to start from, with any tokenizer")
    revision: str | None = Field(default=None, description="branch, tag or commit of a source on a hub")
    prompt_tokens: int = Field(
        default=0, ge=0, le=8, description="trained prompt tokens; each call predicts this many further tokens"
    )

    @property
    def reproducible(self) -> bool:
        """Whether it is made from the target; the files of another model may change."""
        return self.source is None


class RecallSettings(Section):
    """Table of recall, the n-gram cache of the target's distributions."""

    megabytes: int = Field(default=26, ge=1, le=65536, description="memory of a domain's table, 64 bytes per entry")
    shared: bool = Field(
        default=True,
        description="true: one table for all clients of a domain; false: one table for each tenant or key without one",
    )


class RecallDrafterSettings(_Drafter):
    """Recall, an n-gram cache of the target's distributions."""

    trainable: ClassVar[bool] = False
    kind: Literal["recall"] = "recall"
    recall: RecallSettings = RecallSettings()


class TokenSelectSettings(_Drafter, SelectionSettings):
    """The target itself, with attention to selected tokens of a long context."""

    trainable: ClassVar[bool] = False
    kind: Literal["token_select"] = "token_select"
    threshold: Threshold = 0.7

    @property
    def selection(self) -> SelectionSettings | None:
        return self


_Trained = (
    DSparkSettings
    | EagleSettings
    | EarlyExitSettings
    | FalconSettings
    | KangarooSettings
    | LanguageModelSettings
    | MedusaSettings
    | PromptTokensSettings
)

TRAINED_SETTINGS = by_kind(get_args(_Trained))


class MixedSettings(_Drafter):
    """Recall, with a trained drafter where that raises tokens per second."""

    mixes: ClassVar[bool] = True
    kind: Literal["mixed"] = "mixed"
    trained: Annotated[_Trained, Field(discriminator="kind"), of_kind(TRAINED_SETTINGS, "eagle")] = EagleSettings()
    recall: RecallSettings = RecallSettings()

    @property
    def reproducible(self) -> bool:
        return self.trained.reproducible

    @property
    def distilled(self) -> Any:
        return self.trained


class NoDrafterSettings(_Drafter):
    """Plain decoding."""

    trainable: ClassVar[bool] = False
    kind: Literal["none"] = "none"


_Kinds = _Trained | RecallDrafterSettings | TokenSelectSettings | MixedSettings | NoDrafterSettings

DRAFTER_SETTINGS = by_kind(get_args(_Kinds))
"""Classes of settings by kind of drafter."""

DrafterSettings = Annotated[_Kinds, Field(discriminator="kind"), of_kind(DRAFTER_SETTINGS, "mixed")]
"""Settings of one drafter of any kind."""


def drafter_of(kind: str, settings: DrafterSettings) -> DrafterSettings:
    """Return the settings of a drafter of one kind.

    Args:
        kind: the kind of drafter.
        settings: settings to use if they or their trained drafter are of this kind; otherwise the defaults are used.
    """
    return next((part for part in (settings, settings.distilled) if part.kind == kind), DRAFTER_SETTINGS[kind]())
