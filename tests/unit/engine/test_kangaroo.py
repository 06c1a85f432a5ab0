"""The target's own first layers draft, and verification goes on from them: the same text, nothing computed twice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.capture.trace import Trace, decode, encode
from osd.config import (
    AcceptanceHeadSettings,
    BestFirstSettings,
    ChainSettings,
    ConfidenceSettings,
    DynamicTreeSettings,
    GrowthSettings,
    KangarooSettings,
    StaticTreeSettings,
    TopKTreeSettings,
)
from osd.drafters import DrafterError, Trainable, initial
from osd.drafters.acceptance_head import suited
from osd.drafters.mixed.drafter import Mixed
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.registry.pointer import Rollout
from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.model import SlotModel
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running

LENGTHS = (1, 5, 40, 16, 3)
LAYERS = 4
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


def kangaroo(directory: Path, exit_layer: int = 1) -> Trainable:
    """As near to the target as its untrained adapter is, and a little off."""
    torch.manual_seed(4)
    drafter = initial(KangarooSettings(vocabulary=200, exit_layer=exit_layer), directory, directory)
    assert isinstance(drafter, Trainable)
    with torch.no_grad():
        for parameter in (one for one in drafter.parameters() if one.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return drafter


Goals = list[list[int]]


@pytest.fixture(scope="module")
def goals(oracle: Oracle) -> Goals:
    """What transformers answers greedily."""
    return [oracle.greedy(prompt, 16) for prompt in prompts(LENGTHS)]


def ask(client: Client, goals: Goals, names: str = "{}", **more: Any) -> None:
    """Ask for greedy answers, and check that they are those of transformers."""
    for index, prompt in enumerate(prompts(LENGTHS)):
        client.submit(names.format(index), prompt, 16, ignore_eos=True, **more)
    results = client.wait()
    assert [results[names.format(index)].tokens for index in range(len(LENGTHS))] == goals


GROWTHS: dict[str, GrowthSettings] = {
    "chain": ChainSettings(depth=3, governed=False),
    "confidence": ConfidenceSettings(depth=4, eta=0.05, governed=False),
    "best_first": BestFirstSettings(budget=8, governed=False),
    "governed": BestFirstSettings(budget=8),
    "top_k_tree": TopKTreeSettings(budget=8, depth=3, governed=False),
    "static_tree": StaticTreeSettings(budget=6, depth=2, draw="iid", governed=False),
    "dynamic_tree": DynamicTreeSettings(budget=6, governed=False),
    "acceptance_head": AcceptanceHeadSettings(depth=3, h=0.9, governed=False),
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucketed": {"bucketed": True},
    "few slots": {"prefix_cache": False, "slots": 2},
}
WAYS = [*((growth, "plain") for growth in GROWTHS), ("chain", "few slots"), ("top_k_tree", "bucketed")]


@pytest.mark.parametrize(("growth", "how"), WAYS)
def test_greedy_output_is_that_of_transformers(target_dir: Path, goals: Goals, growth: str, how: str) -> None:
    drafter = suited(kangaroo(target_dir), GROWTHS[growth])
    with running(target_dir, drafter=drafter, growth=GROWTHS[growth], **HOW[how]) as client:
        ask(client, goals)
        counters = client.engine.counters()
    assert counters.failed == 0
    counts = counters.speculation()
    assert counts.by_source.keys() <= {"kangaroo"}
    if growth != "governed":
        assert counts.drafted > counts.accepted > 0


@contextmanager
def counting(client: Client) -> Iterator[Counter[tuple[int, int, int]]]:
    """How often each layer of the target ran for each token, by its slot and place, since a round began.

    Checks at the end of each round that no layer ran twice for one.
    """
    runs: Counter[tuple[int, int, int]] = Counter()
    total: Counter[tuple[int, int, int]] = Counter()
    loop, target = client.engine.loop, client.engine.target
    forward, round_ = target.forward, loop._round

    def counted(rows: PackedRows, wanted: Any, layers: range | None = None, states: Any = None) -> Forward:
        every = range(LAYERS) if layers is None else layers
        places = list(zip(rows.slots.tolist(), rows.stores.tolist(), strict=True))
        runs.update((layer, *place) for layer in every for place in places)
        return forward(rows, wanted, layers, states)

    def checked() -> None:
        runs.clear()
        round_()
        total.update(runs)
        twice.extend(runs - Counter(set(runs)))

    twice: list[tuple[int, int, int]] = []
    target.forward, loop._round = counted, checked  # type: ignore[method-assign]
    yield total
    assert not twice, "layers ran twice"


@pytest.mark.parametrize("growth", ["confidence", "dynamic_tree"])
def test_no_layer_runs_twice_for_a_row_beside_prompts_and_other_drafters(
    target_dir: Path, goals: Goals, growth: str
) -> None:
    """Every layer runs for the same rows, once: the drafts of a round are part of its verification."""
    with running(target_dir, drafter=kangaroo(target_dir), growth=GROWTHS[growth], chunk=4) as client:
        assert client.engine.pool is not None
        other = initial(KangarooSettings(vocabulary=100, exit_layer=1), target_dir, target_dir)
        client.engine.pool.open("other", 1, other.weights(), other)
        with counting(client) as total:
            for index, prompt in enumerate(prompts(LENGTHS)):
                domain, speculate = ("other", True) if index == 1 else ("general", index != 3)
                client.submit(str(index), prompt, 12, ignore_eos=True, domain=domain, speculate=speculate)
            results = client.wait()
        drafted = client.engine.counters().speculation().drafted
    assert [results[str(index)].tokens for index in range(len(LENGTHS))] == [goal[:12] for goal in goals]
    rows = [sum(count for (layer, _, _), count in total.items() if layer == at) for at in range(LAYERS)]
    assert drafted > 20
    assert len(set(rows)) == 1, rows


def test_layers_that_ran_for_a_draft_would_be_seen_to_run_again(
    target_dir: Path, goals: Goals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osd.engine.round.begun_rows", lambda *args: [])
    with (
        running(target_dir, drafter=kangaroo(target_dir)) as client,
        pytest.raises(AssertionError, match="twice"),
        counting(client),
    ):
        ask(client, goals)


def test_drafters_that_leave_behind_different_layers_share_a_round(target_dir: Path, goals: Goals) -> None:
    drafters = {f"from {layer}": kangaroo(target_dir, layer) for layer in (1, 2, 3)}
    with running_tapped(target_dir, (0, 1, 2), drafters["from 2"]) as client:
        assert client.engine.pool is not None
        for name, drafter in drafters.items():
            client.engine.pool.open(name, 1, drafter.weights(), drafter)
        for name in drafters:
            for index, prompt in enumerate(prompts(LENGTHS)):
                client.submit(f"{name} {index}", prompt, 12, ignore_eos=True, domain=name)
        results = client.wait()
        drafted = {domain for domain, _ in client.engine.counters().by_version}
    assert drafted == set(drafters)
    for name in drafters:
        assert [results[f"{name} {index}"].tokens for index in range(len(LENGTHS))] == [goal[:12] for goal in goals]


@contextmanager
def running_tapped(directory: Path, taps: tuple[int, ...], drafter: Trainable, **more: Any) -> Iterator[Client]:
    """An engine whose target gives more states than its drafter reads."""
    with pytest.MonkeyPatch.context() as patch:
        made = SlotModel.__init__

        def tapped(self: SlotModel, model: Any, **how: Any) -> None:
            made(self, model, **{**how, "taps": taps})

        patch.setattr(SlotModel, "__init__", tapped)
        with running(directory, drafter=drafter, slots=15, **more) as client:
            yield client


@pytest.mark.parametrize("rule", ["chain", "siblings", "naive"])
def test_a_seed_gives_the_same_text_whatever_rule_is_configured(target_dir: Path, rule: str) -> None:
    prompt, sampling = prompts([21], seed=6)[0], SamplingParams(temperature=1.0, seed=77, repeatable=True)
    policy = Policy.of(ChainSettings(depth=3), rule)
    with running(target_dir, drafter=kangaroo(target_dir)) as client:
        client.submit("drafted", prompt, 30, sampling, ignore_eos=True, policy=policy)
        client.submit("plain", prompt, 30, sampling, ignore_eos=True, speculate=False)
        client.submit("drawn", prompt, 30, DRAWN, ignore_eos=True, policy=policy)
        results = client.wait()
        assert client.engine.counters().failed == 0
    assert results["drafted"].tokens == results["plain"].tokens
    assert results["drawn"].counts is not None
    assert results["drawn"].counts.drafted > 0


MIXED: dict[str, GrowthSettings] = {
    "best_first": BestFirstSettings(budget=8, governed=False),
    "governed": BestFirstSettings(budget=8),
    "chain": ChainSettings(depth=4, governed=False),
}


@pytest.mark.parametrize(("growth", "bucketed"), [("best_first", False), ("governed", False), ("chain", True)])
def test_beside_recall_its_rows_are_found_wherever_they_stand_in_the_tree(
    target_dir: Path, goals: Goals, growth: str, bucketed: bool
) -> None:
    drafter = Mixed(kangaroo(target_dir))
    with running(target_dir, drafter=drafter, growth=MIXED[growth], bucketed=bucketed) as client:
        for name in ("first {}", "again {}"):
            ask(client, goals, name, capture=True)
        counts = client.engine.counters().speculation()
    if growth != "governed":
        assert counts.by_source["kangaroo"].drafted > 0
        assert counts.by_source["recall"].accepted > 0


def test_prompts_that_begin_alike_are_read_once_for_it_too(target_dir: Path, oracle: Oracle) -> None:
    prompt = prompts([40], seed=8)[0]
    with running(target_dir, drafter=kangaroo(target_dir)) as client:
        client.submit("first", prompt, 12, ignore_eos=True)
        first = client.wait()["first"]
        client.submit("again", [*prompt, *first.tokens, 7], 12, ignore_eos=True)
        again = client.wait()["again"]
    assert first.tokens == oracle.greedy(prompt, 12)
    assert again.tokens == oracle.greedy([*prompt, *first.tokens, 7], 12)
    assert again.cached > 40


def test_traces_keep_the_states_at_the_exit_of_drafted_rows_too(target_dir: Path) -> None:
    found: dict[str, Trace] = {}
    for name, drafter in (("drafted", kangaroo(target_dir, 2)), ("plain", None)):
        traces: list[Trace] = []
        drafter = drafter or kangaroo(target_dir, 2)
        with running(target_dir, drafter=drafter, traces=traces) as client:
            client.engine.set_speculation(name == "drafted")
            client.submit("r", prompts([9], seed=4)[0], 24, ignore_eos=True, capture=True)
            client.wait()
        (found[name],) = (decode(encode(trace)) for trace in traces)
    assert (found["drafted"].drafted.numpy() >= 0).sum() > 10
    for name in ("completion_ids", "target_ids"):
        assert (getattr(found["drafted"], name).numpy() == getattr(found["plain"], name).numpy()).all()
    mine, theirs = (trace.hidden for trace in (found["drafted"], found["plain"]))
    assert mine is not None
    assert theirs is not None
    assert (mine.numpy() == theirs.numpy()).all()


def test_a_domain_goes_from_eagle_to_it_and_back_while_requests_run(target_dir: Path, oracle: Oracle) -> None:
    """Its usual exit is behind the first layer that EAGLE reads, so that the target gives what it needs."""
    prompt, eagle = prompts([9], seed=4)[0], make_drafter("eagle", target_dir)
    mine = initial(KangarooSettings(vocabulary=200), target_dir, target_dir)
    assert eagle is not None
    assert set(mine.needs.taps) < set(eagle.needs.taps)
    with running(target_dir, "eagle") as client:
        handle = client.engine.drafters("general")
        handle.try_canary(Rollout(1, 2, 1.0, 1.0), mine.weights(), mine)
        client.submit("canary", prompt, 60, ignore_eos=True)
        while client.results["canary"].updates < 3:
            client.next()
        handle.stage(2, mine.weights(), mine)
        wait_for(client, 2)
        handle.end_canary()
        client.submit("swapped", prompt, 40, ignore_eos=True)
        while client.results["swapped"].updates < 3:
            client.next()
        handle.stage(3, eagle.weights(), eagle)
        wait_for(client, 3)
        client.submit("back", prompt, 40, ignore_eos=True)
        results = client.wait()
        counters = client.engine.counters()
    assert results["canary"].tokens == oracle.greedy(prompt, 60)
    assert results["swapped"].tokens == results["back"].tokens == oracle.greedy(prompt, 40)
    assert counters.by_version["general", 2].by_source.keys() == {"kangaroo"}
    assert counters.by_version["general", 3].by_source.keys() == {"eagle"}
    assert (counters.failed, counters.swaps) == (0, 2)


def wait_for(client: Client, version: int) -> None:
    deadline = time.monotonic() + 20
    while client.engine.drafter_version != version and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.engine.drafter_version == version


def test_versions_are_swapped_in_and_back_in_the_middle_of_a_request(target_dir: Path, oracle: Oracle) -> None:
    one, other, prompt = kangaroo(target_dir), kangaroo(target_dir), prompts([9], seed=4)[0]
    nothing = {name: value * 0 if "proj" in name else value for name, value in other.weights().items()}
    with running(target_dir, drafter=one) as client:
        handle = client.engine.drafters("general")
        client.submit("r", prompt, 60, ignore_eos=True)
        for version, weights in ((2, nothing), (3, one.weights())):
            seen = client.results["r"].updates
            while client.results["r"].updates < seen + 2:
                client.next()
            handle.stage(version, weights)
            wait_for(client, version)
        assert client.wait()["r"].tokens == oracle.greedy(prompt, 60)
        assert {version for _, version in client.engine.counters().by_version} == {1, 2, 3}


def test_what_does_not_fit_is_refused_and_the_running_version_stays(target_dir: Path, goals: Goals) -> None:
    running_one, deeper, eagle = kangaroo(target_dir), kangaroo(target_dir, 2), make_drafter("eagle", target_dir)
    assert eagle is not None
    broken = {**running_one.weights(), "q_proj.weight": torch.zeros(3, 3)}
    with running(target_dir, drafter=running_one) as client:
        handle = client.engine.drafters("general")
        with pytest.raises(DrafterError, match=r"'q_proj.weight' has shape \[3, 3\] instead of \[64, 64\]"):
            handle.stage(2, broken)
        with pytest.raises(DrafterError, match=r"tensor 'down_proj.weight' is unknown"):
            handle.stage(2, eagle.weights())
        with pytest.raises(
            DrafterError, match=r"this kangaroo drafter reads layers \[1\], the target gives \[0, 2, 3\]"
        ):
            handle.stage(2, deeper.weights(), deeper)
        ask(client, goals)
        assert client.engine.drafter_version == 1
