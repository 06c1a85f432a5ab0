"""Steps of the measurement in order; each returns figures for JSON."""

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
from benchmarks.engine.synthetic import force_acceptance
from benchmarks.engines import autoregressive
from benchmarks.gpu.during_training import gaps, measure_during_training
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
class GpuRun:
    """Run of the steps: ``small`` shapes or not, the device, and the folder for files."""

    device: torch.device
    small: bool
    folder: Path

    def shape(self, shape: str) -> str:
        """Return the name of the shape to use."""
        return "small" if self.small else shape

    def target(self, shape: str, slots: int) -> SlotModel:
        """Return a target of a shape with random weights and ``slots`` KV slots."""
        return self.over_slots(self.model(shape), slots)

    def model(self, shape: str) -> nn.Module:
        """Return the random model of a shape; small ones are in float32, which is faster on a CPU."""
        return make_target(self.shape(shape), torch.float32 if self.small else torch.bfloat16, self.device)

    def over_slots(self, model: nn.Module, slots: int, taps: tuple[int, ...] = (), weights: str = "full") -> SlotModel:
        """Return the model with ``slots`` slots and padded batches, as on a GPU."""
        return SlotModel(
            model, slots=slots, context=CONTEXT, scratch=COUNTS[-1] + 1, taps=taps, weights=weights, bucketed=True
        )


GREEDY = SamplingParams(temperature=0.0)


def settings_of(streams: int) -> Settings:
    """Return settings of an engine with ``streams`` slots and ungoverned chains."""
    return Settings(
        engine=EngineSettings(slots=streams, context=CONTEXT, prefix_cache=False, prefill_chunk=512),
        drafter=RecallDrafterSettings(),
        growth=ChainSettings(depth=DEPTH, governed=False),
    )


