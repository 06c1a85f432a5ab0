"""Engine on a tiny target, and a client that collects its updates."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from osd.capture.trace import Trace
from osd.config import (
    CaptureSettings,
    ChainSettings,
    EagleSettings,
    EconomySettings,
    EngineSettings,
    GrowthSettings,
    KangarooSettings,
    LanguageModelSettings,
    MedusaSettings,
    PromptTokensSettings,
    RecallDrafterSettings,
    RecallSettings,
    Settings,
    TargetSettings,
    TrainerSettings,
)
from osd.drafting import Drafter, initial, serving_taps
from osd.engine.counters import EngineCounters
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, TokenLogprobs, Update
from osd.engine.tracing import StatesWeight, keep_all_states
from osd.metrics import SpeculationCounts
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.device import DEVICE
from tests.tiny import tokenizer
from tests.waiting import HANG_SECONDS

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 5, 40, 16, 3)
"""Lengths in tokens of the prompts with known ``goals``."""


@dataclass
class Result:
    """Updates of one request, as its client saw them."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None
    counts: SpeculationCounts | None = None
    updates: int = 0
    cached: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    last: Update | None = None

    def add(self, update: Update) -> None:
        assert self.finish is None, "an update came after the last one"
        self.tokens += update.token_ids
        self.text += update.text
        self.updates += 1
        self.cached = update.cached_tokens
        self.logprobs += update.logprobs
        self.sources += update.sources
        self.finish, self.counts, self.error = update.finish_reason, update.counts, update.error
        self.last = update


