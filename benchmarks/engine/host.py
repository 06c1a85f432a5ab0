"""``osd bench host``: time of the host between the verdicts of a decoding step and the launch of the next one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from typing import Annotated, Any, TypeVar

import torch
import typer

from benchmarks.gpu.random_targets import make_drafter, make_target, make_tokenizer
from benchmarks.turns import Spread
from osd.cli.common import fail
from osd.cli.report import ReportFile, Table, check_files, conclude, say
from osd.cli.signals import stop_signals
from osd.config import ChainSettings, EngineSettings, Settings
from osd.drafting.recall.drafter import Recall
from osd.engine import step as step_module
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime.cuda_graph import GraphRecorder
from osd.runtime.model import SlotModel

Result = TypeVar("Result")

KINDS = ("none", "recall", "eagle")
DEPTH, PROMPT, SLOT = 4, 64, 2048
"""Tokens of a draft and of a prompt, and the context of a slot."""
_WARM_UP = 40

Streams = Annotated[
    list[int], typer.Option("--streams", min=1, max=64, help="Sequences of a step; repeat the option for more.")
]
Kind = Annotated[str, typer.Option("--draft", help="none, recall or eagle.", metavar="KIND")]
Steps = Annotated[int, typer.Option(min=20, help="Measured steps.")]


def host(streams: Streams = [1, 8], draft: Kind = "none", steps: Steps = 200, json_file: ReportFile = None) -> None:  # noqa: B006
    """Measure the host's time between two forwards, without a GPU.

    A tiny random target runs the code of a GPU on a CPU. The seconds are CPU time of the engine's thread, so that other
    processes do not change them.
    """
    check_files(json_file)
    if draft not in KINDS:
        fail(f"--draft {draft} is unknown: use {', '.join(KINDS)}")
    torch.set_num_threads(1)
    with stop_signals():
        figures = [measure(count, draft, steps) for count in streams]
    conclude([table(figures)], {"draft": draft, "steps": steps, "figures": [asdict(row) for row in figures]}, json_file)


@dataclass(frozen=True)
class HostTime:
    """Host seconds of decoding steps with ``streams`` sequences, without the work that a GPU would do.

    ``exposed`` lies between the read of the verdicts and the next launch, in which a GPU would wait. ``total`` is all.
    """

    streams: int
    exposed: Spread
    total: Spread
    tokens_per_step: float


class _Clock:
    """CPU seconds of the calling thread, divided into those of the device's work and those of the host."""

    def __init__(self) -> None:
        self.exposed: list[float] = []
        self.device = 0.0
        self._read: float | None = None
        self._depth = 0

    def launched(self, work: Callable[..., Result]) -> Callable[..., Result]:
        """Return ``work`` such that its time counts as the device's."""

        @wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Result:
            start = time.thread_time()
            if self._read is not None:
                self.exposed.append(start - self._read)
                self._read = None
            self._depth += 1
            try:
                return work(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.device += time.thread_time() - start

        return timed

    def read(self, wait: Callable[..., Result]) -> Callable[..., Result]:
        """Return ``wait``, after which the device is idle."""

        @wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Result:
            result = wait(*args, **kwargs)
            self._read = time.thread_time()
            return result

        return timed


@contextmanager
def _timed(target: SlotModel, clock: _Clock) -> Generator[None]:
    recorder: Any = GraphRecorder
    decoder, record = type(target.decoder), recorder.record
    forward, read = decoder.forward, step_module.read_together

    def recorded(self: GraphRecorder, run: Callable[[], Any]) -> Callable[[], Any]:
        return clock.launched(record(self, run))

    decoder.forward = clock.launched(forward)
    recorder.record = recorded
    step_module.read_together = clock.read(read)
    try:
        yield
    finally:
        decoder.forward, recorder.record, step_module.read_together = forward, record, read


def engine_of(streams: int, draft: str) -> tuple[Engine, SlotModel]:
    """Return an engine that is not started, on a tiny random target with the code of a GPU."""
    model = make_target("small", torch.float32, torch.device("cpu"), sharpness=4.0)
    drafter: Any = {"none": lambda: None, "recall": Recall, "eagle": partial(make_drafter, model)}[draft]()
    settings = Settings(engine=EngineSettings(slots=streams, context=SLOT, prefix_cache=False, threads=1)).model_copy(
        update={"growth": ChainSettings(depth=DEPTH, governed=False)}
    )
    taps: tuple[int, ...] = ()
    if drafter is not None:
        make, taps = drafter.session, tuple(drafter.needs.taps)
        drafter.session = lambda runtime: make(replace(runtime, bucketed=True, int8=False))
    scratch = settings.engine.max_draft + 1
    target = SlotModel(model, slots=streams, context=SLOT, scratch=scratch, taps=taps, bucketed=True)
    return Engine(target, make_tokenizer(target.vocab_size), settings, drafter, 1), target


def measure(streams: int, draft: str, steps: int) -> HostTime:
    """Measure ``steps`` decoding steps in which all ``streams`` sequences decode."""
    engine, target = engine_of(streams, draft)
    loop, updates, clock = engine.loop, list[Update](), _Clock()
    generator = torch.Generator().manual_seed(1)
    most = min((_WARM_UP + steps) * (DEPTH + 1) + 8, SLOT - PROMPT)
    totals: list[float] = []
    with torch.inference_mode(), _timed(target, clock):
        for number in range(streams):
            prompt = torch.randint(256, (PROMPT,), generator=generator).tolist()
            request = Request(str(number), tuple(prompt), most, SamplingParams(0.0), ignore_eos=True, capture=True)
            engine.submit(request, updates.append)
        while loop.scheduler.waiting or not all(s.decoding for s in loop.scheduler.running):
            loop.step()
        for _ in range(_WARM_UP):
            loop.step()
        gc.collect()
        gc.disable()
        loop.step()
        clock.exposed.clear()
        before = engine.counters()
        for _ in range(steps):
            start, device = time.thread_time(), clock.device
            loop.step()
            totals.append(time.thread_time() - start - (clock.device - device))
            if len(loop.scheduler.running) < streams:
                break
        gc.enable()
    after = engine.counters()
    say(f"{streams} streams: {len(totals)} steps")
    tokens = (after.completion_tokens - before.completion_tokens) / max(after.forwards - before.forwards, 1) / streams
    return HostTime(streams, Spread.of(clock.exposed), Spread.of(totals), tokens)


def table(figures: list[HostTime]) -> Table:
    """Return a table of microseconds."""
    rows = [
        (str(row.streams), row.exposed.text(1e6, 0), row.total.text(1e6, 0), f"{row.tokens_per_step:.2f}")
        for row in figures
    ]
    names = ("between two forwards, us", "of a step, us", "tokens of a sequence")
    return Table("CPU time of the host", ("streams", *names), rows)