def prompts(count: int, vocabulary: int, length: int = COMMITTED) -> list[tuple[int, ...]]:
    """Return random texts, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()) for _ in range(count)]


@contextmanager
def running(target: SlotModel, drafter: Drafter | None, settings: Settings) -> Generator[Engine]:
    """Run an engine inside the context."""
    engine = Engine(target, make_tokenizer(target.vocab_size), settings, drafter, 1)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def about(run: GpuRun) -> dict[str, Any]:
    """Return the description of the machine for each file of figures."""
    gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None
    return {"device": str(run.device), "gpu": gpu, "torch": torch.__version__, "small": run.small}


def tests(run: GpuRun) -> dict[str, Any]:
    """Run the unit tests of runtime, drafters and engine in four processes, with their models on the device."""
    chosen = FEW_TESTS if run.small else TESTS
    # The options of pyproject.toml without time limits and plugins, which may be missing.
    options = ["-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:cacheprovider", "-p", "no:benchmark", "-rf"]
    command += ["--continue-on-collection-errors", *options]  # some tests need packages that may be missing
    command += ["-m", "not soak and not cluster", *chosen]
    environ = os.environ | {"OSD_TEST_DEVICE": run.device.type}
    log = run.folder / "tests.txt"  # written continuously, so that the output remains if the time is over
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.run(command, env=environ, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(encoding="utf-8").splitlines()
    if process.returncode not in (0, 1):  # no test finished, or pytest itself failed
        raise RuntimeError(f"pytest ended with {process.returncode}: {lines[-20:]}")
    return {
        "code": process.returncode,
        "said": lines[-1],
        "failed": [line for line in lines if line.startswith("FAILED")],
    }


KINDS: dict[str, Any] = {**TRAINED_SETTINGS, "recall": RecallDrafterSettings}
"""Settings by kind of the drafters that need no external weights."""


def equality(run: GpuRun, kind: str) -> dict[str, Any]:
    """Compare greedy text in float32: the device with the CPU, and one kind of drafter with plain decoding."""
    count, tokens = (1, 4) if run.small else (50, 32)
    folder = run.folder / "equality-target"
    make_target("small", torch.float32, torch.device("cpu"), sharpness=4.0).save_pretrained(folder)  # type: ignore[operator]
    vocabulary = load_config(folder).vocab_size
    make_tokenizer(vocabulary).save_pretrained(folder)
    texts = prompts(count, vocabulary, 48)
    with _engine(folder, torch.device("cpu"), None, 8) as engine:
        expected = _answers(engine, texts, tokens)
    settings = KINDS[kind]
    fields = {"vocabulary": 256} if "vocabulary" in settings.model_fields else {}
    drafter = initial(settings(**fields), folder, run.folder)
    with _engine(folder, run.device, drafter, 8) as engine:
        plain = _answers(engine, texts, tokens)
        drafted = _answers(engine, texts, tokens, speculate=True)
    return {
        "prompts": count,
        "tokens": tokens,
        "plain_different_from_cpu": sum(a != b for a, b in zip(expected, plain, strict=True)),
        "speculative_different": sum(a != b for a, b in zip(plain, drafted, strict=True)),
    }


@contextmanager
def _engine(folder: Path, device: torch.device, drafter: Drafter | None, slots: int) -> Generator[Engine]:
    """Run an engine in float32 on the target in a folder, as a replica does."""
    model = load_model(folder, "float32", device.type)
    target = SlotModel(
        model,
        slots=slots,
        context=CONTEXT,
        scratch=65 + (drafter.needs.riders if drafter else 0),
        taps=serving_taps(drafter, len(decoder_layers(model))) if drafter else (),
        embeddings=slots * (drafter.needs.embeddings if drafter else 0),
    )
    with running(target, drafter, settings_of(slots)) as engine:
        yield engine


def _answers(engine: Engine, texts: list[tuple[int, ...]], tokens: int, speculate: bool = False) -> list[list[int]]:
    requests = [Request(f"{n:04}", text, tokens, GREEDY, speculate=speculate) for n, text in enumerate(texts)]
    return [result.tokens for _, result in sorted(answers_of(engine, requests).items())]


def forward(run: GpuRun, shape: str) -> dict[str, Any]:
    """Time forwards of 1, 8 and 64 tokens, and the drafter's steps: share of copy bandwidth, and ratios."""
    target, drafter = _pair(run, shape, 1)
    runtime = Runtime.serving(1, DRAFT_CONTEXT, DEPTH + 1, run.device, target)
    session = autoregressive(drafter.session(runtime))
    figures = on_several_cores(
        lambda: forwards.measure(target, drafter, session, 1 if run.small else 15, counts=COUNTS), 0
    )
    return asdict(figures) | {"copy_bandwidth": bandwidth(run.device)}


def weights(run: GpuRun, shape: str) -> dict[str, Any]:
    """Compare forwards of 1, 8 and 64 tokens with 8-bit and with full weights: speed and divergence."""
    full = run.target(shape, 1)
    figures: dict[str, Any] = {}
    for kind in eight_bits.KINDS:
        narrow = run.over_slots(run.model(shape), 1, weights=kind)
        ratios: dict[str, Any] = {}
        for count in COUNTS:
            turns = [
                [forward_seconds(target, 1, count) for target in ((full, narrow) if turn % 2 else (narrow, full))]
                for turn in range(3 if run.small else 31)
            ]
            pairs = [pair if turn % 2 else pair[::-1] for turn, pair in enumerate(turns)][
                2:
            ]  # the first turns record graphs
            ratios[str(count)] = asdict(Spread.of([before / after for before, after in pairs]))
        rows, selected = packed(full, 1, COUNTS[-1]), torch.arange(COUNTS[-1])
        p, q = (target.forward(rows, selected).logits.log_softmax(-1) for target in (full, narrow))
        figures[kind] = {"times_faster": ratios, "divergence_nats": float((p.exp() * (p - q)).sum(-1).mean())}
    return figures


