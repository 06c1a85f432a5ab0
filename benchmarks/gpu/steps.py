"""The steps of the list, in their order: each gives figures as JSON."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.engine import decode as decoding
from benchmarks.engine import forward as forwards
from benchmarks.engine.isolated import COMMITTED, DRAFT_CONTEXT, bandwidth, forward_seconds, on_several_cores, packed
from benchmarks.engine.synthetic import forced
from benchmarks.engines import autoregressive
from benchmarks.gpu.beside_training import beside_training, gaps
from benchmarks.gpu.random_targets import make_drafter, make_target, make_tokenizer
from benchmarks.streams import answers_of
from benchmarks.turns import Spread
from osd.config import TRAINED_SETTINGS, ChainSettings, EngineSettings, RecallDrafterSettings, Settings
from osd.drafting import initial, serving_taps
from osd.drafting.base import Drafter
from osd.drafting.recall.drafter import Recall
from osd.drafting.session import Runtime
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams, Update
from osd.runtime import eight_bits
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.model import SlotModel
from osd.target.model import load_config, load_model

DEPTH, CONTEXT = 4, 1024
COUNTS, STREAMS = (1, 8, 64), (1, 8, 32, 64)
TESTS = ("tests/unit/runtime", "tests/unit/drafting", "tests/unit/engine")
FEW_TESTS = (
    "tests/unit/runtime/test_graphs.py",
    "tests/unit/drafting/test_graph_chains.py",
    "tests/unit/runtime/test_attention.py",
    "tests/unit/engine/test_bucketed.py",
)


@dataclass(frozen=True)
class Run:
    """Where a step runs and what it leaves behind: ``small`` shapes on ``device``, files in ``folder``."""

    device: torch.device
    small: bool
    folder: Path

    def shape(self, shape: str) -> str:
        """Which of the shapes stands for one."""
        return "small" if self.small else shape

    def target(self, shape: str, many: int) -> SlotModel:
        """A random target with ``many`` slots."""
        return self.over_slots(self.model(shape), many)

    def model(self, shape: str) -> nn.Module:
        """The random model of a shape; a CPU is quicker with small ones in float32."""
        return make_target(self.shape(shape), torch.float32 if self.small else torch.bfloat16, self.device)

    def over_slots(self, model: nn.Module, many: int, taps: tuple[int, ...] = (), weights: str = "full") -> SlotModel:
        """With ``many`` slots, as a GPU runs it."""
        return SlotModel(
            model, slots=many, context=CONTEXT, scratch=COUNTS[-1] + 1, taps=taps, weights=weights, bucketed=True
        )


GREEDY = SamplingParams(temperature=0.0)


def settings_of(streams: int) -> Settings:
    """An engine of so many slots that drafts chains and governs nothing."""
    return Settings(
        engine=EngineSettings(slots=streams, context=CONTEXT, prefix_cache=False, prefill_chunk=512),
        drafter=RecallDrafterSettings(),
        growth=ChainSettings(depth=DEPTH, governed=False),
    )


def prompts(count: int, vocabulary: int, length: int = COMMITTED) -> list[tuple[int, ...]]:
    """Random texts, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


@contextmanager
def running(target: SlotModel, drafter: Drafter | None, settings: Settings) -> Generator[Engine]:
    """An engine at work."""
    engine = Engine(target, make_tokenizer(target.vocab_size), settings, drafter, 1)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def about(run: Run) -> dict[str, Any]:
    """What every file of figures says of the machine."""
    gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None
    return {"device": str(run.device), "gpu": gpu, "torch": torch.__version__, "small": run.small}


def tests(run: Run) -> dict[str, Any]:
    """The unit tests of what a GPU runs, in four processes, with their models on the device."""
    chosen = FEW_TESTS if run.small else TESTS
    # What pyproject.toml asks of pytest, but for limits of time and other plugins, which need not be there.
    options = ["-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider", "-p", "no:benchmark", "-rf"]
    command += ["--continue-on-collection-errors", *options]  # some test has packages that need not be there
    command += ["-m", "not soak and not cluster", *chosen]
    environ = os.environ | {"OSD_TEST_DEVICE": run.device.type}
    said = run.folder / "tests.txt"  # written as it comes: what ran is there where time is over before the last one
    with said.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, env=environ, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = said.read_text(encoding="utf-8").splitlines()
    if done.returncode not in (0, 1):  # no test has been run to its end, or pytest itself failed
        raise RuntimeError(f"pytest ended with {done.returncode}: {lines[-20:]}")
    return {
        "code": done.returncode,
        "said": lines[-1],
        "failed": [line for line in lines if line.startswith("FAILED")],
    }


