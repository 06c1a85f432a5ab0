"""Memory budget for keys and values, and preemption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osd.capture.trace import Trace
from osd.config import EngineSettings
from osd.drafting.recall.drafter import Recall
from osd.engine.kv_budget import KVBudget
from osd.engine.request import SamplingParams
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.kv_cache import KVCache
from osd.runtime.memory import PAGE, Pages
from osd.runtime.native import libraries
from tests.device import skip_unless_cpu
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running

KINDS = ["none", "eagle", "language_model", "recall"]
CONTEXT, SCRATCH = 1024, 64
LONG, TOKENS = prompts([60] * 4, seed=3), 220


@pytest.fixture(scope="module")
def goals(target_dir: Path) -> list[list[int]]:
    return [Oracle(target_dir).greedy(prompt, TOKENS) for prompt in LONG]


def target(slots: int, device: str = "cpu") -> Any:
    cache = KVCache(3, slots, 1, CONTEXT + SCRATCH, 64, torch.bfloat16, torch.device("cpu"))
    return SimpleNamespace(cache=cache, context=CONTEXT, device=torch.device(device))


def megabytes(model: Any, places: int) -> int:
    return -(-model.cache.bytes_of(places) >> 20)


def test_budget_without_a_limit_fits_all_slots() -> None:
    budget = KVBudget(target(3), None, None)
    assert all(budget.take(slot, CONTEXT, []) for slot in range(3))
    assert budget.has_room(CONTEXT, [])
    assert budget.share([]) == pytest.approx(1.0)
    assert budget.share([1, 2]) == pytest.approx(1 / 3)


@pytest.mark.skipif(not libraries(), reason="only our kernels keep copies")
def test_budget_includes_selected_token_copies() -> None:
    model = target(2)
    before = [model.cache.bytes_of(places) for places in (100, 101, CONTEXT)]
    selection = TokenSelection(SelectionSizes(10, 70, 20, 0.9), torch.ones(32), 2, model.cache)
    page, layers = PAGE, 3
    more = 2 * layers * (80 * 64 * 2 // page + (80 * 64 * 2 % page > 0) + 1) * page
    after = [model.cache.bytes_of(places) for places in (100, 101, CONTEXT)]
    assert after == [before[0], before[1] + more, before[2] + more]
    budget = KVBudget(model, None, -(-after[2] >> 20))
    assert budget.take(0, CONTEXT, [])
    assert not budget.take(1, CONTEXT, [])
    del selection
    assert model.cache.bytes_of(CONTEXT) == before[2]


@pytest.mark.skipif(not libraries(), reason="only our kernels keep copies")
def test_clear_frees_the_copies_of_one_slot() -> None:
    model = target(2)
    selection = TokenSelection(SelectionSizes(10, 70, 20, 0.9), torch.ones(32), 2, model.cache)
    for pages in selection.copies:
        pages.tensor.fill_(1)
    selection.begins.fill_(5)
    model.cache.in_small_pages()
    model.cache.clear(0, 101)
    assert all(pages.tensor[:, 0].all() for pages in selection.copies), "selected tokens may still be in the rest"
    model.cache.clear(0, 100)
    for pages in selection.copies:
        assert not pages.tensor[:, 0, :, 40:60].any()
        assert pages.tensor[:, 1].all()
    assert selection.begins.tolist() == [[0, 5]] * 3


def test_growth_clears_idle_slots_in_order() -> None:
    model = target(3)
    budget = KVBudget(model, None, 1)  # too small for two sequences of full context
    for slot in range(3):
        assert budget.take(slot, 200, [])
        model.cache.length[slot] = 200
    model.cache.keys.fill_(1)
    assert budget.take(0, 700, [2, 1])
    assert model.cache.length == [200, 200, 0], "clearing slot 2 is enough"
    assert not model.cache.keys[:, 2, :, 64:-64].any()
    assert budget.take(0, CONTEXT, [2, 1])
    assert model.cache.length == [200, 0, 0]


def test_budget_refuses_more_than_its_limit() -> None:
    model = target(3)
    budget = KVBudget(model, None, 1)
    assert budget.take(0, 500, [])
    assert budget.has_room(100, [1, 2])
    assert not budget.has_room(CONTEXT, [1, 2])
    assert not budget.take(1, CONTEXT, [2])
    assert budget.take(1, 300, [2])
    assert not budget.take(0, CONTEXT, [2]), "running sequences keep their memory"


def test_begin_frees_unneeded_places_of_a_slot() -> None:
    model = target(2)
    pages = Pages((2, CONTEXT + SCRATCH, 32), torch.bfloat16, torch.device("cpu"))
    pages.tensor.fill_(1)
    budget = KVBudget(model, pages, 1)
    assert budget.take(0, 700, [])
    model.cache.length[0], before = 700, budget.share([])
    budget.begin(0, 100, [])
    assert model.cache.length[0] == 100 + SCRATCH + 28  # rounded up to a multiple of 64
    assert budget.share([]) < before / 3
    assert not pages.tensor[0, 320:-64].any()
    assert pages.tensor[1].all()


def test_impossible_budget_is_refused() -> None:
    wide = target(2)
    wide.cache = KVCache(64, 2, 1, CONTEXT + SCRATCH, 64, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^engine\.kv_mb is 2: raise it, .* engine\.context tokens needs up to 18$"):
        KVBudget(wide, None, 2)
    with pytest.raises(ValueError, match=r"^engine\.kv_mb needs a CPU"):
        KVBudget(target(2, "cuda"), None, 100)


class SmallBudget(KVBudget):
    """Budget for three of these sequences at their begin and two at their end; records its largest use."""

    most = 0.0

    def __init__(self, target: Any, states: Pages | None, megabytes: int | None) -> None:
        super().__init__(target, states, megabytes)
        self.limit = int(2.2 * target.cache.bytes_of(384))

    def take(self, slot: int, tokens: int, idle: Sequence[int]) -> bool:
        taken = super().take(slot, tokens, idle)
        SmallBudget.most = max(SmallBudget.most, self.share([]))  # of all slots, including idle ones
        return taken


@pytest.fixture
def squeezed(monkeypatch: pytest.MonkeyPatch) -> type[SmallBudget]:
    monkeypatch.setattr("osd.engine.slots.KVBudget", SmallBudget)
    monkeypatch.setattr(SmallBudget, "most", 0.0)
    return SmallBudget


@skip_unless_cpu("slots of a GPU have all of their memory from the start")
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_continue_with_the_same_output(
    target_dir: Path, goals: list[list[int]], kind: str, prefix_cache: bool, request: pytest.FixtureRequest
) -> None:
    traces: list[Trace] = []
    undisturbed: list[Trace] = []
    with engine(target_dir, kind, traces=undisturbed) as client:
        _submit(client, capture=True)
        client.wait()
    squeezed = request.getfixturevalue("squeezed")
    with engine(target_dir, kind, traces=traces, prefix_cache=prefix_cache) as client:
        _submit(client, capture=True)
        results = client.wait()
        counters, load = client.settled(), client.engine.load()
    assert counters.preemptions > 0
    assert squeezed.most <= 1.0
    assert load.memory == 0.0
    assert (counters.failed, counters.requests) == (0, len(LONG))
    assert counters.prompt_tokens == sum(map(len, LONG)), "repeated reading does not count as prompt tokens"
    for index, goal in enumerate(goals):
        assert results[str(index)].tokens == goal
        assert results[str(index)].cached == 0
    assert {trace.request_id for trace in traces} == {trace.request_id for trace in undisturbed}
    before = {trace.request_id: trace for trace in undisturbed}
    for trace in traces:
        same = before[trace.request_id]
        assert (trace.completion_ids.numpy() == same.completion_ids.numpy()).all()
        assert (trace.hidden is None) == (same.hidden is None) == (kind != "eagle")
        if trace.hidden is not None and same.hidden is not None:
            states, expected = (
                torch.from_numpy(record.hidden.numpy().copy()).view(torch.bfloat16) for record in (trace, same)
            )  # type: ignore[union-attr]
            assert torch.allclose(states.float(), expected.float(), atol=2e-2, rtol=2e-2)


@contextmanager
def engine(target_dir: Path, kind: str, **more: Any) -> Iterator[Client]:
    drafter = Recall() if kind == "recall" else make_drafter(kind, target_dir)
    with running(target_dir, drafter=drafter, slots=4, context=320, **more) as client:
        yield client


def _submit(client: Client, **more: Any) -> None:
    for index, prompt in enumerate(LONG):
        client.submit(str(index), prompt, TOKENS, ignore_eos=True, **more)


def test_seeded_text_is_the_same_after_preemption(target_dir: Path, request: pytest.FixtureRequest) -> None:
    drawn = SamplingParams(temperature=1.0, seed=11, repeatable=True)
    texts = []
    for squeeze in (False, True):
        if squeeze:
            request.getfixturevalue("squeezed")
        with engine(target_dir, "recall") as client:
            _submit(client, sampling=drawn)
            client.wait()
            preempted = client.engine.counters().preemptions
            texts.append({name: result.tokens for name, result in client.results.items()})
        assert bool(preempted) == squeeze
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("squeezed")
def test_preempted_sequence_can_be_cancelled(target_dir: Path) -> None:
    with engine(target_dir, "recall") as client:
        scheduler = client.engine.loop.scheduler
        _submit(client)
        while not any(s.preempted for s in list(scheduler.waiting)):
            client.next()
        waiting = next(s.request.id for s in list(scheduler.waiting) if s.preempted)
        client.engine.cancel(waiting)
        results = client.wait()
    assert results[waiting].finish in ("cancelled", "length")  # it may have ended before the cancellation
    assert {result.finish for name, result in results.items() if name != waiting} == {"length"}


def test_kv_mb_setting_must_be_positive(target_dir: Path) -> None:
    assert EngineSettings(kv_mb=300).kv_mb == 300
    with pytest.raises(ValueError, match="kv_mb"):
        EngineSettings(kv_mb=0)
