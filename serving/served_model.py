"""Served model as clients see it, and errors of its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServedModel:
    """Served model, as clients see it.

    Attributes:
        id: name that clients request.
        root: source of the target.
        context: largest number of tokens of prompt and completion.
        vocabulary: number of token ids.
        created: start of the replica, in seconds since the epoch.
    """

    id: str
    root: str
    context: int
    vocabulary: int
    created: int


class ChatTemplateError(ValueError):
    """Error of a missing chat template, or of messages that the template rejects."""


class TextTooLongError(ValueError):
    """Text that is certainly longer than a limit; ``tokens`` is the least number of its tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens
