"""What the routes need of a replica; the HTTP layer knows nothing of Ray or of the engine's insides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from osd.config import Settings
from osd.engine.grammar import Grammar
from osd.engine.request import Request, Update
from osd.target.vocabulary import TokenText
from serving.access.guard import Access
from serving.api.tool_calls import ToolFormat
from serving.metrics.history import Bins
from serving.metrics.report import Totals


@dataclass(frozen=True)
class Model:
    """The served model: ``id`` is what clients ask for, ``root`` where it comes from; sizes in tokens."""

    id: str
    root: str
    context: int
    vocabulary: int
    created: int


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses the messages."""


class Watched(Protocol):
    """What operators and the dashboard ask."""

    settings: Settings
    model: Model
    redis_url: str
    access: Access

    async def totals(self) -> Totals:
        """Counters summed over all replicas."""
        ...

    async def dashboard_state(self) -> dict[str, Any]:
        """What the dashboard shows of now, as JSON."""
        ...

    async def dashboard_versions(self, domain: str) -> dict[str, Any]:
        """What it shows of the versions of a domain, as JSON.

        Raises:
            ValueError: there is no such domain.
            redis.exceptions.RedisError: Redis does not answer.
            OSError: the registry cannot be read.
        """
        ...

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        """What all replicas counted in the last ``seconds``, after the bin at ``since``, None for all of it."""
        ...


class Service(Watched, Protocol):
    """One replica, as HTTP sees it. Two threads tokenize at once."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens around it if ``special``."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of a chat that the assistant continues, and that may call ``tools``.

        Raises:
            ChatTemplateError: it cannot be rendered.
        """
        ...

    def tool_format(self) -> ToolFormat:
        """How the model writes down calls of functions.

        Raises:
            NoToolsError: it cannot call any.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        ...

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        """Return the text that each token has in the middle of a text; the first call takes a third of a second."""
        ...

    def compile(self, kind: str, text: str) -> Grammar:
        """What an answer has to look like, by a kind of ``osd.engine.grammar_check.GRAMMARS``; takes up to 0.2 s.

        Raises:
            GrammarError: it is refused.
        """
        ...

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        """Queue a sequence; ``on_update`` is called on another thread, once a round, and must not block."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a sequence within a round; unknown ids are ignored."""
        ...

    def check_health(self) -> None:
        """Raise when this replica cannot decode any more, with one sentence that says why."""
        ...