KINDS: dict[str, Any] = {**TRAINED_SETTINGS, "recall": RecallDrafterSettings}
"""Settings of the drafters that need nobody else's weights, by kind."""


def equality(run: Run, kind: str) -> dict[str, Any]:
    """Greedy text in float32: the device's beside the CPU's, and one kind of drafter beside plain decoding."""
    count, tokens = (1, 4) if run.small else (50, 32)
    folder = run.folder / "equality-target"
    make_target("small", torch.float32, torch.device("cpu"), sharpness=4.0).save_pretrained(folder)  # type: ignore[operator]
    vocabulary = load_config(folder).vocab_size
    make_tokenizer(vocabulary).save_pretrained(folder)
    asked = prompts(count, vocabulary, 48)
    with _engine(folder, torch.device("cpu"), None, 8) as engine:
        expected = _said(engine, asked, tokens)
    settings = KINDS[kind]
    fields = {"vocabulary": 256} if "vocabulary" in settings.model_fields else {}
    drafter = initial(settings(**fields), folder, run.folder)
    with _engine(folder, run.device, drafter, 8) as engine:
        plain = _said(engine, asked, tokens)
        drafted = _said(engine, asked, tokens, speculate=True)
    return {
        "prompts": count,
        "tokens": tokens,
        "plain_different_from_cpu": sum(a != b for a, b in zip(expected, plain, strict=True)),
        "speculative_different": sum(a != b for a, b in zip(plain, drafted, strict=True)),
    }


@contextmanager
def _engine(folder: Path, device: torch.device, drafter: Drafter | None, many: int) -> Generator[Engine]:
    """An engine in float32 on the target in a folder, as a replica would have it."""
    model = load_model(folder, "float32", device.type)
    target = SlotModel(
        model,
        slots=many,
        context=CONTEXT,
        scratch=65 + (drafter.needs.riders if drafter else 0),
        taps=serving_taps(drafter, len(decoder_layers(model))) if drafter else (),
        embeddings=many * (drafter.needs.embeddings if drafter else 0),
    )
    with running(target, drafter, settings_of(many)) as engine:
        yield engine


def _said(engine: Engine, asked: list[tuple[int, ...]], tokens: int, speculate: bool = False) -> list[list[int]]:
    requests = [Request(f"{n:04}", text, tokens, GREEDY, speculate=speculate) for n, text in enumerate(asked)]
    return [one.tokens for _, one in sorted(answers_of(engine, requests).items())]


def forward(run: Run, shape: str) -> dict[str, Any]:
    """A forward of 1, 8 and 64 tokens, and the drafter's steps: share of copy bandwidth and ratios."""
    target, drafter = _pair(run, shape, 1)
    runtime = Runtime.serving(1, DRAFT_CONTEXT, DEPTH + 1, run.device, target)
    session = autoregressive(drafter.session(runtime))
    found = on_several_cores(
        lambda: forwards.measure(target, drafter, session, 1 if run.small else 15, counts=COUNTS), 0
    )
    return asdict(found) | {"copy_bandwidth": bandwidth(run.device)}


def weights(run: Run, shape: str) -> dict[str, Any]:
    """Forwards of 1, 8 and 64 tokens with weights in 8 bits beside full ones, and how far apart what they say is."""
    full = run.target(shape, 1)
    found: dict[str, Any] = {}
    for kind in eight_bits.KINDS:
        narrow = run.over_slots(run.model(shape), 1, weights=kind)
        ratios: dict[str, Any] = {}
        for count in COUNTS:
            turns = [
                [forward_seconds(target, 1, count) for target in ((full, narrow) if turn % 2 else (narrow, full))]
                for turn in range(3 if run.small else 31)
            ]
            pairs = [pair if turn % 2 else pair[::-1] for turn, pair in enumerate(turns)][2:]  # graphs are made before
            ratios[str(count)] = asdict(Spread.of([before / after for before, after in pairs]))
        rows, wanted = packed(full, 1, COUNTS[-1]), torch.arange(COUNTS[-1])
        p, q = (target.forward(rows, wanted).logits.log_softmax(-1) for target in (full, narrow))
        found[kind] = {"times_faster": ratios, "divergence_nats": float((p.exp() * (p - q)).sum(-1).mean())}
    return found


