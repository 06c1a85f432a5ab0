"""Recordings: text of a target with its hidden states and distributions, kept for experiments.

Greedy output does not depend on the drafter, so one recording serves every experiment on a stream. One file holds the
records of one stream, target and length. Each record is framed: size, checksum, trace. Records are only appended; an
incomplete record after a crash is cut off before the next one.
"""

from __future__ import annotations

import hashlib
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
from benchmarks.results import digest
from osd import drafting
from osd.capture.trace import Trace, decode
from osd.capture.trace import encode as packed
from osd.cli.common import CommandError, RunError
from osd.config import ChainSettings, DrafterSettings, EagleSettings, Settings
from osd.drafting.recall.drafter import Recall
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.model import SlotModel
from osd.target.context import context_of
from osd.target.identity import identify
from osd.target.load import load_tokenizer, target_directory
from osd.target.model import load_model
from osd.traffic.prompt import Prompt

_HEAD = struct.Struct("<Q16s")


class RecordingError(CommandError):
    """Error of a recording; the message is one line with the remedy."""


@dataclass(frozen=True)
class RecordingSpec:
    """Parameters of a recorded text: target and dtype, tapped layers, tokens per answer, and size of distributions."""

    target: str
    dtype: str
    taps: tuple[int, ...]
    tokens: int
    top_k: int

    def key(self) -> str:
        """Return a hash that is the same in every process."""
        return digest([self.target, self.dtype, self.taps, self.tokens, self.top_k])


@dataclass(frozen=True)
class RecordingPrompt:
    """Prompt to record, with its id in the recording, its domain and its tokens."""

    id: str
    domain: str
    prompt_ids: tuple[int, ...]

    @classmethod
    def of(cls, domain: str, prompt_ids: Sequence[int]) -> RecordingPrompt:
        """Return a prompt with an id from its tokens, so that equal prompts are recorded once."""
        name = hashlib.blake2b(np.array(prompt_ids, np.int32).tobytes(), digest_size=12)
        return cls(name.hexdigest(), domain, tuple(prompt_ids))


class Recording:
    """Records of one stream with one spec, under ``home``/recordings."""

    def __init__(self, home: Path, stream: str, spec: RecordingSpec) -> None:
        self.spec = spec
        self.path = home / "recordings" / f"{stream}-{spec.key()}.traces"

    def read(self, ids: Iterable[str]) -> dict[str, Trace]:
        """Return the recorded traces with these ids."""
        names = set(ids)
        if not self.path.is_file():
            return {}
        with self.path.open("rb") as file:
            return {trace.request_id: trace for trace, _ in _records(file) if trace.request_id in names}

    def ids(self) -> set[str]:
        """Return the ids of all recorded traces."""
        if not self.path.is_file():
            return set()
        with self.path.open("rb") as file:
            return {trace.request_id for trace, _ in _records(file)}

    def writer(self) -> RecordingWriter:
        """Return a context manager that appends records.

        Raises:
            RecordingError: on entry, another process records the same stream.
        """
        return RecordingWriter(self.path)


class RecordingWriter:
    """Writer that appends records and flushes after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = filelock.FileLock(path.with_suffix(".lock"), blocking=False)
        self._file: BinaryIO | None = None

    def __enter__(self) -> RecordingWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise RecordingError(f"another process is recording {self._path.name}; wait for it") from None
        self._path.touch()
        self._file = self._path.open("r+b")
        size = 0
        for _, end in _records(self._file):
            size = end
        self._file.truncate(size)
        self._file.seek(size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def add(self, trace: Trace) -> None:
        """Append a trace with its size and checksum, and flush the file; raise RecordingError outside the context."""
        if self._file is None:
            raise RecordingError("the recording is not open")
        data = packed(trace)
        self._file.write(_HEAD.pack(len(data), _checksum(data)) + data)
        self._file.flush()


def _records(file: BinaryIO) -> Iterator[tuple[Trace, int]]:
    """Yield every complete record from the start, with its end position."""
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
"""Number of sequences to record at the same time: a forward of 16 tokens costs little more than one of 8."""

_CHUNK = 256  # prompt tokens of a step, large because no user waits for the next token


class TapReader(Recall):
    """Drafter that reads layers of the target, so that they are captured; the requests do not speculate."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.needs = replace(Recall.needs, taps=taps)


def _taps(settings: Settings, readers: Sequence[DrafterSettings], directory: Path) -> tuple[int, ...]:
    """Return the layers that drafters of ``readers`` read: those of the first one, then further layers of the rest."""
    first, *rest = [drafting.initial(reader, directory, settings.cache_dir).needs.taps for reader in readers]
    return first + tuple(sorted({tap for taps in rest for tap in taps} - set(first)))


