"""Recording: the target decodes a stream plainly, and what its forwards computed is kept."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.adaptation.recording import Asked, Recording, RecordingError, Take
from benchmarks.pair import encode
from osd import drafters
from osd.capture.trace import Trace
from osd.config import ChainSettings, DrafterSettings, EagleSettings, Settings
from osd.drafters.base import Drafter, Needs
from osd.drafters.recall.drafter import Recall
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.model import SlotModel
from osd.target.identity import identify
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model
from osd.traffic.prompt import Prompt

SLOTS = 16
"""Sequences that are recorded at the same time: a forward of 16 tokens costs little more than one of 8."""

_CHUNK = 256  # prompt tokens of a round: nobody waits for the others' next token


class Reader(Recall):
    """Reads layers of the target, so that they are captured; the requests of a recording do not speculate."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self._taps = taps

    @property
    def needs(self) -> Needs:
        """See ``Drafter.needs``."""
        return replace(super().needs, taps=self._taps)


def _taps(settings: Settings, readers: Sequence[DrafterSettings], directory: Path) -> tuple[int, ...]:
    """The layers that drafters of ``readers`` read together: those of the first of them, and what others read more."""
    first, *others = [drafters.initial(one, directory, settings.home_dir).needs.taps for one in readers]
    return first + tuple(sorted({tap for taps in others for tap in taps} - set(first)))


@dataclass(frozen=True)
class RecordingSetup:
    """A target that can be recorded, its tokenizer, and what its recordings keep.

    What ``reader`` reads of the target is captured.
    """

    settings: Settings
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    reader: Reader
    take: Take

    @classmethod
    def of(cls, settings: Settings, tokens: int, readers: Sequence[DrafterSettings]) -> RecordingSetup:
        """Find the target, and capture what drafters of ``readers`` read, or what EAGLE does where that is nothing.

        Raises:
            osd.target.load.TargetError: the target cannot be had.
            osd.drafters.DrafterError: it is too small to be tapped.
        """
        directory = target_directory(settings)
        taps = _taps(settings, readers, directory) or _taps(settings, [EagleSettings()], directory)
        target = identify(settings.target.source, directory).label
        take = Take(target, settings.target.dtype, taps, tokens, settings.capture.top_k)
        return cls(settings, directory, load_tokenizer(directory), Reader(taps), take)

    def asked(self, prompts: Sequence[Prompt], longest: int) -> list[Asked]:
        """The distinct prompts of at most ``longest`` tokens, in order, as the service would encode them."""
        found = {}
        for prompt in prompts:
            for ids in encode(self.tokenizer, [prompt], longest):
                one = Asked.of(prompt.domain, ids)
                found.setdefault(one.id, one)
        return list(found.values())

    def engine(
        self, slots: int, sink: Callable[[Trace], object], drafter: Drafter | None = None, depth: int = 1
    ) -> Engine:
        """An engine that captures everything, not started; without a ``drafter`` no request may speculate."""
        reader = self.reader if drafter is None else drafter
        context = self.settings.engine.context
        model = load_model(self.directory, self.take.dtype, self.settings.target.device)
        needs = reader.needs
        target = SlotModel(
            model, slots=slots, context=context, scratch=depth + 1 + needs.riders, taps=needs.taps,
            embeddings=slots * needs.embeddings,
        )  # fmt: skip
        engine = self.settings.engine.model_copy(update={"slots": slots, "prefill_chunk": _CHUNK, "max_draft": depth})
        capture = self.settings.capture.model_copy(update={"enabled": True, "segment": max(self.take.tokens, 16)})
        growth = ChainSettings(depth=depth, governed=False)
        trainer = self.settings.trainer.model_copy(update={"samples": "student"})
        update = {"engine": engine, "capture": capture, "growth": growth, "trainer": trainer}
        chosen = self.settings.model_copy(update=update)
        return Engine(target, self.tokenizer, chosen, reader, sink=sink)


def record(
    setup: RecordingSetup,
    recording: Recording,
    asked: Sequence[Asked],
    seconds: float,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Record what is missing of ``asked``, greedily; returns how many are still missing.

    No prompt is begun after ``seconds``; those under way are finished.

    Args:
        setup: the target.
        recording: what is there already, and where the rest goes.
        asked: prompts, each of them with room for its tokens.
        seconds: to begin new prompts in.
        report: told how many of how many are recorded.

    Raises:
        RecordingError: a prompt does not fit or failed, or another process is recording the same.
    """
    with recording.append() as writer:
        there = recording.ids()
        missing = [one for one in asked if one.id not in there]
        if not missing:
            return 0
        updates: queue.Queue[Update] = queue.Queue()
        traces: queue.Queue[Trace] = queue.Queue()
        engine = setup.engine(min(SLOTS, len(missing)), traces.put)
        done, begun, flying = 0, time.monotonic(), 0
        waiting = iter(missing)
        engine.start()
        try:
            while True:
                while flying < SLOTS and time.monotonic() - begun < seconds and (one := next(waiting, None)):
                    _submit(engine, one, setup.take.tokens, updates)
                    flying += 1
                if not flying:
                    break
                update = updates.get()
                if update.finish_reason is None:
                    continue
                if update.finish_reason not in ("stop", "length"):
                    raise RecordingError(f"the target failed on a prompt: {update.error or update.finish_reason}")
                flying -= 1
                # The engine gives the trace right after the last update.
                writer.add(traces.get(timeout=60))
                done += 1
                report(len(asked) - len(missing) + done, len(asked))
        finally:
            engine.stop()
    return len(missing) - done


def _submit(engine: Engine, one: Asked, tokens: int, updates: queue.Queue[Update]) -> None:
    request = Request(
        one.id, one.prompt_ids, tokens, SamplingParams(temperature=0), capture=True, speculate=False, domain=one.domain
    )
    try:
        engine.submit(request, updates.put)
    except ValueError as error:
        raise RecordingError(str(error)) from None