def profile(run: Run, shape: str, sampled: bool = False) -> dict[str, Any]:
    """Where a round of one stream spends its time; the picture of some rounds is a file for a browser's tracer.

    The stream is greedy, with forced acceptance, or ``sampled`` with what acceptance an untrained drafter has.
    """
    target, drafter = _pair(run, shape, 1)
    tokens = 24 if run.small else 64
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    policy = Policy.of(ChainSettings(depth=DEPTH, governed=False), None)
    policy = policy if sampled else forced(policy, 0.8)
    sampling, name = (SamplingParams(1.0), f"sampled-{shape}") if sampled else (GREEDY, shape)
    with running(target, drafter, settings_of(1)) as engine:
        ask = partial(Request, prompt_ids=prompts(1, target.vocab_size)[0], max_tokens=tokens, sampling=sampling)
        for number in ("cold", "warm"):
            answers_of(engine, [ask(number, policy=policy, ignore_eos=True)])
        profiler, seconds, over = torch.profiler.profile(activities=activities), [], threading.Event()
        rounds: list[int] = []

        def told(update: Update) -> None:  # on the engine's thread, which alone is recorded
            seconds.append(time.perf_counter())
            if len(seconds) == 1:
                profiler.start()
            elif update.finish_reason is not None:
                profiler.stop()
                rounds.append(len(seconds) - 1)
                over.set()

        engine.submit(ask("profiled", policy=policy, ignore_eos=True), told)
        over.wait()
    profiler.export_chrome_trace(str(run.folder / f"profile-{name}.json.gz"))
    averages, count = profiler.key_averages(), rounds[0]
    sides = ("cuda", "cpu") if run.device.type == "cuda" else ("cpu",)
    tables = [
        averages.table(sort_by=f"self_{side}_time_total", row_limit=40, max_name_column_width=90) for side in sides
    ]
    (run.folder / f"profile-{name}.txt").write_text("\n".join(tables), encoding="utf-8")
    on_device = sum(one.self_device_time_total for one in averages) / 1e6
    on_host = sum(one.self_cpu_time_total for one in averages) / 1e6
    return {
        "rounds": count,
        "round_seconds": (seconds[-1] - seconds[0]) / count,
        "device_seconds": on_device / count,
        "operators_on_host_seconds": on_host / count,
        "waits": {
            one.key: one.count / count
            for one in averages
            if one.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item")
        },
    }


def decode(run: Run, shape: str, acceptance: float) -> dict[str, Any]:
    """Plain and speculative decoding of one stream with forced acceptance, and the engine's efficiency."""
    return _waves(run, shape, acceptance, 1, 1 if run.small else 7)


def streams(run: Run, shape: str) -> dict[str, Any]:
    """The same with 1, 8, 32 and 64 streams."""
    counts = STREAMS[:2] if run.small else STREAMS
    return {str(count): _waves(run, shape, 0.6, count, 1 if run.small else 2) for count in counts}


def recall(run: Run, shape: str) -> dict[str, Any]:
    """Recall from a table on the host: prompts that come for the first time, and again, beside plain decoding."""
    many, tokens = (2, 16) if run.small else (8, 128)
    target = run.target(shape, many)
    figures: dict[str, list[float]] = {"plain": [], "first time": [], "again": []}
    lengths: list[float] = []
    with running(target, Recall(), settings_of(many)) as engine:
        for turn in range(2 if run.small else 4):
            asked = prompts((turn + 1) * many, target.vocab_size)[-many:]
            for way in figures:
                requests = [
                    Request(f"{way}{n}", text, tokens, GREEDY, ignore_eos=True, speculate=way != "plain", capture=True)
                    for n, text in enumerate(asked)
                ]
                wave = decoding.wave(engine, requests)
                if turn:
                    figures[way].append(wave[0])
                    lengths += [wave[1].mean_acceptance_length] if way == "again" else []
    return {
        "streams": many,
        "tokens_per_second": {way: asdict(Spread.of(values)) for way, values in figures.items()},
        "length_again": asdict(Spread.of(lengths)),
    }


def training(run: Run, shape: str) -> dict[str, Any]:
    """Gaps between tokens with a training process on the same device and without, in turns, and what it trained."""
    target, drafter = _pair(run, shape, 8)
    traces: list[Any] = []
    engine = Engine(target, make_tokenizer(target.vocab_size), settings_of(8), drafter, 1, traces.append)
    engine.start()
    try:
        return beside_training(engine, drafter, traces, prompts(8, target.vocab_size), run.device, run.small)
    finally:
        engine.stop()


