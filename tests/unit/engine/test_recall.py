"""Recall in the engine: drafts of earlier text, and separation of clients and domains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osd.config import BestFirstSettings, ChainSettings, DynamicTreeSettings, GrowthSettings
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.drafting.recall.memories import Memories
from osd.recall.memory import Observation
from tests.unit.engine.harness import LENGTHS, Client, Oracle, Result, make_drafter, prompts, running

BEST = BestFirstSettings()


def memories(client: Client) -> Memories:
    return client.engine.pool.memories("general")


def used(client: Client) -> int:
    return sum(table.used() for table in memories(client).tables)


@pytest.mark.parametrize(
    "growth",
    [BEST, BestFirstSettings(governed=False), ChainSettings(), DynamicTreeSettings(budget=7)],
    ids=["as much as pays", "as much as fits", "chain", "tree"],
)
def test_recall_drafts_earlier_text_and_keeps_output(
    target_dir: Path, goals: list[list[int]], growth: GrowthSettings
) -> None:
    with running(target_dir, drafter=Recall(), growth=growth) as client:
        lengths = []
        for _ in range(2):
            before = client.engine.counters().speculation()
            client.ask_greedily(goals, 24, capture=True)
            counts = client.engine.counters().speculation()
            lengths.append((counts.accepted - before.accepted) / max(counts.rounds - before.rounds, 1))
        assert counts.by_source.keys() <= {"recall", "request", "copy"}
        by_order = client.engine.counters().by_order
    assert {order for _, order in by_order} <= {1, 2, 3, 4}
    for source in {"recall", "request"} & counts.by_source.keys():
        counts_by_order, total = (
            [order_counts for key, order_counts in by_order.items() if key[0] == source],
            counts.by_source[source],
        )
        assert sum(order_counts.drafted for order_counts in counts_by_order) == total.drafted
        assert sum(order_counts.accepted for order_counts in counts_by_order) == total.accepted
    if not growth.governed:
        assert lengths[1] > 1.2 * lengths[0]
        assert counts.by_source["recall"].accepted > 0


def test_recall_ignores_requests_without_capture(target_dir: Path) -> None:
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        client.ask(prompts(LENGTHS), 24, capture=False)
        assert used(client) == 0
        assert client.engine.counters().speculation().drafted > 0  # a request recalls its own text
        client.ask(prompts(LENGTHS), 24, capture=True)
        assert used(client) > 0


@pytest.mark.parametrize("shared", [True, False])
def test_clients_share_a_recall_table_if_configured(target_dir: Path, shared: bool) -> None:
    prompt = prompts([21], seed=6)[0]
    growth = BestFirstSettings(governed=False)
    with running(target_dir, drafter=Recall(), growth=growth, shared=shared) as client:
        client.submit("hers", prompt, 24, ignore_eos=True, capture=True, client="a")
        client.wait()
        for name in ("b", "a"):
            client.submit(f"again {name}", prompt, 24, ignore_eos=True, capture=True, client=name)
            client.wait()
        accepted = {name: result.counts.accepted for name, result in client.results.items() if result.counts}
        assert len(memories(client).tables) == (1 if shared else 2)
    assert accepted["again a"] > accepted["hers"]
    assert (accepted["again b"] > accepted["hers"]) is shared


@pytest.mark.parametrize("shared", [True, False])
def test_sources_show_text_of_others_only_if_shared(target_dir: Path, shared: bool) -> None:
    prompt = prompts([21], seed=6)[0]
    growth = BestFirstSettings(governed=False)
    with running(target_dir, drafter=Recall(), growth=growth, shared=shared) as client:
        for name in ("a", "b"):
            client.submit(name, prompt, 24, ignore_eos=True, capture=True, sources=True, client=name)
            client.wait()
        recalled = {name: result.sources.count("recall") for name, result in client.results.items()}
    assert (recalled["b"] > recalled["a"]) is shared


def test_draft_during_prompt_reading_keeps_output(target_dir: Path, oracle: Oracle) -> None:
    """The budget covers all running sequences, although few of them have rows in this step."""
    long = prompts([60, 61, 62], seed=3)
    with running(target_dir, drafter=Recall(), growth=BEST, chunk=1, prefix_cache=False) as client:
        client.submit("short", [7, 7, 7, 7, 7, 7, 7, 7], 4, ignore_eos=True, capture=True)
        for number, prompt in enumerate(long):
            client.submit(str(number), prompt, 3, ignore_eos=True, capture=True)
        results = client.wait()
    assert results["short"].tokens == oracle.greedy([7] * 8, 4)
    assert [results[str(number)].tokens for number in range(3)] == [oracle.greedy(prompt, 3) for prompt in long]


def test_least_recent_client_loses_its_table(target_dir: Path) -> None:
    with running(target_dir, drafter=Recall(), shared=False) as client:
        for number in range(20):
            client.submit(str(number), [1, 2, 3], 4, ignore_eos=True, capture=True, client=str(number))
            client.wait()
        tables = memories(client)
        assert len(tables.tables) == 16
        kept = tables.of("19")
        assert kept in tables.tables
        assert kept.used() > 0
        assert tables.of("0").used() == 0  # a new table


def test_domains_do_not_share_recall(target_dir: Path) -> None:
    prompt = prompts([21], seed=6)[0]
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        pool = client.engine.pool
        pool.open("code", 7, {}, Recall())
        client.submit("general", prompt, 24, ignore_eos=True, capture=True)
        client.wait()
        client.submit("code", prompt, 24, ignore_eos=True, capture=True, domain="code")
        client.wait()
        client.submit("again", prompt, 24, ignore_eos=True, capture=True)
        accepted = {name: result.counts.accepted for name, result in client.wait().items() if result.counts}
        assert pool.memories("code") is not pool.memories("general")
    assert accepted["again"] > accepted["code"] == accepted["general"]


def test_change_of_drafter_kind_or_weights_keeps_recall(target_dir: Path) -> None:
    first, second = (make_drafter("language_model", target_dir) for _ in range(2))
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        client.ask(prompts(LENGTHS), 24, capture=True)
        pool, before = client.engine.pool, used(client)
        for version, drafter in enumerate((first, Recall(), Mixed(first), Mixed(second)), 2):
            pool.stage("general", version, drafter.weights(), drafter)
            client.submit(f"by {version}", [1, 2, 3], 8, ignore_eos=True)
            client.wait()
            assert (client.engine.drafter_version, pool.default.kind) == (version, drafter.kind)
        assert used(client) == before > 0
        client.ask(prompts(LENGTHS), 24, "again {}")
        assert client.engine.counters().by_version["general", version].by_source["recall"].accepted > 0


def test_recall_table_shrinks_when_memory_is_short(
    target_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(target_dir, drafter=Recall()) as client:
        tables = memories(client)
        make = tables.backend.memory

        def scarce(entries: int) -> Any:
            if entries > 4000:
                raise MemoryError
            return make(entries)

        monkeypatch.setattr(tables, "backend", type("Scarce", (), {"memory": staticmethod(scarce)}))
        with caplog.at_level("WARNING"):
            assert tables.of("").entries <= 4000
    assert "no memory for a recall table of 1 MB (drafter.recall.megabytes)" in caplog.text


def test_end_within_a_draft_is_exact(target_dir: Path) -> None:
    """Text after the end, or a missing end, would break a tool call."""
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:

        def decode(name: str, prompt: list[int], tokens: int, **more: Any) -> Result:
            client.submit(name, prompt, tokens, ignore_eos=True, **more)
            return client.wait()[name]

        lengths = set()
        for number, prompt in enumerate(prompts(range(11, 19), seed=3)):
            whole = decode(f"whole {number}", prompt, 40, speculate=False)
            for again in range(2):
                decode(f"learn {number} {again}", prompt, 40, capture=True)
            middle = len(whole.text) * (1 + number) // 10
            stop = (whole.text[middle : middle + 3],)
            goal = decode(f"plain {number}", prompt, 40, stop=stop, speculate=False)
            got = decode(f"drafted {number}", prompt, 40, stop=stop)
            assert (got.text, got.finish, got.tokens) == (goal.text, goal.finish, goal.tokens)
            lengths.add(len(got.tokens))
            short = decode(f"short {number}", prompt, 5 + number)
            assert (short.tokens, short.finish) == (whole.tokens[: 5 + number], "length")
        assert len(lengths) > 3
        assert client.engine.counters().speculation().accepted > 100


def test_wrong_recall_keeps_output_and_terminates(target_dir: Path, oracle: Oracle) -> None:
    """After each rejected draft, decoding continues after the token of the target."""
    prompt = prompts([30], seed=3)[0]
    goal = oracle.greedy(prompt, 40)
    text = [*prompt, *goal]
    with running(target_dir, drafter=Recall(), growth=BestFirstSettings(governed=False)) as client:
        client.submit("first", prompt, 1, ignore_eos=True, capture=True)
        client.wait()
        backend, shared = memories(client).backend, memories(client).tables[0]
        for end in range(len(prompt), len(text)):
            before = backend.text(len(text))
            before.append(text[:end], certain=True)
            wrong = torch.tensor([[(text[end] + 1) % 200]])
            heard = Observation([], [], wrong, torch.zeros(1, 1), [int(wrong)])
            for _ in range(8):
                shared.learn(before, heard, 0.0, 1, 0)
        client.submit("second", prompt, 40, ignore_eos=True)
        result = client.wait()["second"]
    assert result.tokens == goal
    assert result.counts.rounds <= 40
    assert result.counts.drafted > 20
    assert result.counts.accepted < result.counts.drafted / 4
