"""Comparisons of versions that draft in turns: of a canary or an earlier version with the stable version."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, Trace
from osd.config import ChainSettings
from osd.drafting import DrafterError
from osd.drafting.mixed import Mixed
from osd.drafting.session import Origin
from osd.economy.chances import NodeShares
from osd.economy.costs import CostModel
from osd.economy.effect import BLOCK, Step
from osd.economy.report import RECALL_ALONE, Comparison, Measured
from osd.economy.switchback import BEGIN_SECONDS, Switchback
from osd.economy.turns import Turns
from osd.engine.domain_drafters import ActiveDrafter
from osd.engine.policy import Policy
from osd.engine.sequence import SequenceState
from osd.recall.memory import Memory
from osd.registry.pointer import Rollout
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running, tokens_of, weights_of, with_noise

HALF = Rollout(stable=1, canary=2, share=0.5, changed=1.0)
ALL = Rollout(stable=1, canary=2, share=1.0, changed=2.0)


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make drafts cost nothing: on a busy machine measured costs might stop one of the versions."""
    monkeypatch.setattr(CostModel, "steps", lambda _, most: np.ones(most + 1))
    monkeypatch.setattr(CostModel, "proposal", lambda *_: 0.0)
    monkeypatch.setattr(CostModel, "reading", lambda *_: 0.0)


@pytest.fixture
def equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all steps equally long in comparisons and trials, as on an idle machine."""

    def equal(schedule: type[Turns] | type[Switchback]) -> None:
        observe: Any = schedule.observe

        def observes(self: Any, step: Step, *more: Any) -> None:
            observe(self, replace(step, seconds=0.01), *more)

        monkeypatch.setattr(schedule, "observe", observes)

    equal(Turns)
    equal(Switchback)


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Number of unclosed opens by slot and drafter; checks that opens and closes alternate."""
    opened: Counter[tuple[int, int]] = Counter()
    open_, close = ActiveDrafter.open, ActiveDrafter.close

    def opens(self: ActiveDrafter, slot: int, token: int, origin: Origin) -> None:
        assert not opened[slot, id(self)]
        open_(self, slot, token, origin)
        opened[slot, id(self)] += 1

    def closes(self: ActiveDrafter, slot: int) -> None:
        assert opened[slot, id(self)] == 1
        opened[slot, id(self)] -= 1
        close(self, slot)

    monkeypatch.setattr(ActiveDrafter, "open", opens)
    monkeypatch.setattr(ActiveDrafter, "close", closes)
    return opened


@pytest.mark.usefixtures("equal_steps")
@pytest.mark.parametrize("kind", ["eagle", "language_model", "medusa"])
def test_canary_trial_keeps_the_answers(target_dir: Path, oracle: Oracle, kind: str, uses: Counter[tuple[int, int]]):
    traces: list[Trace] = []
    texts = prompts([9, 4, 17, 30, 2, 12, 8, 21], seed=4)
    with running(target_dir, kind, traces=traces) as client:
        client.engine.drafters("general").try_canary(HALF, weights_of(kind, target_dir, noise=1.0))
        assert tokens_of(client.ask(texts, 90, capture=True)) == oracle.all(texts, 90)
        results, counters = client.results, client.settled()
        assert (client.engine.drafter_version, client.engine.canary_version) == (1, 2)
        (comparison,) = client.engine.comparisons["general"]
    assert set(uses.values()) == {0}
    by_version = [counters.by_version["general", version] for version in (1, 2)]
    assert min(counts.drafted for counts in by_version) > 0
    assert sum(counts.drafted for counts in by_version) == sum(result.counts.drafted for result in results.values())
    assert by_version[1].acceptance_rate < 0.1 < by_version[0].acceptance_rate
    assert counters.swaps == 0
    assert (comparison.candidate, comparison.stable) == (2, 1)
    assert comparison.measured.trials >= 2
    assert comparison.measured.effect is not None
    assert comparison.measured.effect.log < 0
    assert {trace.drafter_version for trace in traces} == {1, 2}
    for version, counts in enumerate(by_version, 1):
        verdicts = [trace.verdict.numpy() for trace in traces if trace.drafter_version == version]
        accepted = sum((verdict == ACCEPTED).sum() for verdict in verdicts)
        tested = sum((verdict != NOT_DRAFTED).sum() for verdict in verdicts)
        assert 0 < tested < sum(map(len, verdicts)), "drafts of the other version are not recorded"
        assert accepted <= counts.accepted
    assert accepted < 0.1 * sum(map(len, verdicts))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_canary_joins_and_leaves_running_requests_at_once(
    target_dir: Path, oracle: Oracle, prefix_cache: bool, uses: Counter[tuple[int, int]]
) -> None:
    """Without the prefix cache the earlier states are missing, so that requests stay with the stable version."""
    first, second = prompts([9, 14], seed=4)
    seen: list[tuple[int, int]] = []
    with running(target_dir, "eagle", prefix_cache=prefix_cache) as client:
        handle, domain = client.engine.drafters("general"), client.engine.pool.domains["general"]
        weights = weights_of("eagle", target_dir, noise=0.5)

        def look() -> None:
            drafted = client.engine.counters().by_version.get(("general", 2))
            users = 0 if domain.alternate is None else domain.alternate.drafter.users
            seen.append((0 if drafted is None else drafted.rounds, users))

        acts = {3: lambda: handle.try_canary(ALL, weights), 8: look, 15: handle.end_canary, 18: look, 24: look}
        with client.engine.loop.changed:  # both begin in the same step, also on a busy machine
            client.submit("first", first, 110, ignore_eos=True, acts=acts)
            client.submit("second", second, 100, ignore_eos=True, acts={1: look})
        results = client.wait()
    assert results["first"].tokens == oracle.greedy(first, 110)
    assert results["second"].tokens == oracle.greedy(second, 100)
    print(seen)
    (_, before), (during, users), (after, gone), (end, _) = seen
    assert before == 0
    assert (during > 0) == prefix_cache
    assert users == 2 * prefix_cache
    assert gone == 0
    assert end == after
    assert set(uses.values()) == {0}


