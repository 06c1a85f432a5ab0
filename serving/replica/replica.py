"""Replica of the service: target, drafter, engine, and the threads that update and report them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from osd.capture.writer import RecallWriter, TraceWriter
from osd.config import Settings
from osd.engine.build import InitialDrafter, make_engine
from osd.engine.grammar import Grammar
from osd.engine.request import Request, Update
from osd.freed_memory import give_back
from osd.learning.record_worth import RecordWorth
from osd.recall.memory import KEPT
from osd.registry.pointer import Pointer
from osd.registry.replica_loads import ReplicaLoads
from osd.registry.training import TrainingReports
from osd.runtime.device import cores, one_core
from osd.target.context import context_of
from osd.target.identity import identify
from osd.target.load import load_tokenizer, target_directory
from osd.target.vocabulary import TokenText, TokenTexts, max_token_bytes
from serving.monitored import Monitored
from serving.replica.domain_watcher import DomainWatcher
from serving.replica.outcome_sharer import OutcomeSharer
from serving.replica.recall_keeper import RecallKeeper
from serving.replica.reporter import Control, Reporter, Switches
from serving.replica.rollout_follower import (
    DrafterCache,
    FollowerContext,
    Uptake,
    VersionWatcher,
    Watcher,
    starting_drafter,
)
from serving.served_model import ChatTemplateError, ServedModel, TextTooLongError

if TYPE_CHECKING:
    from serving.metrics.ray_metrics import RayMetrics  # imports Ray

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005

_LARGE = 1 << 16
"""Characters above which encoding a text leaves much freed memory, up to hundreds of bytes for each character."""


class Replica(Monitored):
    """Replica with an engine. Two threads tokenize at the same time; ``close`` stops every thread that it started.

    Raises:
        osd.target.load.TargetError: the target cannot be loaded.
        osd.config.ConfigError: ``serving.keys_file`` is invalid.
    """

    def __init__(self, settings: Settings, redis_url: str, name: str, shared: RayMetrics | None) -> None:
        # The engine's thread releases the interpreter's lock at each operator. A short switch interval returns the
        # lock to it soon, even if another thread is busy.
        sys.setswitchinterval(_SWITCH_SECONDS)
        one_core()
        directory = target_directory(settings)
        self._tokenizer, self._tokenizer_lock = load_tokenizer(directory), threading.Lock()
        self._token_texts: TokenTexts | None = None
        self._fast_tokenizer: Tokenizer | None = getattr(self._tokenizer, "backend_tokenizer", None)
        self._tokenizer("")  # sets truncation and padding; later calls only read them
        super().__init__(settings, redis_url, shared)
        self._pointer = Pointer(redis_url, self._registry.storage)
        self._loads, self._control = ReplicaLoads(redis_url), Control(redis_url)
        start: InitialDrafter | None = None
        if settings.drafts:
            start = starting_drafter(settings, self._registry, self._pointer, directory)
        target = identify(settings.target.source, directory)
        self._writer: TraceWriter | None = None
        self._worth = RecordWorth(TrainingReports(redis_url), settings.trainer, settings.wide_domains)
        if settings.capture.enabled:
            recall: RecallWriter | None = None
            if settings.shares_recall:
                recall = RecallWriter(redis_url, settings.recalled, name, KEPT, self._is_purged)
            self._writer = TraceWriter(
                redis_url, settings.capture, name, self._worth, recall, self._worth.note, self._is_purged
            )
        self.engine = make_engine(
            settings, directory, self._tokenizer, start, self._writer, target.label, self._worth.states_weight
        )
        self._watchers: list[Watcher] = []
        uptake = Uptake(cores(settings.engine.threads))
        if start is not None:
            cache = DrafterCache(start.drafter, settings, directory)
            context = FollowerContext(settings, self._registry, self._pointer, self._events, cache, uptake)
            handle = self.engine.drafters(settings.domain)
            self._watchers = [VersionWatcher(context, handle, start), DomainWatcher(context, self.engine)]
        self._keeper = RecallKeeper(settings, redis_url, name, target, self.engine)
        self._sharer: OutcomeSharer | None = None
        router, is_single = self.engine.loop.router, settings.serving.replica_limit == 1
        if router is not None and settings.capture.enabled and not is_single:
            self._sharer = OutcomeSharer(redis_url, settings.capture, name, router, self._is_purged)
        self._reporter = Reporter(
            name, self.engine, self._writer, self._watchers, uptake, self._loads, self._control, self._push
        )
        self.model = ServedModel(
            id=settings.model_id,
            root=settings.target.source,
            context=context_of(settings, directory),
            vocabulary=self.engine.target.vocab_size,
            created=int(time.time()),
        )
        for part in (self._keeper, self._sharer, self.engine, *self._watchers, self._reporter):
            if part is not None:
                part.start()

    def _is_purged(self, request: str) -> bool:
        return self._keeper.is_purged(request)

    def encode(self, text: str, special: bool, limit: int | None = None) -> list[int]:
        """Return the token ids of a text, with the tokenizer's special tokens if ``special``.

        Raises:
            TextTooLongError: the length of the text alone shows that it has more than ``limit`` tokens.
        """
        if limit is not None and len(text) > limit:  # few texts: the first of them reads the vocabulary
            # Encoding takes a second per megabyte.
            covered = self._token_bytes
            if covered is not None and (least := -(-len(text.encode()) // covered)) > limit:
                raise TextTooLongError(least)
        try:
            if self._fast_tokenizer is not None:
                # Thread-safe, and without the places of the tokens in the text, which take time and memory.
                return self._fast_tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
            with self._tokenizer_lock:
                return self._tokenizer(text, add_special_tokens=special)["input_ids"]
        finally:
            if len(text) > _LARGE:
                give_back()

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
        if self._tokenizer.chat_template is None:
            raise ChatTemplateError("The model has no chat template; use /v1/completions.")
        try:
            tool_list: Any = tools or None  # the type in transformers is too narrow
            text = self._tokenizer.apply_chat_template(
                messages, tools=tool_list, add_generation_prompt=True, tokenize=False, **variables
            )
        # Templates see tools and calls as the client sent them.
        except (TemplateError, TypeError, ValueError, RecursionError):
            raise ChatTemplateError("The model's chat template does not take this order of messages.") from None
        return self.encode(str(text), False, limit)

    @cached_property
    def _token_bytes(self) -> int | None:
        return max_token_bytes(self._tokenizer)

    def template(self) -> str:
        """Return the chat template, the one for tools if there are several; "" for none."""
        template = self._tokenizer.chat_template or ""
        # Some models have several templates; with tools, transformers uses this one.
        return template if isinstance(template, str) else template.get("tool_use", template["default"])

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        """Return the text that each token has in the middle of a text; the first call takes a third of a second."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(self._tokenizer)
        return [self._token_texts.of(token) for token in ids]

    def compile(self, kind: str, text: str) -> Grammar:
        """Compile the grammar of an answer; this takes up to 0.2 s.

        Args:
            kind: key of ``osd.engine.grammar_check.GRAMMARS``.
            text: source of the grammar.

        Raises:
            GrammarError: the grammar is invalid.
        """
        return self.engine.grammars.compile(kind, text)

    def submit(self, request: Request, on_update: Callable[[Update], None]) -> None:
        """Queue a sequence; ``on_update`` is called on another thread after each decoding step, and must not block."""
        self.engine.submit(request, on_update)

    def cancel(self, request_id: str) -> None:
        """Stop a sequence within one decoding step; ignore unknown ids."""
        self.engine.cancel(request_id)

    def check_health(self) -> None:
        """Raise an error with one sentence as its message if this replica cannot decode."""
        self.engine.check_health()

    def set_speculation(self, enabled: bool) -> None:
        """Switch speculation in this replica at once, and in the other replicas within a second.

        Raises:
            redis.exceptions.RedisError: Redis does not answer; no replica was switched.
        """
        self._control.set(Switches(speculation=enabled))
        self._reporter.set_speculation(enabled)

    def close(self) -> None:
        """Cancel all requests and stop all threads."""
        for watcher in self._watchers:
            watcher.close()
        self.engine.stop()
        self.engine.target.close()
        threads = (self._writer, self._keeper, self._sharer, self._reporter)
        for part in (*threads, self._loads, self._control, self._worth, self._pointer):
            if part is not None:
                part.close()
        super().close()