def profile(run: GpuRun, shape: str, sampled: bool = False) -> dict[str, Any]:
    """Profile decoding steps of one stream; a trace for a browser is written to a file.

    The stream is greedy with forced acceptance, or ``sampled`` with the acceptance of an untrained drafter.
    """
    target, drafter = _pair(run, shape, 1)
    tokens = 24 if run.small else 64
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    policy = Policy.of(ChainSettings(depth=DEPTH, governed=False), None)
    policy = policy if sampled else force_acceptance(policy, 0.8)
    sampling, name = (SamplingParams(1.0), f"sampled-{shape}") if sampled else (GREEDY, shape)
    with running(target, drafter, settings_of(1)) as engine:
        request_of = partial(Request, prompt_ids=prompts(1, target.vocab_size)[0], max_tokens=tokens, sampling=sampling)
        for number in ("cold", "warm"):
            answers_of(engine, [request_of(number, policy=policy, ignore_eos=True)])
        profiler, seconds, is_over = torch.profiler.profile(activities=activities), [], threading.Event()
        step_counts: list[int] = []

        def on_update(update: Update) -> None:  # runs on the engine's thread, which the profiler records
            seconds.append(time.perf_counter())
            if len(seconds) == 1:
                profiler.start()
            elif update.finish_reason is not None:
                profiler.stop()
                step_counts.append(len(seconds) - 1)
                is_over.set()

        engine.submit(request_of("profiled", policy=policy, ignore_eos=True), on_update)
        is_over.wait()
    profiler.export_chrome_trace(str(run.folder / f"profile-{name}.json.gz"))
    averages, count = profiler.key_averages(), step_counts[0]
    sides = ("cuda", "cpu") if run.device.type == "cuda" else ("cpu",)
    tables = [
        averages.table(sort_by=f"self_{side}_time_total", row_limit=40, max_name_column_width=90) for side in sides
    ]
    (run.folder / f"profile-{name}.txt").write_text("\n".join(tables), encoding="utf-8")
    on_device = sum(operator.self_device_time_total for operator in averages) / 1e6
    on_host = sum(operator.self_cpu_time_total for operator in averages) / 1e6
    return {
        "rounds": count,
        "round_seconds": (seconds[-1] - seconds[0]) / count,
        "device_seconds": on_device / count,
        "operators_on_host_seconds": on_host / count,
        "waits": {
            operator.key: operator.count / count
            for operator in averages
            if operator.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item")
        },
    }


def decode(run: GpuRun, shape: str, acceptance: float) -> dict[str, Any]:
    """Measure plain and speculative decoding of one request at a time, and the engine's efficiency.

    Args:
        run: options of the measurement.
        shape: name of the target's size.
        acceptance: share of each draft that is accepted on average; the target's tokens do not matter.
    """
    return _waves(run, shape, acceptance, 1, 1 if run.small else 7)


def streams(run: GpuRun, shape: str) -> dict[str, Any]:
    """Measure ``decode`` with 1, 8, 32 and 64 streams at an acceptance of 0.6."""
    counts = STREAMS[:2] if run.small else STREAMS
    return {str(count): _waves(run, shape, 0.6, count, 1 if run.small else 2) for count in counts}


def recall(run: GpuRun, shape: str) -> dict[str, Any]:
    """Measure recall with its table on the host: new prompts, repeated prompts, and plain decoding."""
    slots, tokens = (2, 16) if run.small else (8, 128)
    target = run.target(shape, slots)
    figures: dict[str, list[float]] = {"plain": [], "first time": [], "again": []}
    lengths: list[float] = []
    with running(target, Recall(), settings_of(slots)) as engine:
        for turn in range(2 if run.small else 4):
            batch = prompts((turn + 1) * slots, target.vocab_size)[-slots:]
            for way in figures:
                requests = [
                    Request(f"{way}{n}", text, tokens, GREEDY, ignore_eos=True, speculate=way != "plain", capture=True)
                    for n, text in enumerate(batch)
                ]
                speed, counts = decoding.decode_wave(engine, requests)
                if turn:
                    figures[way].append(speed)
                    lengths += [counts.mean_acceptance_length] if way == "again" else []
    return {
        "streams": slots,
        "tokens_per_second": {way: asdict(Spread.of(values)) for way, values in figures.items()},
        "length_again": asdict(Spread.of(lengths)),
    }


