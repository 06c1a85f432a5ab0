"""Text that a target wrote once, with its hidden states and distributions, kept to be replayed.

Greedy output does not depend on the drafter, so a recorded stream serves every experiment on it. One file holds the
records of one stream for one target and one length, each of them framed: its size, a checksum and a trace. Records are
only ever appended; what a crash left incomplete at the end is cut off before the next one.
"""

from __future__ import annotations

import hashlib
import json
import queue
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import filelock
import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.engines import encode
from osd import drafting
from osd.capture.trace import Trace, decode
from osd.capture.trace import encode as packed
from osd.cli.common import CommandError
from osd.config import ChainSettings, DrafterSettings, EagleSettings, Settings
from osd.drafting.recall.drafter import Recall
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.model import SlotModel
from osd.target.identity import identify
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model
from osd.traffic.prompt import Prompt

_HEAD = struct.Struct("<Q16s")


class RecordingError(CommandError):
    """A recording cannot be used; the message is one line that says what to do."""


@dataclass(frozen=True)
class Take:
    """What fixes a recorded text: the target and its dtype, the tapped layers, and how much is written and kept."""

    target: str
    dtype: str
    taps: tuple[int, ...]
    tokens: int
    top_k: int

    def key(self) -> str:
        """The same for the same text, in every process."""
        facts = json.dumps([self.target, self.dtype, self.taps, self.tokens, self.top_k])
        return hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Asked:
    """One prompt to record: the id that it has in a recording, its domain, and its tokens."""

    id: str
    domain: str
    prompt_ids: tuple[int, ...]

    @classmethod
    def of(cls, domain: str, prompt_ids: Sequence[int]) -> Asked:
        """Name a prompt by its tokens, so that the same prompt is recorded once whatever file it stands in."""
        digest = hashlib.blake2b(np.array(prompt_ids, np.int32).tobytes(), digest_size=12)
        return cls(digest.hexdigest(), domain, tuple(prompt_ids))


class Recording:
    """The records of one stream for one take, under ``home``/recordings."""

    def __init__(self, home: Path, stream: str, take: Take) -> None:
        self.take = take
        self.path = home / "recordings" / f"{stream}-{take.key()}.traces"

    def read(self, wanted: Iterable[str]) -> dict[str, Trace]:
        """The records with these ids that are there."""
        names = set(wanted)
        if not self.path.is_file():
            return {}
        with self.path.open("rb") as file:
            return {trace.request_id: trace for trace, _ in _records(file) if trace.request_id in names}

    def ids(self) -> set[str]:
        """What is recorded so far."""
        if not self.path.is_file():
            return set()
        with self.path.open("rb") as file:
            return {trace.request_id for trace, _ in _records(file)}

    def append(self) -> Writer:
        """Take the right to append; a context manager.

        Raises:
            RecordingError: another process is recording the same.
        """
        return Writer(self.path)


class Writer:
    """Appends records, each flushed before the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = filelock.FileLock(path.with_suffix(".lock"), blocking=False)
        self._file: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise RecordingError(f"another process is recording {self._path.name}; wait for it") from None
        self._path.touch()
        self._file = self._path.open("r+b")
        whole = 0
        for _, end in _records(self._file):
            whole = end
        self._file.truncate(whole)
        self._file.seek(whole)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def add(self, trace: Trace) -> None:
        """Append a record."""
        if self._file is None:
            raise RecordingError("the recording is not open")
        data = packed(trace)
        self._file.write(_HEAD.pack(len(data), _checksum(data)) + data)
        self._file.flush()


def _records(file: BinaryIO) -> Iterator[tuple[Trace, int]]:
    """Every whole record from the start on, and where it ends."""
    file.seek(0)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        size, checksum = _HEAD.unpack(head)
        data = file.read(size)
        if len(data) != size or _checksum(data) != checksum:
            return
        yield decode(data), file.tell()


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


SLOTS = 16
"""Sequences that are recorded at the same time: a forward of 16 tokens costs little more than one of 8."""

_CHUNK = 256  # prompt tokens of a round: nobody waits for the others' next token


class Reader(Recall):
    """Reads layers of the target, so that they are captured; the requests of a recording do not speculate."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.needs = replace(Recall.needs, taps=taps)


def _taps(settings: Settings, readers: Sequence[DrafterSettings], directory: Path) -> tuple[int, ...]:
    """The layers that drafters of ``readers`` read together: those of the first of them, and what others read more."""
    first, *others = [drafting.initial(one, directory, settings.home_dir).needs.taps for one in readers]
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
            osd.drafting.DrafterError: it is too small to be tapped.
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

    def engine(self, slots: int, sink: Callable[[Trace], object]) -> Engine:
        """Return an engine that captures everything, not started; no request may speculate."""
        model = load_model(self.directory, self.take.dtype, self.settings.target.device)
        context, taps = self.settings.engine.context, self.reader.needs.taps
        target = SlotModel(model, slots=slots, context=context, scratch=2, taps=taps)
        engine = self.settings.engine.model_copy(update={"slots": slots, "prefill_chunk": _CHUNK, "max_draft": 1})
        capture = self.settings.capture.model_copy(update={"enabled": True, "segment": max(self.take.tokens, 16)})
        growth = ChainSettings(depth=1, governed=False)
        update = {"engine": engine, "capture": capture, "growth": growth}
        return Engine(target, self.tokenizer, self.settings.model_copy(update=update), self.reader, sink=sink)


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
