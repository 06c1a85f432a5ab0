"""Checks of the sizes of prompts, completions and drafts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from osd.config import GrowthSettings, Settings
from osd.engine.policy import Policy
from serving.api.schemas import Speculation
from serving.http.errors import invalid


def check_prompt(ids: list[int], param: str, context: int, vocabulary: int) -> None:
    """Check that the model can continue a prompt.

    Raises:
        ApiError: status 400 if the prompt is empty, leaves no room for a completion, or has an unknown token id.
    """
    if not ids:
        raise invalid(f"'{param}' is empty: at least one token is needed.", param)
    if len(ids) >= context:
        message = f"'{param}' has {len(ids)} tokens and the context is limited to {context}, completion included."
        raise invalid(message, param, "context_length_exceeded")
    check_ids(ids, param, vocabulary)


def check_ids(ids: Iterable[int], param: str, vocabulary: int) -> None:
    """Check that all token ids are in the vocabulary.

    Raises:
        ApiError: status 400 if an id is not below ``vocabulary``.
    """
    if max(ids, default=0) >= vocabulary:
        raise invalid(f"'{param}' holds a token id that is not below the vocabulary's size, {vocabulary}.", param)


def check_completion(speculation: Speculation | None, settings: Settings) -> None:
    """Check that the server has the controller that the request needs, and allows lossy answers if requested.

    Raises:
        ApiError: status 400 if either check fails.
    """
    drafter = settings.drafter.distilled
    control = None if speculation is None else speculation.completion
    threshold = None if control is None else control.first_threshold
    if threshold is not None and not drafter.has_exit_controller:
        param = f"osd.completion.{threshold}"
        raise invalid(
            f"'{param}' needs a drafter with a controller, early_exit; this server has {drafter.kind}.", param
        )
    if speculation is not None and speculation.lossy and not settings.serving.allow_lossy:
        param = "osd.completion.lossy"
        message = f"'{param}' needs serving.allow_lossy, which is false here: the answer would not be the model's own."
        raise invalid(message, param)


@lru_cache(64)
def _policy(growth: GrowthSettings, verification: str | None) -> Policy:
    # Only sequences with the same policy object share a draft batch, so policies are cached.
    return Policy.of(growth, verification)


def check_draft(speculation: Speculation | None, settings: Settings) -> None:
    """Check the size of a draft against the server's limit, before it is planned.

    Raises:
        ApiError: status 400 if the draft is too large.
    """
    if speculation is None or (speculation.growth is None and speculation.verification is None):
        return
    largest, limit = (speculation.growth or settings.growth).max_nodes, settings.engine.max_draft
    if largest > limit:
        message = f"'osd.growth' drafts up to {largest} tokens and this server's limit is {limit}."
        raise invalid(message, "osd.growth")


def policy_of(speculation: Speculation | None, settings: Settings) -> Policy | None:
    """Return the policy of a request, or None for the server's policy; planning a large tree takes milliseconds.

    Raises:
        ApiError: status 400 if growth and verification together would bias the output.
    """
    if speculation is None or (speculation.growth is None and speculation.verification is None):
        return None
    growth = speculation.growth or settings.growth
    try:
        return _policy(growth, speculation.verification or settings.verification)  # type: ignore[arg-type] # frozen, so they hash
    except ValueError as error:
        raise invalid(f"'osd': {error}.", "osd") from None


def completion_budget(requested: int | None, default: int, param: str, prompt: int, context: int, limit: int) -> int:
    """Return the limit of tokens of a completion.

    Args:
        requested: limit that the request sets in ``param``; never reduced. None uses ``default``.
        default: limit without ``requested``; reduced to the room that is left.
        param: name of the field, for errors.
        prompt: tokens of the prompt.
        context: tokens of the context, prompt and completion together.
        limit: server's limit of tokens.

    Raises:
        ApiError: status 400 if ``requested`` exceeds the server's limit or does not fit the context.
    """
    if requested is None:
        return min(default, limit, context - prompt)
    if requested > limit:
        raise invalid(f"'{param}' is {requested} and this server's limit is {limit}.", param)
    if prompt + requested > context:
        sizes = f"The prompt has {prompt} tokens and '{param}' is {requested}"
        raise invalid(f"{sizes}, together more than the context of {context}.", param, "context_length_exceeded")
    return requested