def swap(run: Run, shape: str) -> dict[str, Any]:
    """Gaps between tokens of eight streams while versions are swapped in, twenty a second, and without, in turns."""
    target, drafter = _pair(run, shape, 8)
    given = {name: weight.cpu() for name, weight in drafter.weights().items()}
    other = {name: weight * 0.99 if weight.is_floating_point() else weight for name, weight in given.items()}
    asked, tokens, turns = prompts(8, target.vocab_size), 24 if run.small else 192, 1 if run.small else 3
    gone: dict[str, list[list[float]]] = {"alone": [], "swapping": []}
    over = threading.Event()

    def versions_come() -> None:
        while not over.wait(0.05):
            number = engine.drafter_version + 1
            engine.stage(number, other if number % 2 else given)

    with running(target, drafter, settings_of(8)) as engine, ThreadPoolExecutor(1) as pool:
        gaps(engine, asked, tokens)  # warms up
        for _ in range(turns):
            gone["alone"].append(gaps(engine, asked, tokens))
            over.clear()
            coming = pool.submit(versions_come)
            gone["swapping"].append(gaps(engine, asked, tokens))
            over.set()
            coming.result()
        counted = engine.counters()
    return {
        "streams": 8,
        "swaps": counted.swaps,
        "stall_seconds": counted.swap_stall_seconds / counted.swaps,
        "longest_stall_seconds": counted.swap_stall_seconds_max,
        "median_gap_seconds": {way: [turn[len(turn) // 2] for turn in found] for way, found in gone.items()},
        "longest_gap_seconds": {way: [turn[-1] for turn in found] for way, found in gone.items()},
    }


def _pair(run: Run, shape: str, many: int) -> tuple[SlotModel, Any]:
    model = run.model(shape)
    drafter = make_drafter(model)
    return run.over_slots(model, many, tuple(drafter.needs.taps)), drafter


def _waves(run: Run, shape: str, acceptance: float, many: int, waves: int) -> dict[str, Any]:
    target, drafter = _pair(run, shape, many)
    settings = settings_of(many)
    policy = forced(Policy.of(settings.growth, None), acceptance)
    calls = decoding.Calls.of(drafter)
    tokens = 12 if run.small else 96 + 3 * many  # all decode together once the last prompt has been read
    with running(target, drafter, settings) as engine:
        asked = prompts(4 * many, target.vocab_size, 24 if run.small else COMMITTED)
        found = list(decoding.measure(engine, asked, waves, many, tokens, GREEDY, policy, calls))
    runtime = Runtime.serving(many, DRAFT_CONTEXT, DEPTH + 1, run.device, target)
    session = autoregressive(drafter.session(runtime))
    timed = on_several_cores(lambda: decoding.model(engine, session, many, found, 1 if run.small else 9), 0)
    return decoding.figures(decoding.concluded(found, timed, many))


Step = Callable[[Run], dict[str, Any]]

STEPS: dict[str, Step] = {
    "tests": tests,
    **{f"equality-{kind}": partial(equality, kind=kind) for kind in KINDS},
    "forward-1b": partial(forward, shape="1b"),
    "forward-8b": partial(forward, shape="8b"),
    "profile-1b": partial(profile, shape="1b"),
    "profile-8b": partial(profile, shape="8b"),
    "profile-sampled-1b": partial(profile, shape="1b", sampled=True),
    "profile-sampled-8b": partial(profile, shape="8b", sampled=True),
    "decode-1b-0.6": partial(decode, shape="1b", acceptance=0.6),
    "decode-1b-0.8": partial(decode, shape="1b", acceptance=0.8),
    "decode-8b-0.6": partial(decode, shape="8b", acceptance=0.6),
    "decode-8b-0.8": partial(decode, shape="8b", acceptance=0.8),
    "streams-1b": partial(streams, shape="1b"),
    "streams-8b": partial(streams, shape="8b"),
    "recall-1b": partial(recall, shape="1b"),
    "recall-8b": partial(recall, shape="8b"),
    "swap-1b": partial(swap, shape="1b"),
    "swap-8b": partial(swap, shape="8b"),
    "training-1b": partial(training, shape="1b"),
    "training-8b": partial(training, shape="8b"),
    "weights-1b": partial(weights, shape="1b"),
    "weights-8b": partial(weights, shape="8b"),
}
"""By name, in the order of the list."""