class Client:
    """Client that submits requests and waits for their updates."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.results = engine, {}  # type: ignore[var-annotated]
        self._updates: queue.Queue[Update] = queue.Queue()

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        acts: Mapping[int, Callable[[], None]] | None = None,
        **more: Any,
    ) -> None:
        """Submit a request; call ``acts`` on the engine's thread, by number of the request's update."""
        self.results[name] = Result()
        acts, numbers = acts or {}, count(1)

        def update(update: Update) -> None:
            acts.get(next(numbers), lambda: None)()
            self._updates.put(update)

        self.engine.submit(Request(name, tuple(prompt), max_tokens, sampling, **more), update)

    def next(self) -> Update:
        update = self._updates.get(timeout=HANG_SECONDS)
        self.results[update.request_id].add(update)
        return update

    def ask(self, texts: Sequence[Sequence[int]], max_tokens: int, name: str = "{}", **more: Any) -> list[Result]:
        """Submit all texts at once and wait for the answers; ``name`` is a format for request names by number."""
        for index, prompt in enumerate(texts):
            self.submit(name.format(index), prompt, max_tokens, **{"ignore_eos": True, **more})
        results = self.wait()
        self.settled()
        return [results[name.format(index)] for index in range(len(texts))]

    def ask_greedily(self, goals: list[list[int]], max_tokens: int = 16, name: str = "{}", **more: Any) -> list[Result]:
        """Submit the prompts of ``goals`` (see ``conftest``) and check the answers."""
        results = self.ask(prompts(LENGTHS), max_tokens, name, **more)
        assert tokens_of(results) == [goal[:max_tokens] for goal in goals]
        return results

    def wait(self) -> dict[str, Result]:
        while any(result.finish is None for result in self.results.values()):
            self.next()
        return self.results

    def until(self, name: str, updates: int) -> None:
        """Wait until a request has had ``updates`` updates."""
        while self.results[name].updates < updates:
            self.next()

    def settled(self) -> EngineCounters:
        """Wait until the engine is idle, with all counts and traces complete, and return its counters."""
        while not self.engine.is_idle:
            time.sleep(0.002)
        return self.engine.counters()

    def swapped_to(self, version: int, domain: str = "general") -> None:
        """Wait until a version serves a domain."""
        while self.engine.drafters(domain).drafter_version != version:
            time.sleep(0.002)


def settings(
    directory: Path,
    *,
    slots: int = 4,
    depth: int = 3,
    context: int = 128,
    chunk: int = 16,
    prefix_cache: bool = True,
    governed: bool = False,
    samples: Literal["teacher", "student"] = "teacher",
    growth: GrowthSettings | None = None,
    shared: bool = True,
    measure: float = 0.0,
    **capture: Any,
) -> Settings:
    made = Settings(
        target=TargetSettings(source=str(directory), dtype="float32"),
        engine=EngineSettings(slots=slots, context=context, prefill_chunk=chunk, threads=1, prefix_cache=prefix_cache),
        drafter=RecallDrafterSettings(recall=RecallSettings(megabytes=1, shared=shared)),
        capture=CaptureSettings(**capture),
        economy=EconomySettings(measure=measure),
        trainer=TrainerSettings(samples=samples),
    )
    # The growth applies to the drafter that a test passes, which may differ from the configured one.
    return made.model_copy(update={"growth": growth or ChainSettings(depth=depth, governed=governed)})


def tokens_of(results: Sequence[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


def with_noise(weights: dict[str, Tensor], noise: float = 1.0, seed: int = 5) -> dict[str, Tensor]:
    """Return the weights of a version with added noise."""
    torch.manual_seed(seed)
    return {k: v + noise * torch.randn_like(v) if v.is_floating_point() else v for k, v in weights.items()}


def make_drafter(kind: str, directory: Path) -> Any:
    if kind == "none":
        return None
    torch.manual_seed(4)  # part of EAGLE's first weights is random
    settings = {
        "eagle": EagleSettings(vocabulary=200),
        "kangaroo": KangarooSettings(vocabulary=200, exit_layer=1),
        "language_model": LanguageModelSettings(layers=2),
        "medusa": MedusaSettings(vocabulary=200),
        "prompt_tokens": PromptTokensSettings(),
    }
    return initial(settings[kind], directory, directory)


def weights_of(kind: str, directory: Path, noise: float = 0.0) -> dict[str, Tensor]:
    """Return the weights of another version of a drafter."""
    return with_noise(make_drafter(kind, directory).weights(), noise)


@contextmanager
def running(
    directory: Path,
    kind: str = "none",
    *,
    drafter: Drafter | None = None,
    traces: list[Trace] | None = None,
    states: StatesWeight = keep_all_states,
    taps: tuple[int, ...] = (),
    bucketed: bool = False,
    int8: bool = True,
    riders: int = 0,
    embeddings: int = 0,
    **more: Any,
) -> Iterator[Client]:
    """Run an engine on the target in ``directory``.

    Args:
        directory: of the target.
        kind: of the drafter, if ``drafter`` is None.
        drafter: in use; overrides ``kind``.
        traces: list for captured traces; None for no sink.
        states: weight of the hidden states of a trace.
        taps: layers to tap if the drafter needs none.
        bucketed: whether to pad forwards as on a GPU, without recording graphs.
        int8: whether the drafter's weights may be quantised.
        riders: room for further riders of each sequence.
        embeddings: room for embeddings of each sequence.
        more: see ``settings``.
    """
    chosen, drafter = settings(directory, **more), drafter or make_drafter(kind, directory)
    if drafter is not None and (bucketed or not int8):
        make, forced = drafter.session, {"bucketed": True} if bucketed else {"int8": False}
        drafter.session = lambda runtime: make(replace(runtime, **forced))  # type: ignore[method-assign]
    model = load_model(directory, "float32", DEVICE.type)
    target = SlotModel(
        model,
        slots=chosen.engine.slots,
        context=chosen.engine.context,
        scratch=chosen.engine.max_draft + 1 + (drafter.needs.riders if drafter else 0) + riders,
        taps=(serving_taps(drafter, len(decoder_layers(model))) if drafter else ()) or taps,
        bucketed=bucketed or None,  # always on a GPU
        embeddings=chosen.engine.slots * max(drafter.needs.embeddings if drafter else 0, embeddings),
    )
    engine = Engine(target, tokenizer(), chosen, drafter, 1, None if traces is None else traces.append, states)
    engine.start()
    try:
        yield Client(engine)
    finally:
        engine.stop()


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


class Oracle:
    """Greedy decoding by transformers."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory)

    def greedy(self, prompt: list[int], max_tokens: int, ignore_eos: bool = True) -> list[int]:
        eos = {"eos_token_id": None} if ignore_eos else {}
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=258,
            **eos,
        )
        return out[0, len(prompt) :].tolist()

    def all(self, texts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        return [self.greedy(prompt, max_tokens) for prompt in texts]
