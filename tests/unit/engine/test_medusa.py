"""Medusa in an engine: it learns from the traces of its own rounds, and takes EAGLE's place while requests run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from osd.capture.trace import Trace
from osd.config import BestFirstSettings, StaticTreeSettings, TrainerSettings
from osd.drafters import DrafterError, from_config
from osd.drafters.medusa.drafter import Medusa
from osd.drafters.mixed.drafter import Mixed
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.learning.batch import check, collate, pack
from osd.learning.distiller import Distiller
from osd.learning.evaluation import evaluate
from osd.registry.pointer import Rollout
from tests.tiny import HIDDEN, VOCABULARY, make_tiny
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running


def fresh(directory: Path) -> Medusa:
    drafter = make_drafter("medusa", directory)
    assert isinstance(drafter, Medusa)
    return drafter


def swapped_to(engine: Engine, version: int) -> None:
    deadline = time.monotonic() + 20
    while engine.drafter_version != version:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def begin(client: Client, name: str, asked: Sequence[list[int]], policy: Policy) -> None:
    """Ask for greedy answers to two prompts, and wait until both are under way."""
    for index, prompt in enumerate(asked):
        client.submit(f"{name} {index}", prompt, 24, ignore_eos=True, capture=True, policy=policy)
    while not client.results[f"{name} 0"].updates or not client.results[f"{name} 1"].updates:
        client.next()


def test_heads_learn_from_the_traces_of_their_own_rounds_and_then_more_is_accepted(target_dir: Path) -> None:
    drafter, found = fresh(target_dir), list[Trace]()
    for parameter in drafter.trained().values():
        parameter.data.normal_(0, 0.3)  # the text repeats itself, and new heads would be right about that

    def accepted(client: Client) -> float:
        for index, prompt in enumerate(prompts([8] * 12, seed=2)):
            client.submit(f"{index}", prompt, 40, ignore_eos=True, capture=True)
        client.wait()
        return client.engine.counters().by_version["general", client.engine.drafter_version].acceptance_rate

    with running(target_dir, drafter=drafter, traces=found, slots=8, depth=3) as client:
        before = accepted(client)
        for trace in found:
            check(trace, VOCABULARY, HIDDEN)
        batches = [collate(group) for group in pack(found, 512)]
        start = evaluate(drafter, batches, 4, "forward_kl").per_depth
        distiller = Distiller(drafter, TrainerSettings(learning_rate=0.01, update_tokens=1, unroll=1))
        for step in range(40):
            assert not distiller.step(batches[step % len(batches)]).skipped
        end = evaluate(drafter, batches, 4, "forward_kl").per_depth
        client.engine.stage(2, drafter.weights())
        swapped_to(client.engine, 2)
        after = accepted(client)
    print(f"expected acceptance by head {start} -> {end}, accepted / drafted {before:.3f} -> {after:.3f}")
    assert all(new > old + 0.3 for old, new in zip(start, end, strict=True))  # each head, though unroll is 1
    assert after > before + 0.2


@pytest.mark.parametrize("growth", [StaticTreeSettings(), BestFirstSettings()], ids=lambda growth: growth.kind)
def test_a_domain_changes_from_eagle_to_medusa_and_back_while_requests_run(
    target_dir: Path, oracle: Oracle, growth: StaticTreeSettings | BestFirstSettings
) -> None:
    eagle, medusa, asked = make_drafter("eagle", target_dir), fresh(target_dir), prompts((17, 3))
    assert eagle is not None
    goals, policy, found = [oracle.greedy(prompt, 24) for prompt in asked], Policy.of(growth), list[Trace]()
    with running(target_dir, "eagle", traces=found, slots=8) as client:
        handle = client.engine.drafters("general")

        begin(client, "eagle", asked, policy)
        handle.try_canary(Rollout(1, 2, 1.0, 1.0), medusa.weights(), medusa)
        begin(client, "canary", asked, policy)
        handle.stage(2, medusa.weights(), medusa)
        swapped_to(client.engine, 2)
        handle.end_canary()
        begin(client, "promoted", asked, policy)
        handle.stage(3, eagle.weights(), eagle)
        swapped_to(client.engine, 3)
        begin(client, "rolled back", asked, policy)
        results = client.wait()
        kinds = {key[1]: counts.by_source.keys() for key, counts in client.engine.counters().by_version.items()}
    for name, result in results.items():
        assert result.tokens == goals[int(name.split()[-1])], name
    assert kinds == {1: {"eagle"}, 2: {"medusa"}, 3: {"eagle"}}
    for trace in found:
        assert trace.hidden is not None
        assert trace.hidden.shape[1] == (HIDDEN if trace.drafter_version == 2 else 3 * HIDDEN)


@pytest.mark.parametrize("bucketed", [False, True], ids=["kernels", "bucketed"])
def test_beside_recall_both_draft_and_the_output_is_that_of_transformers(
    target_dir: Path, oracle: Oracle, bucketed: bool
) -> None:
    growth = BestFirstSettings(governed=False)
    with running(target_dir, drafter=Mixed(fresh(target_dir)), growth=growth, bucketed=bucketed) as client:
        for name in ("first", "again"):
            client.submit(name, [5, 9, 7], 24, ignore_eos=True, capture=True)
            assert client.wait()[name].tokens == oracle.greedy([5, 9, 7], 24)
        sources = client.engine.counters().speculation().by_source
    assert sources["medusa"].accepted > 0
    assert sources["recall"].accepted > 0


def test_what_is_not_this_drafters_is_refused_and_the_running_version_stays(
    target_dir: Path, oracle: Oracle, tmp_path: Path
) -> None:
    prompt = prompts([9])[0]
    with running(target_dir, drafter=fresh(target_dir)) as client:
        eagle = make_drafter("eagle", target_dir)
        assert eagle is not None
        with pytest.raises(DrafterError, match="tensor 'bias' is missing"):
            client.engine.stage(2, eagle.weights())
        with pytest.raises(DrafterError, match=r"has shape \[3, 64\] instead of \[4, 64\]"):
            client.engine.stage(2, fresh(target_dir).weights() | {"bias": torch.zeros(3, 64)})
        with pytest.raises(DrafterError, match="is for another target: its layers is 2, not 4"):
            from_config(fresh(make_tiny(tmp_path, layers=2)).config(), target_dir)
        client.submit("r", prompt, 30, ignore_eos=True)
        result = client.wait()["r"]
        assert client.engine.drafter_version == 1
    assert result.tokens == oracle.greedy(prompt, 30)
    assert result.counts is not None
    assert result.counts.by_source.keys() == {"medusa"}