@pytest.mark.parametrize(("kind", "bucketed"), [("eagle", False), ("eagle", True), ("language_model", True)])
def test_promoted_canary_session_is_freed_after_its_last_user(
    kind: str, bucketed: bool, target_dir: Path, oracle: Oracle
) -> None:
    traces: list[Trace] = []
    first, second = prompts([9, 14], seed=4)
    weights = weights_of(kind, target_dir, noise=0.01)
    with running(target_dir, kind, traces=traces, bucketed=bucketed) as client:
        handle, pool = client.engine.drafters("general"), client.engine.pool
        handle.try_canary(ALL, weights)
        session = weakref.ref(pool.domains["general"].alternate.drafter.session)
        acts = {3: lambda: handle.stage(2, weights), 6: handle.end_canary}
        client.submit("first", first, 100, ignore_eos=True, capture=True, acts=acts)
        client.submit("second", second, 60, ignore_eos=True, capture=True)
        results = client.wait()
        assert (client.engine.drafter_version, client.engine.canary_version) == (2, None)
        assert client.engine.counters().swaps == 1
        client.settled()
        gc.collect()
        assert session() is not None, "the engine's thread does not free memory"
        pool.sweep()
        gc.collect()
        assert session() is None
    assert results["first"].tokens == oracle.greedy(first, 100)
    assert results["second"].tokens == oracle.greedy(second, 60)
    assert {trace.request_id: trace.drafter_version for trace in traces} == {"first": 2, "second": 2}


def test_canary_with_invalid_weights_is_refused(target_dir: Path) -> None:
    traces: list[Trace] = []
    with running(target_dir, "eagle", traces=traces) as client:
        weights = weights_of("eagle", target_dir)
        weights["head.weight"][0, 0] = float("nan")
        with pytest.raises(DrafterError, match=r"'head.weight' has numbers that are not finite"):
            client.engine.drafters("general").try_canary(ALL, weights)
        assert client.engine.canary_version is None
        client.submit("r", [1, 2, 3], 10, ignore_eos=True, capture=True)
        assert client.wait()["r"].error is None
    assert [trace.drafter_version for trace in traces] == [1]


def drafted_by(client: Client, name: str) -> dict[int, int]:
    """Return the number of draft tokens by version for a request of 40 tokens."""
    before = client.settled().by_version
    client.submit(name, [1, 2, 3], 40, ignore_eos=True)
    client.wait()
    after = client.settled().by_version
    return {version: counts.drafted - (before[domain, version].drafted if (domain, version) in before else 0)
            for (domain, version), counts in after.items()}  # fmt: skip


