"""An engine on a tiny target, and a client that collects what it sends."""

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
from osd.drafting import Drafter, initial, taps_beside
from osd.engine.counters import EngineCounters
from osd.engine.engine import Engine
from osd.engine.request import Request, SamplingParams, TokenLogprobs, Update
from osd.engine.tracing import StatesWanted, all_states
from osd.metrics import SpeculationCounts
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.device import DEVICE
from tests.tiny import tokenizer
from tests.waiting import HANG_SECONDS

GREEDY = SamplingParams(temperature=0.0)
LENGTHS = (1, 5, 40, 16, 3)
"""Tokens of the prompts whose ``goals`` are known."""


@dataclass
class Result:
    """What a client saw of one request."""

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


class Client:
    """Submits requests and waits for them; counts no request twice."""

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
        """Submit a request; ``acts`` are done on the engine's thread after so many of its updates."""
        self.results[name] = Result()
        acts, numbers = acts or {}, count(1)

        def update(update: Update) -> None:
            acts.get(next(numbers), lambda: None)()
            self._updates.put(update)

        self.engine.submit(Request(name, tuple(prompt), max_tokens, sampling, **more), update)

    def next(self) -> Update:
        update = self._updates.get(timeout=HANG_SECONDS)
        result = self.results[update.request_id]
        assert result.finish is None, "an update came after the last one"
        result.tokens += update.token_ids
        result.text += update.text
        result.updates += 1
        result.cached = update.cached_tokens
        result.logprobs += update.logprobs
        result.sources += update.sources
        result.finish, result.counts, result.error = update.finish_reason, update.counts, update.error
        result.last = update
        return update

    def ask(self, asked: Sequence[Sequence[int]], max_tokens: int, name: str = "{}", **more: Any) -> list[Result]:
        """Ask all at once, and wait for every answer; ``name`` makes the name of each of its number."""
        for index, prompt in enumerate(asked):
            self.submit(name.format(index), prompt, max_tokens, **{"ignore_eos": True, **more})
        results = self.wait()
        self.settled()
        return [results[name.format(index)] for index in range(len(asked))]

    def ask_greedily(self, goals: list[list[int]], max_tokens: int = 16, name: str = "{}", **more: Any) -> list[Result]:
        """Ask what ``goals`` are the answers to, see ``conftest``, and check that they are given."""
        results = self.ask(prompts(LENGTHS), max_tokens, name, **more)
        assert tokens_of(results) == [goal[:max_tokens] for goal in goals]
        return results

    def wait(self) -> dict[str, Result]:
        while any(result.finish is None for result in self.results.values()):
            self.next()
        return self.results

    def until(self, name: str, updates: int) -> None:
        """Wait until a request has had so many updates."""
        while self.results[name].updates < updates:
            self.next()

    def settled(self) -> EngineCounters:
        """Wait until the engine rests; by then it has counted everything and handed on all traces."""
        while not self.engine.rests:
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
    # Of any drafter that a test brings along, which these settings do not name.
    return made.model_copy(update={"growth": growth or ChainSettings(depth=depth, governed=governed)})


def tokens_of(results: Sequence[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


def shaken(weights: dict[str, Tensor], noise: float = 1.0, seed: int = 5) -> dict[str, Tensor]:
    """Weights of a version, with noise."""
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


@contextmanager
def running(
    directory: Path,
    kind: str = "none",
    *,
    drafter: Drafter | None = None,
    traces: list[Trace] | None = None,
    states: StatesWanted = all_states,
    taps: tuple[int, ...] = (),
    bucketed: bool = False,
    int8: bool = True,
    riders: int = 0,
    embeddings: int = 0,
    **more: Any,
) -> Iterator[Client]:
    """``bucketed`` runs what a GPU would, without recording; ``riders`` and ``embeddings`` more of a sequence fit.

    Without ``int8`` the drafter's weights keep their precision.
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
        taps=(taps_beside(drafter, len(decoder_layers(model))) if drafter else ()) or taps,
        bucketed=bucketed or None,  # a GPU's always are
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
    """transformers' own greedy decoding."""

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

    def all(self, asked: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        return [self.greedy(prompt, max_tokens) for prompt in asked]
