"""OpenAI's response shapes, whole and as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from osd.engine.completion import Judged, Skipped
from osd.engine.request import FinishReason, TokenLogprobs, Update
from osd.metrics import SpeculationCounts
from serving.api.tool_calls import CallReader, News
from serving.http import sse
from serving.http.errors import ApiError

Updates = AsyncIterator[tuple[int, Update]]

Texts = Callable[[list[int]], Awaitable[list[str]]]
"""The text of each of some token ids."""

_LEAST = -9999.0  # JSON has no infinity
_UNFINISHED = "\ufffd"  # a token that is a part of a character


@dataclass(frozen=True)
class TokenSources:
    """Renders what the engine credits; a token that is a part of a character is U+FFFD, as in ``logprobs``."""

    texts: Texts

    async def render(self, tokens: Sequence[tuple[int, str]]) -> list[dict[str, str]]:
        """An entry for each of ``tokens``, pairs of id and source."""
        ids = sorted({token for token, _ in tokens})
        text = dict(zip(ids, await self.texts(ids), strict=True)) if ids else {}
        return [{"token": text[token], "source": source} for token, source in tokens]


@dataclass
class Logprobs:
    """Renders what the engine reports; ``render`` is called for the tokens of each choice in their order.

    All are log-probabilities of the model itself, before temperature, penalties and the other sampling settings, as
    OpenAI and vLLM have it. ``bytes`` is null for a token that is no whole character.
    """

    chat: bool
    texts: Texts
    _offsets: dict[int, int] = field(default_factory=dict)

    async def render(self, choice: int, places: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The ``logprobs`` of a choice or of its part of one event; None where nothing was asked for or is new."""
        if not places:
            return None
        ids = sorted({token for place in places for token in (place.token, *(token for token, _ in place.top))})
        text = dict(zip(ids, await self.texts(ids), strict=True))
        return self._of_chat(places, text) if self.chat else self._of_completion(choice, places, text)

    def _of_chat(self, places: Sequence[TokenLogprobs], text: dict[int, str]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            written = text[token]
            encoded = None if _UNFINISHED in written else list(written.encode())
            return {"token": written, "logprob": max(logprob, _LEAST), "bytes": encoded}

        content = [
            {**entry(place.token, place.logprob), "top_logprobs": [entry(*pair) for pair in place.top]}
            for place in places
        ]
        return {"content": content, "refusal": None}

    def _of_completion(self, choice: int, places: Sequence[TokenLogprobs], text: dict[int, str]) -> dict[str, Any]:
        offsets, best, end = [], [], self._offsets.get(choice, 0)
        for place in places:
            offsets.append(end)
            end += len(text[place.token])
            top: dict[str, float] = {}
            # Different tokens may have the same text: the more probable one stands for it, the chosen one above all.
            for token, logprob in ((place.token, place.logprob), *place.top):
                top.setdefault(text[token], max(logprob, _LEAST))
            best.append(top)
        self._offsets[choice] = end
        return {
            "tokens": [text[place.token] for place in places],
            "token_logprobs": [max(place.logprob, _LEAST) for place in places],
            "top_logprobs": best,
            "text_offset": offsets,
        }


@dataclass
class Answer:
    """Gathers updates into what the client is told: ids, texts, usage.

    ``choices`` are as many for each prompt, one prompt after the other; ``prompts`` are the tokens of each. ``sources``
    says who each token comes from, None where nobody asks. Where functions may be called, ``reader`` makes what tells
    calls and text of a choice apart.
    """

    id: str
    model: str
    chat: bool
    choices: int
    prompts: Sequence[int]
    logprobs: Logprobs
    sources: TokenSources | None = None
    reader: Callable[[], CallReader] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = field(default=0, init=False)
    cached: dict[int, int] = field(default_factory=dict, init=False)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts, init=False)
    judged: dict[int, Judged] = field(default_factory=dict, init=False)
    skipped: Skipped | None = field(default=None, init=False)
    readers: dict[int, CallReader] = field(default_factory=dict, init=False)

    def add(self, index: int, update: Update) -> None:
        """Count an update of a choice."""
        self.completion_tokens += len(update.token_ids)
        self.cached[index] = update.cached_tokens
        if update.counts is not None:
            self.counts.add(update.counts)
        if update.judged is not None:
            self.judged[index] = update.judged
        if update.skipped is not None:
            self.skipped = update.skipped + (self.skipped or Skipped())

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once for all its choices, and what none of them had to read as cached."""
        prompt, each = sum(self.prompts), self.choices // len(self.prompts)
        groups = (range(first, first + each) for first in range(0, self.choices, each))
        cached = sum(min(self.cached.get(index, 0) for index in group) for group in groups)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, Any]:
        """How speculation did on this request, all choices together, and what became of each completion's judgement."""
        counts = self.counts
        drafts: dict[str, Any] = {
            "mean_acceptance_length": counts.mean_acceptance_length,
            "draft_acceptance_rate": counts.acceptance_rate,
            "acceptance_histogram": counts.histogram,
            "num_spec_steps": counts.rounds,
            "num_accepted_draft_tokens": counts.accepted,
            "num_draft_tokens": counts.drafted,
        }
        if self.sources is not None:
            drafts["sources"] = {
                source: {"num_draft_tokens": mine.drafted, "num_accepted_draft_tokens": mine.accepted}
                for source, mine in counts.by_source.items()
            }
        if not self.judged and self.skipped is None:
            return {"speculative_decoding": drafts}
        return {"completion": self._completion(), "speculative_decoding": drafts}

    def _completion(self) -> dict[str, Any]:
        """What a controller did, as far as it was asked for."""
        skipped = self.skipped
        found = {} if skipped is None else {"layers": skipped.all, "skipped_layers": skipped.layers}
        if not self.judged:
            return found
        stopped = [
            {"index": index, "reason": "judged_wrong", "probability": round(one.stopped, 4)}
            for index, one in sorted(self.judged.items())
            if one.stopped is not None
        ]
        return {"judged_tokens": sum(one.tokens for one in self.judged.values()), "stopped": stopped, **found}

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        """The root of a response or of one event."""
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def choice(
        self, index: int, text: str, reason: FinishReason | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A finished choice."""
        content: dict[str, Any] = {"text": text}
        finish: str | None = reason
        if self.chat:
            news, finish = self._news(index, text, reason)
            calls = self.readers[index].calls if self.reader is not None else []
            said = {"content": news.text or None, "tool_calls": [call.whole() for call in calls]}
            content = {"message": {"role": "assistant", **(said if calls else {"content": news.text})}}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self, index: int, text: str, reason: FinishReason | None, logprobs: dict[str, Any] | None, first: bool
    ) -> dict[str, Any]:
        """A choice's part of one event."""
        if not self.chat:
            return self.choice(index, text, reason, logprobs)
        news, finish = self._news(index, text, reason)
        said: dict[str, Any] = {"role": "assistant"} if first else {}
        if news.calls:
            said["tool_calls"] = news.calls
        if news.text or not news.calls:
            said["content"] = news.text
        return {"index": index, "delta": said, "logprobs": logprobs, "finish_reason": finish}

    async def credited(self, tokens: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """Who these tokens of a choice, pairs of id and source, come from; nothing where nobody asks."""
        return {} if self.sources is None else {"token_sources": await self.sources.render(tokens)}

    def _news(self, index: int, text: str, reason: FinishReason | None) -> tuple[News, str | None]:
        """What a further text of a choice says, and why the choice ends."""
        if self.reader is None:
            return News(text, []), reason
        reader = self.readers.setdefault(index, self.reader())
        news = reader.feed(text)
        if reason is not None:
            news = news.and_then(reader.close())
        return news, "tool_calls" if reason == "stop" and reader.calls else reason


async def collect(answer: Answer, updates: Updates) -> dict[str, Any]:
    """Wait for all choices and make the whole response."""
    texts: list[list[str]] = [[] for _ in range(answer.choices)]
    reasons: list[FinishReason | None] = [None] * answer.choices
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(answer.choices)]
    credited: list[list[tuple[int, str]]] = [[] for _ in range(answer.choices)]
    async for index, update in updates:
        answer.add(index, update)
        texts[index].append(update.text)
        reasons[index] = update.finish_reason
        logprobs[index] += update.logprobs
        credited[index] += zip(update.token_ids, update.sources, strict=False)
    choices = [
        answer.choice(index, "".join(texts[index]), reasons[index], await answer.logprobs.render(index, places))
        | await answer.credited(credited[index])
        for index, places in enumerate(logprobs)
    ]
    return {**answer.envelope(choices, streamed=False), "usage": answer.usage(), "metrics": answer.metrics()}


async def events(answer: Answer, updates: Updates, usage: bool, continuous: bool) -> AsyncIterator[bytes]:
    """One event per round, then usage if asked for, then ``[DONE]``; a late failure is an event too."""
    begun: set[int] = set()
    try:
        async for index, update in updates:
            answer.add(index, update)
            logprobs = await answer.logprobs.render(index, update.logprobs)
            delta = answer.delta(index, update.text, update.finish_reason, logprobs, index not in begun)
            delta |= await answer.credited(list(zip(update.token_ids, update.sources, strict=False)))
            begun.add(index)
            event = answer.envelope([delta], streamed=True)
            if usage or continuous:
                event["usage"] = answer.usage() if continuous else None
            yield sse.event(event)
        if usage:
            last = answer.envelope([], streamed=True)
            yield sse.event({**last, "usage": answer.usage(), "metrics": answer.metrics()})
    except ApiError as error:
        yield sse.event(error.body)
    yield sse.DONE
