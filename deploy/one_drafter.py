"""Settings for vLLM and other servers: the trained drafter drafts there alone, without recall."""

from __future__ import annotations

from osd.config import ConfigError, MixedSettings, RecallSettings, Settings


def without_recall(settings: Settings) -> Settings:
    """Return the settings for a server that drafts with the trained drafter alone.

    Raises:
        ConfigError: recall has settings.
    """
    drafter = settings.drafter
    if isinstance(drafter, MixedSettings) and drafter.recall != RecallSettings():
        raise ConfigError("drafter.recall: the server drafts without recall, so remove these settings")
    return settings.model_copy(update={"drafter": drafter.distilled})


def for_one_drafter(settings: Settings) -> Settings:
    """Return the settings for a vLLM, whose only drafter learns from the requests of all domains.

    Raises:
        ConfigError: recall has settings.
    """
    trainer = settings.trainer.model_copy(update={"domains": "all"})
    return without_recall(settings).model_copy(update={"trainer": trainer})


def check_traces(settings: Settings) -> None:
    """Refuse settings with which a drafter cannot learn from the traces of a vLLM.

    Raises:
        ConfigError: the drafter or its training needs data that the traces lack.
    """
    if not settings.drafter.distilled.traced:
        raise ConfigError(
            f"drafter.kind {settings.drafter.distilled.kind} does not learn from traces of vLLM, which have the "
            "hidden states of EAGLE-3: set drafter.kind to eagle"
        )
    if settings.trainer.samples != "teacher":
        raise ConfigError(
            "trainer.samples must be teacher: vLLM's traces have no distributions of the target after draft tokens "
            "that it rejected"
        )
    if settings.growth.needs_head:
        raise ConfigError(
            f"growth.kind {settings.growth.kind} needs an acceptance head, and vLLM drafts chains without one"
        )
