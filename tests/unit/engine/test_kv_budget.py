"""Memory for keys and values: who gets it, who waits for it, and who gives way."""

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
from tests.device import only_on_a_cpu
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


def test_without_a_limit_every_slot_has_what_it_needs() -> None:
    budget = KVBudget(target(3), None, None)
    assert all(budget.take(slot, CONTEXT, []) for slot in range(3))
    assert budget.has_room(CONTEXT, [])
    assert budget.share([]) == pytest.approx(1.0)
    assert budget.share([1, 2]) == pytest.approx(1 / 3)


@pytest.mark.skipif(not libraries(), reason="only our kernels keep copies")
def test_copies_of_what_is_selected_count_from_the_length_on_from_which_tokens_are() -> None:
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
def test_what_is_cleared_gives_back_what_was_selected_of_it_and_nothing_of_others() -> None:
    model = target(2)
    selection = TokenSelection(SelectionSizes(10, 70, 20, 0.9), torch.ones(32), 2, model.cache)
    for pages in selection.copies:
        pages.tensor.fill_(1)
    selection.begins.fill_(5)
    model.cache.in_small_pages()
    model.cache.clear(0, 101)
    assert all(pages.tensor[:, 0].all() for pages in selection.copies), "a part of it is still chosen from"
    model.cache.clear(0, 100)
    for pages in selection.copies:
        assert not pages.tensor[:, 0, :, 40:60].any()
        assert pages.tensor[:, 1].all()
    assert selection.begins.tolist() == [[0, 5]] * 3


def test_a_sequence_grows_into_what_idle_slots_hold_the_first_of_them_first() -> None:
    model = target(3)
    budget = KVBudget(model, None, 1)  # two sequences of all their context do not fit
    for slot in range(3):
        assert budget.take(slot, 200, [])
        model.cache.length[slot] = 200
    model.cache.keys.fill_(1)
    assert budget.take(0, 700, [2, 1])
    assert model.cache.length == [200, 200, 0], "what was left of slot 2 is gone, and that is enough"
    assert not model.cache.keys[:, 2, :, 64:-64].any()
    assert budget.take(0, CONTEXT, [2, 1])
    assert model.cache.length == [200, 0, 0]


def test_there_is_no_more_than_there_is() -> None:
    model = target(3)
    budget = KVBudget(model, None, 1)
    assert budget.take(0, 500, [])
    assert budget.has_room(100, [1, 2])
    assert not budget.has_room(CONTEXT, [1, 2])
    assert not budget.take(1, CONTEXT, [2])
    assert budget.take(1, 300, [2])
    assert not budget.take(0, CONTEXT, [2]), "what runs is not taken from"


def test_whoever_gets_a_slot_with_much_in_it_keeps_what_it_needs() -> None:
    model = target(2)
    pages = Pages((2, CONTEXT + SCRATCH, 32), torch.bfloat16, torch.device("cpu"))
    pages.tensor.fill_(1)
    budget = KVBudget(model, pages, 1)
    assert budget.take(0, 700, [])
    model.cache.length[0], before = 700, budget.share([])
    budget.begin(0, 100, [])
    assert model.cache.length[0] == 100 + SCRATCH + 28  # in steps of 64
    assert budget.share([]) < before / 3
    assert not pages.tensor[0, 320:-64].any()
    assert pages.tensor[1].all()


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    wide = target(2)
    wide.cache = KVCache(64, 2, 1, CONTEXT + SCRATCH, 64, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"^engine\.kv_mb is 2, and one request of engine\.context tokens may need 18$"
    ):
        KVBudget(wide, None, 2)
    with pytest.raises(ValueError, match=r"^engine\.kv_mb is for a CPU"):
        KVBudget(target(2, "cuda"), None, 100)


class Squeezed(KVBudget):
    """Memory for three of these sequences as they begin and two as they end, and how full it was."""

    most = 0.0

    def __init__(self, target: Any, states: Pages | None, megabytes: int | None) -> None:
        super().__init__(target, states, megabytes)
        self.limit = int(2.2 * target.cache.bytes_of(384))

    def take(self, slot: int, tokens: int, idle: Sequence[int]) -> bool:
        taken = super().take(slot, tokens, idle)
        Squeezed.most = max(Squeezed.most, self.share([]))  # of all slots, with what idle ones hold
        return taken


@pytest.fixture
def squeezed(monkeypatch: pytest.MonkeyPatch) -> type[Squeezed]:
    monkeypatch.setattr("osd.engine.slots.KVBudget", Squeezed)
    monkeypatch.setattr(Squeezed, "most", 0.0)
    return Squeezed


@only_on_a_cpu("slots of a GPU have all of their memory from the start")
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_gave_way_go_on_as_if_they_had_not(
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
    assert counters.prompt_tokens == sum(map(len, LONG)), "what is read again is not asked for again"
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
            mine, theirs = (torch.from_numpy(one.hidden.numpy().copy()).view(torch.bfloat16) for one in (trace, same))  # type: ignore[union-attr]
            assert torch.allclose(mine.float(), theirs.float(), atol=2e-2, rtol=2e-2)


@contextmanager
def engine(target_dir: Path, kind: str, **more: Any) -> Iterator[Client]:
    drafter = Recall() if kind == "recall" else make_drafter(kind, target_dir)
    with running(target_dir, drafter=drafter, slots=4, context=320, **more) as client:
        yield client


def _submit(client: Client, **more: Any) -> None:
    for index, prompt in enumerate(LONG):
        client.submit(str(index), prompt, TOKENS, ignore_eos=True, **more)


def test_a_seed_gives_the_same_text_through_preemptions(target_dir: Path, request: pytest.FixtureRequest) -> None:
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
def test_a_cancelled_sequence_that_waits_again_ends(target_dir: Path) -> None:
    with engine(target_dir, "recall") as client:
        scheduler = client.engine.loop.scheduler
        _submit(client)
        while not any(s.preempted for s in list(scheduler.waiting)):
            client.next()
        waiting = next(s.request.id for s in list(scheduler.waiting) if s.preempted)
        client.engine.cancel(waiting)
        results = client.wait()
    assert results[waiting].finish in ("cancelled", "length")  # it may just have got its slot again, and ended
    assert {result.finish for name, result in results.items() if name != waiting} == {"length"}


def test_the_settings_say_how_much(target_dir: Path) -> None:
    assert EngineSettings(kv_mb=300).kv_mb == 300
    with pytest.raises(ValueError, match="kv_mb"):
        EngineSettings(kv_mb=0)
