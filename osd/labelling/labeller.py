"""Traces of answers, computed by the target in batches of conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from osd.capture.trace import Trace
from osd.config import CaptureSettings
from osd.engine.request import Request, SamplingParams
from osd.engine.trace_builder import TraceBuilder
from osd.labelling.rendering import Reading
from osd.runtime.batch import RowBuilder
from osd.runtime.model import SlotModel
from osd.runtime.top import most_probable

ROWS = 128
"""Limit on the tokens of a forward."""


@dataclass
class _Conversation:
    """Conversation in a slot of the target.

    Attributes:
        slot: number of the slot.
        tokens: prompt and answer.
        prompt: number of tokens of the prompt.
        trace: builder of the trace.
        fed: number of tokens that the target has read.
        rows: rows of the current forward whose logits predict a token of the answer.
    """

    slot: int
    tokens: list[int]
    prompt: int
    trace: TraceBuilder
    fed: int = 0
    rows: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Number of tokens to feed; the last token predicts nothing and is not fed."""
        return len(self.tokens) - 1 - self.fed


class Labeller:
    """Labeller that lets the target read answers and records its predictions.

    A trace has the target's distribution at each position of the answer, and the hidden states of the tapped layers.
    It has no drafted tokens.
    """

    def __init__(self, model: SlotModel, settings: CaptureSettings, slots: int) -> None:
        """Label with ``model``; the labeller must be the only user of its slots."""
        self._model, self._settings, self._slots = model, settings, slots

    def traces(self, readings: Sequence[Reading], between: Callable[[], None] = lambda: None) -> list[Trace]:
        """Return the traces of the answers in ``readings``, in order.

        Tokens beyond the target's context are left out. An answer whose prompt fills the context has no trace.

        Args:
            readings: prompts and answers as token ids.
            between: called before each forward.
        """
        traces: list[Trace] = []
        for start in range(0, len(readings), self._slots):
            batch = readings[start : start + self._slots]
            conversations = [self._begin(slot, reading) for slot, reading in enumerate(batch)]
            running = [conversation for conversation in conversations if conversation is not None]
            while unfinished := [conversation for conversation in running if conversation.left]:
                between()
                self._forward(unfinished)
            for conversation, reading in zip(conversations, batch, strict=True):
                traces += [] if conversation is None else _build_traces(conversation, reading)
        return traces

    def _begin(self, slot: int, reading: Reading) -> _Conversation | None:
        exchange, prompt = reading.exchange, reading.prompt
        tokens = [*prompt, *reading.completion][: self._model.context]
        if len(tokens) <= len(prompt):
            return None
        self._model.begin(slot)
        sampling = SamplingParams(exchange.temperature, exchange.top_k, exchange.top_p)
        completes = exchange.conversation is None
        answer = len(tokens) - len(prompt)
        request = Request(exchange.request_id, tuple(prompt), answer, sampling, completes=completes)
        trace = TraceBuilder(request, self._model.label, self._settings.segment)
        return _Conversation(slot, tokens, len(prompt), trace)

    def _forward(self, conversations: Sequence[_Conversation]) -> None:
        builder, spans = RowBuilder(), list[tuple[_Conversation, int, int]]()
        wanted: list[int] = []
        for conversation in conversations:
            fed = conversation.fed
            count = min(conversation.left, ROWS - len(builder))
            if not count:
                break
            row = builder.tokens(conversation.slot, fed, conversation.tokens[fed : fed + count])
            positions = range(max(fed, conversation.prompt - 1), fed + count)  # positions that predict the answer
            conversation.rows = [row + position - fed for position in positions]
            wanted += conversation.rows
            spans.append((conversation, row, count))
        result = self._model.forward(builder.build(), torch.tensor(wanted, dtype=torch.int64))
        tops = most_probable(result.logits, range(len(wanted)), self._settings.top_k).on_host()
        at = 0
        for conversation, row, count in spans:
            conversation.trace.feed(None if result.hidden is None else result.hidden[row : row + count].clone())
            conversation.fed += count
            if predicted := len(conversation.rows):
                end = conversation.fed + 1
                tokens = conversation.tokens[end - predicted : end]
                conversation.trace.add(tokens, tops.part(at, at + predicted), None, [], 0)
            at += predicted


def _build_traces(conversation: _Conversation, reading: Reading) -> list[Trace]:
    exchange, traces = reading.exchange, list[Trace]()
    while (trace := conversation.trace.build(exchange.domain, "", 0)) is not None:
        # A trace has the age of the exchange.
        traces.append(msgspec.structs.replace(trace, created=exchange.created))
    return traces
