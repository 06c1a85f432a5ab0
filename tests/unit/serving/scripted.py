"""Service without an engine, whose answers a test scripts."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from osd.config import Settings
from osd.engine.grammar import Grammar, GrammarCompiler
from osd.engine.request import Request, Update
from osd.metrics import SpeculationCounts
from osd.target.vocabulary import TokenText
from serving.access.guard import Access
from serving.metrics.history import Bins, MetricsHistory
from serving.metrics.report import Report, ServiceTotals
from serving.monitored import Monitored
from serving.served_model import ChatTemplateError, ServedModel, TextTooLongError
from tests.tiny import CHAT_TEMPLATE, tokenizer

GRAMMARS = GrammarCompiler(tokenizer(), 259, [257])
atexit.register(GRAMMARS.close)

CERTAINLY_LONG = 5000
"""Characters from which a text is refused without its tokens."""

Script = Callable[[Request], list[Update] | None]


class ScriptedService:
    """Replacement of a replica: letters are tokens, and ``script`` returns the updates of a sequence.

    If the script returns None, the sequence runs until it is cancelled; the test sends updates with ``updates``.
    """

    metrics, _render = Monitored.metrics, Monitored._render

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.redis_url = "redis://127.0.0.1:1/0"
        self.refused: list[str] = []
        self.access = Access(settings, None, self.refused.append)
        self.model = ServedModel(id="tiny", root="some/where", context=64, vocabulary=0x250, created=1)
        self.script: Script = lambda request: [
            Update(request.id, (1, 2), "Hel"),
            Update(request.id, (3,), "lo", "stop", SpeculationCounts(2, 4, 1, [1, 0], [1, 1])),
        ]
        self.chat_template = CHAT_TEMPLATE
        self.variables: list[dict[str, Any]] = []
        self.rendered: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
        self.submitted: list[Request] = []
        self.updates: list[Callable[[Update], None]] = []
        self.cancelled: list[str] = []
        self.healthy = True
        self.replicas: list[Report] = []
        self.history, self.reads, self.counters = MetricsHistory(), 0, {"requests": 1}

    def encode(self, text: str, special: bool, limit: int | None = None) -> list[int]:
        if limit is not None and len(text) > CERTAINLY_LONG:
            raise TextTooLongError(len(text))
        return [1] * special + [min(ord(letter), 0x24F) for letter in text]

    def template(self) -> str:
        return self.chat_template

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
        limit: int | None = None,
    ) -> list[int]:
        self.rendered.append((messages, tools))
        self.variables.append(variables)
        if messages[0]["role"] == "assistant":
            raise ChatTemplateError("The model's chat template does not take this order of messages.")
        return self.encode("".join(f"{message['role'][0]}{message['content']}" for message in messages), False, limit)

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        return [TokenText(chr(token).encode(), special=False) for token in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def compile(self, kind: str, text: str) -> Grammar:
        return GRAMMARS.compile(kind, text)

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        self.submitted.append(request)
        self.updates.append(on_update)
        updates = self.script(request)
        if updates is not None:
            threading.Thread(target=lambda: [on_update(update) for update in updates]).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def check_health(self) -> None:
        if not self.healthy:
            raise RuntimeError("thread ended")

    async def totals(self) -> ServiceTotals:
        return ServiceTotals({"requests": 3}, self.replicas)

    async def dashboard_state(self) -> dict[str, Any]:
        self.reads += 1
        return {"time": time.time(), "events": [], "totals": self.counters}

    async def dashboard_versions(self, domain: str) -> dict[str, Any]:
        if domain != self.settings.domain:
            raise ValueError(domain)
        return {"domain": domain}

    async def dashboard_bins(self, seconds: int, since: int | None) -> Bins:
        return self.history.bins(time.time(), seconds, since)
