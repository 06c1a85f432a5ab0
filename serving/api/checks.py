"""What a prompt, a completion and a draft may be, by their numbers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from osd.config import GrowthSettings, Settings
from osd.engine.policy import Policy
from serving.api.schemas import Speculation
from serving.http.errors import invalid


def check_prompt(ids: list[int], param: str, context: int, vocabulary: int) -> None:
    """Refuse a prompt that the model cannot continue.

    Raises:
        ApiError: 400; it is empty, leaves no room for a completion, or holds unknown ids.
    """
    if not ids:
        raise invalid(f"'{param}' is empty: at least one token is needed.", param)
    if len(ids) >= context:
        message = f"'{param}' has {len(ids)} tokens and the context is limited to {context}, completion included."
        raise invalid(message, param, "context_length_exceeded")
    check_ids(ids, param, vocabulary)


def check_ids(ids: Iterable[int], param: str, vocabulary: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        ApiError: 400; an id is not below ``vocabulary``.
    """
    if max(ids, default=0) >= vocabulary:
        raise invalid(f"'{param}' holds a token id that is not below the vocabulary's size, {vocabulary}.", param)


def check_completion(speculation: Speculation | None, settings: Settings) -> None:
    """Refuse what a controller would have to decide where there is none, or may not.

    Raises:
        ApiError: 400.
    """
    drafter = settings.drafter.distilled
    asked = speculation.completion.asked if speculation is not None and speculation.completion is not None else None
    if asked is not None and not drafter.judges:
        param = f"osd.completion.{asked}"
        raise invalid(
            f"'{param}' needs a drafter with a controller, early_exit; this server has {drafter.kind}.", param
        )
    if speculation is not None and speculation.lossy and not settings.serving.allow_lossy:
        param = "osd.completion.lossy"
        message = f"'{param}' needs serving.allow_lossy, which is false here: such an answer is not the model's own."
        raise invalid(message, param)


@lru_cache(64)
def _policy(growth: GrowthSettings, verification: str | None) -> Policy:
    # Sequences draft together when their policy is the same object.
    return Policy.of(growth, verification)


def check_draft(speculation: Speculation | None, settings: Settings) -> None:
    """Refuse a draft that is larger than the server allows, before anything is planned for it.

    Raises:
        ApiError: 400.
    """
    if speculation is None or (speculation.growth is None and speculation.verification is None):
        return
    largest, limit = (speculation.growth or settings.growth).largest, settings.engine.max_draft
    if largest > limit:
        message = f"'osd.growth' drafts up to {largest} tokens and this server's limit is {limit}."
        raise invalid(message, "osd.growth")


def policy_of(speculation: Speculation | None, settings: Settings) -> Policy | None:
    """How a request wants to speculate, None for as the server does; a large tree takes milliseconds to plan.

    Raises:
        ApiError: 400; growth and verification would bias the output together.
    """
    if speculation is None or (speculation.growth is None and speculation.verification is None):
        return None
    growth = speculation.growth or settings.growth
    try:
        return _policy(growth, speculation.verification or settings.verification)  # type: ignore[arg-type] # frozen, so they hash
    except ValueError as error:
        raise invalid(f"'osd': {error}.", "osd") from None


def completion_budget(asked: int | None, default: int, param: str, prompt: int, context: int, limit: int) -> int:
    """How many tokens to decode at most; ``default`` is cut to what fits, ``asked`` never is.

    Raises:
        ApiError: 400; ``asked`` is over the server's limit or does not fit the context.
    """
    if asked is None:
        return min(default, limit, context - prompt)
    if asked > limit:
        raise invalid(f"'{param}' is {asked} and this server's limit is {limit}.", param)
    if prompt + asked > context:
        sizes = f"The prompt has {prompt} tokens and '{param}' is {asked}"
        raise invalid(f"{sizes}, together more than the context of {context}.", param, "context_length_exceeded")
    return asked