def test_canary_share_changes_without_weights(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        handle = client.engine.drafters("general")
        with pytest.raises(ValueError, match="no canary of version 2"):
            handle.try_canary(ALL, None)
        handle.try_canary(ALL, weights_of("eagle", target_dir))
        assert drafted_by(client, "all")[2] > 0
        handle.try_canary(Rollout(1, 2, 0.0, 3.0), None)
        for turn in range(BLOCK):  # the current block continues
            drafted_by(client, f"until then {turn}")
        assert drafted_by(client, "none")[2] == 0
        assert client.engine.canary_version == 2


def test_canary_drafts_are_planned_by_their_own_shares(target_dir: Path, oracle: Oracle, monkeypatch):
    prompt, seen, observe = prompts([9], seed=4)[0], set[NodeShares](), NodeShares.observe

    def observed(shares: NodeShares, *draft: Any) -> None:
        seen.add(shares)
        observe(shares, *draft)

    monkeypatch.setattr(NodeShares, "observe", observed)
    make_drafts_free(monkeypatch)
    with running(target_dir, "eagle", governed=True) as client:
        client.engine.drafters("general").try_canary(HALF, weights_of("eagle", target_dir, noise=1.0))
        for index in range(8):
            client.submit(str(index), prompt, 100, ignore_eos=True)
        assert {tuple(result.tokens) for result in client.wait().values()} == {tuple(oracle.greedy(prompt, 100))}
    bad, good = sorted(sum(shares.chances()) for shares in seen)
    assert good > 2 * bad


def test_preempted_request_joins_the_trial_again(
    target_dir: Path, oracle: Oracle, uses: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = prompts([9, 14], seed=4)
    with running(target_dir, "eagle", slots=1) as client:
        client.engine.drafters("general").try_canary(HALF, weights_of("eagle", target_dir, noise=0.5))
        client.submit("late", texts[0], 100, ignore_eos=True, priority=1)
        client.until("late", 5)
        client.submit("urgent", texts[1], 60, ignore_eos=True, priority=0)
        results = client.wait()
        assert client.settled().preemptions == 1
        assert client.engine.pool.default.users == 0
    assert results["late"].tokens == oracle.greedy(texts[0], 100)
    assert results["urgent"].tokens == oracle.greedy(texts[1], 60)
    assert set(uses.values()) == {0}


@pytest.mark.parametrize("late", [False, True])
def test_request_stays_stable_when_the_canary_fails_to_open(
    target_dir: Path, oracle: Oracle, late: bool, monkeypatch: pytest.MonkeyPatch, uses: Counter[tuple[int, int]]
) -> None:
    texts, failures = prompts([9, 14], seed=4), 0
    with running(target_dir, "eagle") as client:
        handle, open_ = client.engine.drafters("general"), ActiveDrafter.open

        def fails(self: ActiveDrafter, slot: int, token: int, origin: Origin) -> None:
            nonlocal failures
            if self.version == 2 and token == texts[0][0]:
                failures += 1
                raise RuntimeError("no room")
            open_(self, slot, token, origin)

        monkeypatch.setattr(ActiveDrafter, "open", fails)
        weights = weights_of("eagle", target_dir, noise=0.5)
        if not late:
            handle.try_canary(ALL, weights)
        acts = {3: lambda: handle.try_canary(ALL, weights)} if late else None
        for name, prompt in zip("ab", texts, strict=True):
            client.submit(name, prompt, 60, ignore_eos=True, acts=acts if name == "b" else None)
        results = client.wait()
        assert client.settled().by_version["general", 2].drafted > 0
        assert client.engine.counters().failed == 0
    assert failures
    assert tokens_of(results.values()) == oracle.all(texts, 60)
    assert set(uses.values()) == {0}


def test_recall_learns_once_per_step_during_a_trial(target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    learnt: Counter[str] = Counter()
    deliver = SequenceState.deliver
    steps = 0

    def counted(self: SequenceState, tokens: list[int], states: Any, rows: Any = None) -> None:
        nonlocal steps
        steps += rows is not None
        deliver(self, tokens, states, rows)

    monkeypatch.setattr(SequenceState, "deliver", counted)
    drafter = Mixed(make_drafter("eagle", target_dir))
    texts = prompts([9, 14], seed=4)
    with running(target_dir, drafter=drafter, slots=2) as client:
        memory: type[Memory] = type(client.engine.pool.memories("general").of(""))
        learn = memory.learn

        def learns(self: Memory, *heard: Any) -> None:
            learnt["steps"] += 1
            learn(self, *heard)

        monkeypatch.setattr(memory, "learn", learns)
        client.engine.drafters("general").try_canary(HALF, with_noise(drafter.weights(), 0.5))
        assert tokens_of(client.ask(texts, 100)) == oracle.all(texts, 100)
        counters = client.settled()
        assert {version for _, version in counters.by_version} == {1, 2}
    assert learnt["steps"] == steps > 0


def test_canaries_of_two_domains_take_independent_turns(target_dir: Path, oracle: Oracle) -> None:
    texts = prompts([9, 14, 5], seed=4)
    with running(target_dir, "eagle") as client:
        client.engine.pool.open("code", 7, weights_of("eagle", target_dir, 0.5))
        client.engine.drafters("code").try_canary(Rollout(7, 8, 0.5, 1.0), weights_of("eagle", target_dir))
        client.engine.drafters("general").try_canary(HALF, weights_of("eagle", target_dir, 0.5))
        for index, (prompt, domain) in enumerate(zip(texts, ("general", "code", "code"), strict=True)):
            policy = Policy.of(ChainSettings(depth=2)) if domain == "general" else None  # applies to both versions
            client.submit(str(index), prompt, 110, ignore_eos=True, domain=domain, policy=policy)
        assert tokens_of(client.wait().values()) == oracle.all(texts, 110)
        counters, comparisons = client.settled(), client.engine.comparisons
    assert set(counters.by_version) == {("general", 1), ("general", 2), ("code", 7), ("code", 8)}
    assert {domain: (first.candidate, first.stable) for domain, (first,) in comparisons.items()} == {
        "general": (2, 1), "code": (8, 7),
    }  # fmt: skip


def test_stable_swap_restarts_the_comparison(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        handle = client.engine.drafters("general")
        handle.try_canary(HALF, weights_of("eagle", target_dir, noise=0.3))
        client.ask(prompts([5, 9]), 110)
        assert client.engine.comparisons["general"][0].measured.trials > 0
        handle.stage(3, weights_of("eagle", target_dir, noise=0.1))
        client.swapped_to(3)
        (comparison,) = client.engine.comparisons["general"]
        assert (comparison.candidate, comparison.stable, comparison.measured.trials) == (2, 3, 0)
        client.ask(prompts([5, 9]), 60, "again-{}")
        assert client.settled().by_version["general", 2].drafted > 0


@pytest.mark.usefixtures("equal_steps")
@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["no effect", "better"])
def test_stable_version_is_compared_with_an_earlier_one(
    target_dir: Path, oracle: Oracle, noise: float, uses: Counter[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    traces: list[Trace] = []
    texts, drafter = prompts([9, 4, 17, 30], seed=4), make_drafter("eagle", target_dir)
    with running(target_dir, "eagle", traces=traces, governed=True, measure=0.05) as client:
        client.engine.stage(2, drafter.weights())
        client.swapped_to(2)
        handle = client.engine.drafters("general")
        handle.refer(1, with_noise(drafter.weights(), noise))
        for turn in range(8):
            assert tokens_of(client.ask(texts, 90, f"{turn}-{{}}", capture=True)) == oracle.all(texts, 90)
        counters, (comparison,) = client.settled(), client.engine.comparisons["general"]
        assert client.engine.canary_version is None
        assert client.engine.measured.trials > 0, "plain blocks are measured at the same time"
    newer, older = (counters.by_version["general", version] for version in (2, 1))
    assert newer.rounds > older.rounds > 0
    assert (comparison.candidate, comparison.stable) == (2, 1)
    effect = comparison.measured.effect
    assert effect is not None
    assert not noise or effect.log > 0, "the effect is of the newer version"
    assert {trace.drafter_version for trace in traces} == {2}, "no trace shows an earlier version"
    assert set(uses.values()) == {0}


def test_comparison_ends_when_its_result_is_known(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled = False
    monkeypatch.setattr(Turns, "settled", property(lambda _: settled))
    weights = weights_of("eagle", target_dir)
    with running(target_dir, "eagle") as client:
        pool, handle = client.engine.pool, client.engine.drafters("general")
        client.engine.stage(2, weights)
        client.swapped_to(2)
        handle.refer(1, weights)
        client.ask(prompts([5, 9]), 60)
        assert pool.domains["general"].alternate is not None
        settled = True
        client.ask(prompts([5, 9]), 60, "again-{}")
        assert pool.domains["general"].alternate is None
        (comparison,) = client.engine.comparisons["general"]
        assert (comparison.candidate, comparison.stable) == (2, 1)


@pytest.mark.usefixtures("equal_steps")
def test_mixed_drafter_is_compared_with_recall_alone(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, uses: Counter[tuple[int, int]]
) -> None:
    """The measurements continue over versions and canaries."""
    make_drafts_free(monkeypatch)
    texts, drafter = prompts([9, 4, 17, 30], seed=4), Mixed(make_drafter("eagle", target_dir))

    def comparisons(client: Client, name: str) -> dict[tuple[int, int], int]:
        """Return the number of pairs of each comparison, after some requests."""
        for turn in range(4):
            assert tokens_of(client.ask(texts, 90, f"{name}-{turn}-{{}}")) == oracle.all(texts, 90)
        client.settled()
        compared = client.engine.comparisons["general"]
        return {(comparison.candidate, comparison.stable): comparison.measured.trials for comparison in compared}

    with running(target_dir, drafter=drafter, governed=True, measure=0.1) as client:
        handle = client.engine.drafters("general")
        client.engine.loop.planner.switchback.bank.spend(BEGIN_SECONDS)  # plain blocks would interrupt the pairs
        begun = comparisons(client, "begins")[1, RECALL_ALONE]
        assert begun > 0
        client.engine.stage(2, drafter.weights())
        client.swapped_to(2)
        handle.refer(1, drafter.weights())
        compared = comparisons(client, "new-version")
        assert compared.keys() == {(2, RECALL_ALONE)}, "the version before does not draft"
        assert compared[2, RECALL_ALONE] >= begun
        handle.try_canary(Rollout(2, 3, 0.5, 1.0), drafter.weights())
        compared = comparisons(client, "canary")
        assert compared.keys() == {(3, 2), (2, RECALL_ALONE)}
        assert compared[2, RECALL_ALONE] >= begun
        handle.end_canary()
        assert comparisons(client, "ended").keys() == {(2, RECALL_ALONE)}
    assert set(uses.values()) == {0}


def test_trained_drafter_rests_unless_it_gains(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, uses: Counter[tuple[int, int]]
) -> None:
    """Recall drafts alone until pairs of blocks show a gain of one percent, and again when they show none."""
    make_drafts_free(monkeypatch)
    observe = Turns.observe

    def observes(turns: Turns, *more: Any) -> None:
        """Change blocks, but measure only the effects of the test."""
        observe(turns, *more[:2])
        turns.measured = measured

    monkeypatch.setattr(Turns, "observe", observes)
    measured, traces = Measured(), list[Trace]()
    texts, drafter = prompts([9, 4, 17, 30], seed=4), Mixed(make_drafter("eagle", target_dir))

    def drafting(name: str) -> set[int]:
        """Return the versions that draft in some requests, after the effect is taken in."""
        for turn in range(3):
            client.ask(texts, 90, f"{name}-settles-{turn}-{{}}")
        before = client.settled().by_version
        assert tokens_of(client.ask(texts, 90, name + "-{}", capture=True)) == oracle.all(texts, 90)
        after = client.settled().by_version
        return {version for (_, version), counts in after.items() if counts != before.get(("general", version))}

    with running(target_dir, drafter=drafter, traces=traces, governed=True, measure=0.05) as client:
        for number, (log, trials, rests) in enumerate(
            [(0.0, 0, True), (0.2, 11, True), (0.2, 12, False), (0.009, 40, True), (0.011, 40, False), (-0.1, 40, True)]
        ):
            measured = Measured(trials, 50.0, 50.0 * math.exp(log), 1.0) if trials else Measured()
            assert drafting(f"turn-{number}") == {RECALL_ALONE if rests else 1}
            (comparison,) = client.engine.comparisons["general"]
            assert comparison == Comparison(1, RECALL_ALONE, replace(measured, guarded=int(rests)))
        client.engine.stage(2, drafter.weights())
        client.swapped_to(2)
        assert drafting("new-version") == {RECALL_ALONE}
    assert set(uses.values()) == {0}
    by_version: dict[int, list[Trace]] = defaultdict(list)
    for trace in traces:
        by_version[trace.drafter_version].append(trace)
    assert by_version.keys() == {1, 2}, "drift of acceptance is detected by version"
    for shown in by_version.values():
        assert any((trace.verdict.numpy() == ACCEPTED).any() for trace in shown), "drafts of recall are recorded"


def test_swap_and_canary_end_a_comparison_with_a_reference(target_dir: Path) -> None:
    weights = weights_of("eagle", target_dir)
    with running(target_dir, "eagle") as client:
        handle = client.engine.drafters("general")
        client.engine.stage(2, weights)
        client.swapped_to(2)
        handle.refer(1, weights)
        client.engine.stage(3, weights)
        client.swapped_to(3)
        assert client.engine.comparisons == {}, "the comparison was of the version before"
        handle.refer(2, weights)
        with pytest.raises(ValueError, match="no canary of version 2"):
            handle.try_canary(HALF, None)
        handle.end_canary()
        assert client.engine.comparisons["general"][0].stable == 2, "a reference is no canary"
        handle.try_canary(Rollout(3, 4, 0.5, 1.0), weights)
        assert client.engine.canary_version == 4
        handle.refer(2, weights)
        assert client.engine.canary_version == 4, "a reference never replaces a canary"
