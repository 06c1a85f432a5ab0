"""Interface between the HTTP routes and a replica; it is independent of Ray and of the engine's internals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from osd.config import Settings
from osd.engine.grammar import Grammar
from osd.engine.request import Request, Update
from osd.target.vocabulary import TokenText
from serving.access.guard import Access
from serving.metrics.history import Bins
from serving.metrics.report import ServiceTotals


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


class MonitoredService(Protocol):
    """Interface for the metrics, the dashboard and the admin routes."""

    settings: Settings
    model: ServedModel
    redis_url: str
    access: Access

    async def totals(self) -> ServiceTotals:
        """Return the counters of all replicas."""
        ...

    async def dashboard_state(self) -> dict[str, Any]:
        """Return the current state for the dashboard, as JSON."""
        ...

    async def dashboard_versions(self, domain: str) -> dict[str, Any]:
        """Return the versions of a domain for the dashboard, as JSON.

        Raises:
            ValueError: the domain does not exist.
            redis.exceptions.RedisError: Redis does not answer.
            OSError: the registry cannot be read.
        """
        ...

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        """Return the history of all replicas.

        Args:
            seconds: length of the window that ends now.
            since: start of the last bin that the caller has; only later bins are returned. None returns all.
        """
        ...


class Service(MonitoredService, Protocol):
    """Interface of one replica for the HTTP routes. Two threads tokenize at the same time."""

    def encode(self, text: str, special: bool, limit: int | None = None) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens if ``special``.

        Raises:
            TextTooLongError: the length of the text alone shows that it has more than ``limit`` tokens.
        """
        ...

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
        limit: int | None = None,
    ) -> list[int]:
        """Return the token ids of a chat with ``tools``, up to the start of the assistant's answer.

        ``variables`` are further variables of the chat template.

        Raises:
            TextTooLongError: the length of the chat alone shows that it has more than ``limit`` tokens.
            ChatTemplateError: the chat template cannot render the messages.
        """
        ...

    def template(self) -> str:
        """Return the chat template, the one for tools if there are several; "" for none."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        """Return the text that each token has in the middle of a text; the first call takes a third of a second."""
        ...

    def compile(self, kind: str, text: str) -> Grammar:
        """Compile the grammar of an answer; this takes up to 0.2 s.

        Args:
            kind: key of ``osd.engine.grammar_check.GRAMMARS``.
            text: source of the grammar.

        Raises:
            GrammarError: the grammar is invalid.
        """
        ...

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        """Queue a sequence; ``on_update`` is called on another thread after each decoding step, and must not block."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a sequence within one decoding step; ignore unknown ids."""
        ...

    def check_health(self) -> None:
        """Raise an error with one sentence as its message if this replica cannot decode."""
        ...
