"""Responses in OpenAI's format, complete or as server-sent events."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from osd.engine.completion import JudgedTokens, SkippedLayers
from osd.engine.request import FinishReason, TokenLogprobs, Update
from osd.engine.thinking import Thinking, ThinkingReader
from osd.metrics import SpeculationCounts
from osd.recall.memory import OWN_SOURCES
from osd.target.vocabulary import TokenText
from serving.api.tool_calls import AnswerPart, CallReader
from serving.http import sse
from serving.http.errors import ApiError

Updates = AsyncIterator[tuple[int, Update]]
"""Updates of the engine with the index of their choice."""

Texts = Callable[[list[int]], Awaitable[list[TokenText]]]
"""Function that returns the text of each token id."""

_LEAST = -9999.0  # JSON cannot represent infinity


@dataclass(frozen=True)
class TokenSources:
    """Renderer of token sources. A token that is part of a character has the text U+FFFD, as in ``logprobs``."""

    texts: Texts

    async def render(self, tokens: Sequence[tuple[int, str]]) -> list[dict[str, str]]:
        """Return an entry for each token of ``tokens``, which are pairs of token id and source."""
        ids = sorted({token for token, _ in tokens})
        text = dict(zip(ids, await self.texts(ids), strict=True)) if ids else {}
        return [{"token": _shown(text[token]), "source": source} for token, source in tokens]


def _shown(text: TokenText) -> str:
    return text.data.decode(errors="replace")


class _TextEnd:
    """Length of the text of a choice so far.

    Attributes:
        characters: number of complete UTF-8 characters in the tokens so far.
    """

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, text: TokenText) -> None:
        """Add a token; a special token does not change the length."""
        if not text.special:
            self.characters += len(self._decoder.decode(text.data))


@dataclass
class Logprobs:
    """Renderer of log-probabilities; call ``render`` for the tokens of each choice in order.

    The values are the model's own log-probabilities, before temperature, penalties and other sampling settings, as in
    OpenAI's API and vLLM. A token that is part of a character has the text U+FFFD, and ``bytes`` has its bytes.
    """

    chat: bool
    texts: Texts
    _ends: dict[int, _TextEnd] = field(default_factory=dict)

    async def render(self, choice: int, places: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Return the ``logprobs`` of ``places``, the next tokens of a choice; None if ``places`` is empty."""
        if not places:
            return None
        ids = sorted({token for place in places for token in (place.token, *(token for token, _ in place.top))})
        text = dict(zip(ids, await self.texts(ids), strict=True))
        return self._of_chat(places, text) if self.chat else self._of_completion(choice, places, text)

    def _of_chat(self, places: Sequence[TokenLogprobs], text: dict[int, TokenText]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token": _shown(text[token]), "logprob": max(logprob, _LEAST), "bytes": list(text[token].data)}

        content = [
            {**entry(place.token, place.logprob), "top_logprobs": [entry(*pair) for pair in place.top]}
            for place in places
        ]
        return {"content": content, "refusal": None}

    def _of_completion(
        self, choice: int, places: Sequence[TokenLogprobs], text: dict[int, TokenText]
    ) -> dict[str, Any]:
        offsets, best, end = [], [], self._ends.setdefault(choice, _TextEnd())
        for place in places:
            offsets.append(end.characters)
            end.add(text[place.token])
            top: dict[str, float] = {}
            # Tokens can have equal texts: keep the chosen token first, then the more probable token.
            for token, logprob in ((place.token, place.logprob), *place.top):
                top.setdefault(_shown(text[token]), max(logprob, _LEAST))
            best.append(top)
        return {
            "tokens": [_shown(text[place.token]) for place in places],
            "token_logprobs": [max(place.logprob, _LEAST) for place in places],
            "top_logprobs": best,
            "text_offset": offsets,
        }


@dataclass
class ResponseBuilder:
    """Builder of a response from the updates of the engine.

    Attributes:
        id: id of the response.
        model: name of the model as the client wrote it.
        chat: whether the request is a chat.
        choices: number of choices; each prompt has the same number, and choices are ordered by prompt.
        prompts: number of tokens of each prompt.
        logprobs: renderer of log-probabilities.
        sources: renderer of token sources; None if the client did not request them.
        reader: factory of the parser of function calls; None if the model may not call functions.
        thinking: marks around the thinking of the model; None if it does not think.
        predicts: whether the request has a prediction.
    """

    id: str
    model: str
    chat: bool
    choices: int
    prompts: Sequence[int]
    logprobs: Logprobs
    sources: TokenSources | None = None
    reader: Callable[[], CallReader] | None = None
    thinking: Thinking | None = None
    predicts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = field(default=0, init=False)
    thinking_tokens: int = field(default=0, init=False)
    cached: dict[int, int] = field(default_factory=dict, init=False)
    counts: SpeculationCounts = field(default_factory=SpeculationCounts, init=False)
    judged: dict[int, JudgedTokens] = field(default_factory=dict, init=False)
    skipped: SkippedLayers | None = field(default=None, init=False)
    readers: dict[int, CallReader] = field(default_factory=dict, init=False)
    thinkers: dict[int, ThinkingReader] = field(default_factory=dict, init=False)

    def add(self, index: int, update: Update) -> None:
        """Add the tokens, counts and decisions of an update of the choice ``index``."""
        self.completion_tokens += len(update.token_ids)
        self.thinking_tokens += update.thinking_tokens
        self.cached[index] = update.cached_tokens
        if update.counts is not None:
            self.counts.add(update.counts)
        if update.judged is not None:
            self.judged[index] = update.judged
        if update.skipped is not None:
            self.skipped = update.skipped + (self.skipped or SkippedLayers())

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far.

        A prompt counts once for all its choices, with the smallest number of cached tokens among them.
        """
        prompt, each = sum(self.prompts), self.choices // len(self.prompts)
        groups = (range(first, first + each) for first in range(0, self.choices, each))
        cached = sum(min(self.cached.get(index, 0) for index in group) for group in groups)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            **({"completion_tokens_details": details} if (details := self._details()) else {}),
        }

    def _details(self) -> dict[str, int]:
        """Return the tokens of thinking, and the drafts copied from the text of the request with its prediction."""
        details = {} if self.thinking is None else {"reasoning_tokens": self.thinking_tokens}
        if self.predicts:
            drafts = [self.counts.by_source[name] for name in OWN_SOURCES if name in self.counts.by_source]
            drafted, accepted = sum(part.drafted for part in drafts), sum(part.accepted for part in drafts)
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return details

    def metrics(self) -> dict[str, Any]:
        """Return the counts of speculative decoding over all choices, and the decisions of the controller."""
        counts = self.counts
        decoding: dict[str, Any] = {
            "mean_acceptance_length": counts.mean_acceptance_length,
            "draft_acceptance_rate": counts.acceptance_rate,
            "acceptance_histogram": counts.histogram,
            "num_spec_steps": counts.rounds,
            "num_accepted_draft_tokens": counts.accepted,
            "num_draft_tokens": counts.drafted,
        }
        if self.sources is not None:
            decoding["sources"] = {
                source: {"num_draft_tokens": drafts.drafted, "num_accepted_draft_tokens": drafts.accepted}
                for source, drafts in counts.by_source.items()
            }
        if not self.judged and self.skipped is None:
            return {"speculative_decoding": decoding}
        return {"completion": self._completion(), "speculative_decoding": decoding}

    def _completion(self) -> dict[str, Any]:
        """Return the decisions of the controller that the request enabled."""
        skipped = self.skipped
        layers = {} if skipped is None else {"layers": skipped.all, "skipped_layers": skipped.layers}
        if not self.judged:
            return layers
        stopped = [
            {"index": index, "reason": "judged_wrong", "probability": round(judged.stopped, 4)}
            for index, judged in sorted(self.judged.items())
            if judged.stopped is not None
        ]
        judged_tokens = sum(judged.tokens for judged in self.judged.values())
        return {"judged_tokens": judged_tokens, "stopped": stopped, **layers}

    def envelope(self, choices: list[dict[str, Any]], streamed: bool) -> dict[str, Any]:
        """Return the top level of a response or of an event."""
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def choice(
        self, index: int, text: str, reason: FinishReason | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return a finished choice with all of its text."""
        content: dict[str, Any] = {"text": text}
        finish: str | None = reason
        if self.chat:
            part, finish = self._parse(index, text, reason)
            calls = self.readers[index].calls if self.reader is not None else []
            message: dict[str, Any] = {"role": "assistant", "content": part.text}
            if part.thinking:
                message |= {"reasoning_content": part.thinking, "content": part.text or None}
            if calls:
                message |= {"content": part.text or None, "tool_calls": [call.complete() for call in calls]}
            content = {"message": message}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def delta(
        self, index: int, text: str, reason: FinishReason | None, logprobs: dict[str, Any] | None, first: bool
    ) -> dict[str, Any]:
        """Return the part of a choice in an event, with the text and log-probabilities since its last event.

        Call it once for each event and in order, because it continues the parsers of thinking and function calls.
        ``first`` marks the first event of the choice, which has the role in a chat.
        """
        if not self.chat:
            return self.choice(index, text, reason, logprobs)
        part, finish = self._parse(index, text, reason)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if part.calls:
            delta["tool_calls"] = part.calls
        if part.thinking:
            delta["reasoning_content"] = part.thinking
        if part.text or not (part.calls or part.thinking):
            delta["content"] = part.text
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    async def token_sources(self, tokens: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """Return the field with the sources of ``tokens``, pairs of id and source; {} if it was not requested."""
        return {} if self.sources is None else {"token_sources": await self.sources.render(tokens)}

    def _parse(self, index: int, text: str, reason: FinishReason | None) -> tuple[AnswerPart, str | None]:
        """Split the next text of a choice into thinking, text and calls; also return the finish reason."""
        thinking = ""
        if self.thinking is not None:
            thinker = self.thinkers.setdefault(index, ThinkingReader(self.thinking))
            thinking, text = thinker.feed(text)
            if reason is not None:
                thinking, text = map("".join, zip((thinking, text), thinker.close(), strict=True))
        if self.reader is None:
            return AnswerPart(text, [], thinking), reason
        reader = self.readers.setdefault(index, self.reader())
        part = AnswerPart("", [], thinking).joined(reader.feed(text))
        if reason is not None:
            part = part.joined(reader.close())
        return part, "tool_calls" if reason == "stop" and reader.calls else reason


async def collect(builder: ResponseBuilder, updates: Updates) -> dict[str, Any]:
    """Return the complete response after all choices have ended; raise the error of ``updates``."""
    texts: list[list[str]] = [[] for _ in range(builder.choices)]
    reasons: list[FinishReason | None] = [None] * builder.choices
    logprobs: list[list[TokenLogprobs]] = [[] for _ in range(builder.choices)]
    sources: list[list[tuple[int, str]]] = [[] for _ in range(builder.choices)]
    async for index, update in updates:
        builder.add(index, update)
        texts[index].append(update.text)
        reasons[index] = update.finish_reason
        logprobs[index] += update.logprobs
        sources[index] += zip(update.token_ids, update.sources, strict=False)
    choices = [
        builder.choice(index, "".join(texts[index]), reasons[index], await builder.logprobs.render(index, places))
        | await builder.token_sources(sources[index])
        for index, places in enumerate(logprobs)
    ]
    return {**builder.envelope(choices, streamed=False), "usage": builder.usage(), "metrics": builder.metrics()}


async def events(builder: ResponseBuilder, updates: Updates, usage: bool, continuous: bool) -> AsyncIterator[bytes]:
    """Yield one event per decoding step and ``[DONE]`` at the end; a late failure is an event too.

    Args:
        builder: builder of the response.
        updates: updates of the engine with the index of their choice.
        usage: whether a last event reports usage and metrics.
        continuous: whether every event reports the usage so far.
    """
    started: set[int] = set()
    try:
        async for index, update in updates:
            builder.add(index, update)
            logprobs = await builder.logprobs.render(index, update.logprobs)
            delta = builder.delta(index, update.text, update.finish_reason, logprobs, index not in started)
            delta |= await builder.token_sources(list(zip(update.token_ids, update.sources, strict=False)))
            started.add(index)
            event = builder.envelope([delta], streamed=True)
            if usage or continuous:
                event["usage"] = builder.usage() if continuous else None
            yield sse.event(event)
        if usage:
            last = builder.envelope([], streamed=True)
            yield sse.event({**last, "usage": builder.usage(), "metrics": builder.metrics()})
    except ApiError as error:
        yield sse.event(error.body)
    yield sse.DONE
