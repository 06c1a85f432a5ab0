"""What each setting allows by itself and the whole cannot do."""

from __future__ import annotations

from osd.config import ConfigError, Settings
from osd.engine.policy import Policy


def check_settings(settings: Settings) -> None:
    """Refuse settings that contradict each other, before anything is started.

    Raises:
        ConfigError: verification would bias the drafts of growth, or the draft is larger than a slot has room for.
    """
    try:
        policy = Policy.of(settings.growth, settings.verification)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    largest, room = policy.growth.max_nodes, settings.engine.max_draft
    if largest > room:
        kind = settings.growth.kind
        raise ConfigError(f"growth.kind {kind} drafts up to {largest} tokens, and engine.max_draft is {room}")
