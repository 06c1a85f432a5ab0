"""Traces by the target's own forward over whole conversations, several of them at a time."""

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
from osd.runtime.top import top

ROWS = 128
"""Tokens of a forward at most."""


@dataclass
class _Running:
    """A conversation in its slot: ``tokens`` of prompt and answer, ``fed`` of which are in the target."""

    slot: int
    tokens: list[int]
    prompt: int
    trace: TraceBuilder
    fed: int = 0
    rows: list[int] = field(default_factory=list)  # of the forward that runs, those whose logits are wanted

    @property
    def left(self) -> int:
        """Tokens to feed: after the last one nothing is said."""
        return len(self.tokens) - 1 - self.fed


class Labeller:
    """Has a target read answers as if it had given them; every slot of ``model`` is its own.

    A trace says what the target would have said at each place, from all before it, and has the states that the model is
    tapped for. Nothing in it was drafted.
    """

    def __init__(self, model: SlotModel, settings: CaptureSettings, slots: int) -> None:
        self._model, self._settings, self._slots = model, settings, slots

    def traces(self, readings: Sequence[Reading], between: Callable[[], None] = lambda: None) -> list[Trace]:
        """The traces of some answers, in order; ``between`` is called before each forward.

        What is beyond the target's context is left out, and so is an answer whose prompt fills it.
        """
        found: list[Trace] = []
        for start in range(0, len(readings), self._slots):
            some = [self._begin(slot, one) for slot, one in enumerate(readings[start : start + self._slots])]
            running = [one for one in some if one is not None]
            while any(one.left for one in running):
                between()
                self._forward([one for one in running if one.left])
            for one, reading in zip(some, readings[start:], strict=False):
                found += [] if one is None else _built(one, reading)
        return found

    def _begin(self, slot: int, reading: Reading) -> _Running | None:
        exchange, prompt = reading.exchange, reading.prompt
        tokens = [*prompt, *reading.completion][: self._model.context]
        if len(tokens) <= len(prompt):
            return None
        self._model.begin(slot)
        sampling = SamplingParams(exchange.temperature, exchange.top_k, exchange.top_p)
        completes = exchange.conversation is None
        answer = len(tokens) - len(prompt)
        request = Request(exchange.request_id, tuple(prompt), answer, sampling, completes=completes)
        return _Running(slot, tokens, len(prompt), TraceBuilder(request, self._model.label, self._settings.segment))

    def _forward(self, running: Sequence[_Running]) -> None:
        builder, spans = RowBuilder(), list[tuple[_Running, int, int]]()
        wanted: list[int] = []
        for one in running:
            count = min(one.left, ROWS - len(builder))
            if not count:
                break
            row = builder.tokens(one.slot, one.fed, one.tokens[one.fed : one.fed + count])
            said = range(max(one.fed, one.prompt - 1), one.fed + count)  # places after which the answer goes on
            one.rows = [row + place - one.fed for place in said]
            wanted += one.rows
            spans.append((one, row, count))
        result = self._model.forward(builder.build(), torch.tensor(wanted, dtype=torch.int64))
        tops = top(result.logits, range(len(wanted)), self._settings.top_k).on_host()
        at = 0
        for one, row, count in spans:
            one.trace.feed(None if result.hidden is None else result.hidden[row : row + count].clone())
            one.fed += count
            if said := len(one.rows):
                one.trace.add(one.tokens[one.fed + 1 - said : one.fed + 1], tops.part(at, at + said), None, [], 0)
            at += said


def _built(one: _Running, reading: Reading) -> list[Trace]:
    exchange, traces = reading.exchange, list[Trace]()
    while (trace := one.trace.build(exchange.domain, "", 0)) is not None:
        # It is as old as what was said.
        traces.append(msgspec.structs.replace(trace, created=exchange.created))
    return traces