def training(run: GpuRun, shape: str) -> dict[str, Any]:
    """Measure gaps between tokens of eight streams with and without training on the same device, in turns.

    Args:
        run: options of the measurement.
        shape: name of the target's size.

    Returns:
        The figures of ``measure_during_training``.
    """
    target, drafter = _pair(run, shape, 8)
    traces: list[Any] = []
    engine = Engine(target, make_tokenizer(target.vocab_size), settings_of(8), drafter, 1, traces.append)
    engine.start()
    try:
        return measure_during_training(engine, drafter, traces, prompts(8, target.vocab_size), run.device, run.small)
    finally:
        engine.stop()


def swap(run: GpuRun, shape: str) -> dict[str, Any]:
    """Measure gaps between tokens of eight streams with and without twenty version swaps per second, in turns."""
    target, drafter = _pair(run, shape, 8)
    weights = {name: weight.cpu() for name, weight in drafter.weights().items()}
    changed = {name: weight * 0.99 if weight.is_floating_point() else weight for name, weight in weights.items()}
    batch, tokens, turns = prompts(8, target.vocab_size), 24 if run.small else 192, 1 if run.small else 3
    gap_lists: dict[str, list[list[float]]] = {"alone": [], "swapping": []}
    is_over = threading.Event()

    def stage_versions() -> None:
        while not is_over.wait(0.05):
            number = engine.drafter_version + 1
            engine.stage(number, changed if number % 2 else weights)

    with running(target, drafter, settings_of(8)) as engine, ThreadPoolExecutor(1) as pool:
        gaps(engine, batch, tokens)  # warm-up
        for _ in range(turns):
            gap_lists["alone"].append(gaps(engine, batch, tokens))
            is_over.clear()
            staging = pool.submit(stage_versions)
            gap_lists["swapping"].append(gaps(engine, batch, tokens))
            is_over.set()
            staging.result()
        counters = engine.counters()
    return {
        "streams": 8,
        "swaps": counters.swaps,
        "stall_seconds": counters.swap_stall_seconds / counters.swaps,
        "longest_stall_seconds": counters.swap_stall_seconds_max,
        "median_gap_seconds": {way: [turn[len(turn) // 2] for turn in of_way] for way, of_way in gap_lists.items()},
        "longest_gap_seconds": {way: [turn[-1] for turn in of_way] for way, of_way in gap_lists.items()},
    }


def _pair(run: GpuRun, shape: str, slots: int) -> tuple[SlotModel, Any]:
    model = run.model(shape)
    drafter = make_drafter(model)
    return run.over_slots(model, slots, tuple(drafter.needs.taps)), drafter


def _waves(run: GpuRun, shape: str, acceptance: float, slots: int, waves: int) -> dict[str, Any]:
    target, drafter = _pair(run, shape, slots)
    settings = settings_of(slots)
    policy = force_acceptance(Policy.of(settings.growth, None), acceptance)
    calls = decoding.DrafterCalls.of(drafter)
    tokens = 12 if run.small else 96 + 3 * slots  # enough to decode together after the last prompt is read
    with running(target, drafter, settings) as engine:
        batch = prompts(4 * slots, target.vocab_size, 24 if run.small else COMMITTED)
        finished = list(decoding.measure(engine, batch, waves, slots, tokens, GREEDY, policy, calls))
    runtime = Runtime.serving(slots, DRAFT_CONTEXT, DEPTH + 1, run.device, target)
    session = autoregressive(drafter.session(runtime))
    model = on_several_cores(lambda: decoding.time_forwards(engine, session, slots, finished, 1 if run.small else 9), 0)
    return decoding.figures(decoding.summarize(finished, model, slots))


StepFunction = Callable[[GpuRun], dict[str, Any]]

STEPS: dict[str, StepFunction] = {
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
"""Steps by name, in order."""