@dataclass(frozen=True)
class RecordingSetup:
    """Target to record, its tokenizer, and the spec of its recordings; layers of ``reader`` are captured."""

    settings: Settings
    directory: Path
    tokenizer: PreTrainedTokenizerBase
    reader: TapReader
    spec: RecordingSpec

    @classmethod
    def of(cls, settings: Settings, tokens: int, readers: Sequence[DrafterSettings]) -> RecordingSetup:
        """Find the target, and capture the layers that drafters of ``readers`` read, or EAGLE's if they read none.

        Raises:
            osd.target.files.TargetError: the target cannot be loaded.
            osd.drafting.DrafterError: the target has too few layers.
        """
        directory = target_directory(settings)
        taps = _taps(settings, readers, directory) or _taps(settings, [EagleSettings()], directory)
        target = identify(settings.target.source, directory).label
        spec = RecordingSpec(target, settings.target.dtype, taps, tokens, settings.capture.top_k)
        return cls(settings, directory, load_tokenizer(directory), TapReader(taps), spec)

    def encode_prompts(self, prompts: Sequence[Prompt], longest: int) -> list[RecordingPrompt]:
        """Return the distinct prompts of at most ``longest`` tokens in order, encoded as the service does."""
        encoded = {}
        for prompt in prompts:
            for ids in encode(self.tokenizer, [prompt], longest):
                item = RecordingPrompt.of(prompt.domain, ids)
                encoded.setdefault(item.id, item)
        return list(encoded.values())

    def engine(self, slots: int, sink: Callable[[Trace], object]) -> Engine:
        """Return an engine that captures everything, not started; its requests must not speculate."""
        model = load_model(self.directory, self.spec.dtype, self.settings.target.device)
        context, taps = context_of(self.settings, self.directory), self.reader.needs.taps
        target = SlotModel(model, slots=slots, context=context, scratch=2, taps=taps)
        engine = self.settings.engine.model_copy(update={"slots": slots, "prefill_chunk": _CHUNK, "max_draft": 1})
        capture = self.settings.capture.model_copy(update={"enabled": True, "segment": max(self.spec.tokens, 16)})
        growth = ChainSettings(depth=1, governed=False)
        update = {"engine": engine, "capture": capture, "growth": growth}
        return Engine(target, self.tokenizer, self.settings.model_copy(update=update), self.reader, sink=sink)


def record(
    setup: RecordingSetup,
    recording: Recording,
    prompts: Sequence[RecordingPrompt],
    seconds: float,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Record the missing prompts greedily, and return the number of prompts that are still missing.

    No prompt starts after ``seconds``; running prompts are finished. ``report`` gets the number of records so far and
    their final number.

    Raises:
        RecordingError: a prompt is too long, or another process records the same stream.
        RunError: the target failed on a prompt.
    """
    with recording.writer() as writer:
        existing = recording.ids()
        missing = [prompt for prompt in prompts if prompt.id not in existing]
        if not missing:
            return 0
        updates: queue.Queue[Update] = queue.Queue()
        traces: queue.Queue[Trace] = queue.Queue()
        engine = setup.engine(min(SLOTS, len(missing)), traces.put)
        done, start, running = 0, time.monotonic(), 0
        waiting = iter(missing)
        engine.start()
        try:
            while True:
                while running < SLOTS and time.monotonic() - start < seconds and (prompt := next(waiting, None)):
                    _submit(engine, prompt, setup.spec.tokens, updates)
                    running += 1
                if not running:
                    break
                update = updates.get()
                if update.finish_reason is None:
                    continue
                if update.finish_reason not in ("stop", "length"):
                    raise RunError(f"the target failed on a prompt: {update.error or update.finish_reason}")
                running -= 1
                # The engine emits the trace right after the last update.
                writer.add(traces.get(timeout=60))
                done += 1
                report(len(prompts) - len(missing) + done, len(prompts))
        finally:
            engine.stop()
    return len(missing) - done


def _submit(engine: Engine, prompt: RecordingPrompt, tokens: int, updates: queue.Queue[Update]) -> None:
    request = Request(
        prompt.id,
        prompt.prompt_ids,
        tokens,
        SamplingParams(temperature=0),
        capture=True,
        speculate=False,
        domain=prompt.domain,
    )
    try:
        engine.submit(request, updates.put)
    except ValueError as error:
        raise RecordingError(str(error)) from None
