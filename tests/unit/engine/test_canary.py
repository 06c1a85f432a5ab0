"""Two versions of a drafter in one engine: a canary beside the stable one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from torch import Tensor

from osd.capture.trace import NOT_DRAFTED, Trace
from osd.drafting import DrafterError
from osd.registry.pointer import Rollout
from tests.unit.engine.harness import Oracle, make_drafter, prompts, running, shaken, tokens_of

HALF = Rollout(stable=1, canary=2, share=0.5, changed=1.0)
ALL = Rollout(stable=1, canary=2, share=1.0, changed=2.0)


def weights_of(kind: str, directory: Path, noise: float = 0.0) -> dict[str, Tensor]:
    return shaken(make_drafter(kind, directory).weights(), noise)


@pytest.mark.parametrize("kind", ["eagle", "language_model"])
def test_requests_on_either_version_have_the_targets_output_and_traces_that_say_which(
    target_dir: Path, oracle: Oracle, kind: str
) -> None:
    traces: list[Trace] = []
    asked = prompts([9, 4, 17, 30, 2, 12, 8, 21], seed=4)
    with running(target_dir, kind, traces=traces) as client:
        client.engine.drafters("general").try_canary(HALF, weights_of(kind, target_dir, noise=1.0))
        assert tokens_of(client.ask(asked, 30, capture=True)) == oracle.all(asked, 30)
        results, counters = client.results, client.engine.counters()
        assert (client.engine.drafter_version, client.engine.canary_version) == (1, 2)
    served = {trace.request_id: trace.drafter_version for trace in traces}
    assert served == {str(index): HALF.version_for(str(index)) for index in range(len(asked))}
    assert set(served.values()) == {1, 2}
    for version in (1, 2):
        mine = [results[name].counts for name, number in served.items() if number == version]
        assert counters.by_version["general", version].drafted == sum(counts.drafted for counts in mine) > 0
        assert counters.by_version["general", version].accepted == sum(counts.accepted for counts in mine)
        tested = sum((t.verdict.numpy() != NOT_DRAFTED).sum() for t in traces if t.drafter_version == version)
        assert tested > 0
    assert counters.by_version["general", 2].acceptance_rate < 0.1 < counters.by_version["general", 1].acceptance_rate
    assert counters.swaps == 0


@pytest.mark.parametrize(("kind", "bucketed"), [("eagle", False), ("eagle", True), ("language_model", True)])
def test_a_request_keeps_its_drafter_while_the_canary_is_promoted_and_the_session_goes_with_the_last(
    kind: str, bucketed: bool, target_dir: Path, oracle: Oracle
) -> None:
    traces: list[Trace] = []
    first, second = prompts([9, 14], seed=4)
    weights = weights_of(kind, target_dir, noise=0.01)
    with running(target_dir, kind, traces=traces, bucketed=bucketed) as client:
        client.engine.drafters("general").try_canary(ALL, weights)
        client.submit("first", first, 100, ignore_eos=True, capture=True)
        client.until("first", 3)
        pool = client.engine.pool
        session = weakref.ref(pool.choose("general", "first").session)
        client.engine.stage(2, weights)
        client.engine.drafters("general").end_canary()
        client.submit("second", second, 60, ignore_eos=True, capture=True)
        client.until("first", 8)
        pool.sweep()
        assert session() is not None
        assert len(client.results["first"].tokens) < 100, "still drafted by the session that it began with"
        results = client.wait()
        assert (client.engine.drafter_version, client.engine.canary_version) == (2, None)
        assert client.engine.counters().swaps == 1
        client.submit("third", [1], 4)
        client.wait()
        gc.collect()
        assert session() is not None, "memory is not freed on the decode thread"
        pool.sweep()
        assert session() is None
    assert results["first"].tokens == oracle.greedy(first, 100)
    assert results["second"].tokens == oracle.greedy(second, 60)
    assert {trace.request_id: trace.drafter_version for trace in traces} == {"first": 2, "second": 2}


def test_a_canary_that_is_rolled_back_gets_no_more_requests_and_ends_what_it_began(
    target_dir: Path, oracle: Oracle
) -> None:
    traces: list[Trace] = []
    prompt = prompts([9], seed=4)[0]
    with running(target_dir, "eagle", traces=traces) as client:
        client.engine.drafters("general").try_canary(ALL, weights_of("eagle", target_dir, noise=0.5))
        client.submit("before", prompt, 60, ignore_eos=True, capture=True)
        client.until("before", 3)
        client.engine.drafters("general").end_canary()
        client.submit("after", prompt, 60, ignore_eos=True, capture=True)
        results = client.wait()
    assert results["before"].tokens == results["after"].tokens == oracle.greedy(prompt, 60)
    assert {trace.request_id: trace.drafter_version for trace in traces} == {"before": 2, "after": 1}


def test_a_canary_that_does_not_fit_is_refused_and_stable_serves_everything(target_dir: Path) -> None:
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


def test_the_share_of_a_canary_changes_without_its_weights_and_of_no_other(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        with pytest.raises(ValueError, match="no canary of version 2"):
            client.engine.drafters("general").try_canary(ALL, None)
        client.engine.drafters("general").try_canary(ALL, weights_of("eagle", target_dir))
        pool = client.engine.pool
        canary = pool.choose("general", "r")
        client.engine.drafters("general").try_canary(Rollout(1, 2, 0.0, 3.0), None)
        assert pool.choose("general", "r") is pool.own is not canary
        client.engine.drafters("general").try_canary(ALL, None)
        assert pool.choose("general", "r") is canary


def test_each_version_is_governed_by_what_it_gets_accepted(target_dir: Path, oracle: Oracle) -> None:
    prompt = prompts([9], seed=4)[0]
    with running(target_dir, "eagle", governed=True) as client:
        client.engine.drafters("general").try_canary(HALF, weights_of("eagle", target_dir, noise=1.0))
        for index in range(8):
            client.submit(str(index), prompt, 100, ignore_eos=True)
        assert {tuple(result.tokens) for result in client.wait().values()} == {tuple(oracle.greedy(prompt, 100))}
        pool, planner = client.engine.pool, client.engine.loop.planner
        good, bad = (planner.governor(drafter) for drafter in (pool.own, pool.choose("general", "0")))
        gains = good.acceptance.gains()[-1], bad.acceptance.gains()[-1]
        assert HALF.version_for("0") == 2
        assert gains[0] > 2 * gains[1]
