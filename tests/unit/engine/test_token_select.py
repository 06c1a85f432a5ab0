"""The target drafts over the tokens that it selects: the same text, and drafts that are as right as what they read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from benchmarks.streams import settled
from osd.config import (
    BestFirstSettings,
    ChainSettings,
    DynamicTreeSettings,
    GrowthSettings,
    TokenSelectSettings,
    TopKTreeSettings,
)
from osd.drafters import DrafterError, initial
from osd.drafters.token_select.drafter import TokenSelect
from osd.drafters.token_select.session import TokenSelectSession
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from osd.metrics import SpeculationCounts
from osd.runtime.attention.selection import SelectionSizes
from tests.unit.engine import test_law
from tests.unit.engine.harness import Client, Oracle, prompts, running

model = test_law.model
LENGTHS = (1, 5, 40, 16, 3)
FEW = TokenSelectSettings(initial=1, top=2, local=2)
Goals = list[list[int]]


@pytest.fixture(scope="module")
def goals(oracle: Oracle) -> Goals:
    """What transformers answers greedily."""
    return [oracle.greedy(prompt, 16) for prompt in prompts(LENGTHS)]


def ask(client: Client, goals: Goals) -> SpeculationCounts:
    """Ask for greedy answers, and check that they are those of transformers."""
    for index, prompt in enumerate(prompts(LENGTHS)):
        client.submit(str(index), prompt, 16, ignore_eos=True)
    results = client.wait()
    assert [results[str(index)].tokens for index in range(len(LENGTHS))] == goals
    counters = client.engine.counters()
    assert counters.failed == 0
    assert counters.speculation().by_source.keys() <= {"token_select"}
    return counters.speculation()


GROWTHS: dict[str, GrowthSettings] = {
    "chain": ChainSettings(depth=3, governed=False),
    "governed": BestFirstSettings(budget=8),
    "top_k_tree": TopKTreeSettings(budget=8, depth=3, governed=False),
    "dynamic_tree": DynamicTreeSettings(budget=6, governed=False),
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucketed": {"bucketed": True},
    "few slots": {"prefix_cache": False, "slots": 2},
}
WAYS = [*((growth, "plain") for growth in GROWTHS), ("chain", "few slots"), ("top_k_tree", "bucketed")]


@pytest.mark.parametrize(("growth", "how"), WAYS)
def test_greedy_output_is_that_of_transformers(target_dir: Path, goals: Goals, growth: str, how: str) -> None:
    drafter = initial(FEW, target_dir, target_dir)
    with running(target_dir, drafter=drafter, growth=GROWTHS[growth], **HOW[how]) as client:
        counts = ask(client, goals)
        session = selecting(client)
    if growth != "governed":
        assert counts.drafted > counts.accepted > 0
        assert session.selection.counts.min() > 0


def selecting(client: Client) -> TokenSelectSession:
    assert client.engine.pool is not None
    session = client.engine.pool.own.session
    assert isinstance(session, TokenSelectSession)
    return session


def test_where_it_reads_everything_every_draft_is_right(target_dir: Path, goals: Goals) -> None:
    with running(target_dir, drafter=initial(TokenSelectSettings(), target_dir, target_dir)) as client:
        counts = ask(client, goals)
        assert selecting(client).selection.counts.tolist() == [0, 0]
    # What is drafted past the end of a request counts as drafted alone.
    assert counts.accepted > 0.8 * counts.drafted > 0


def test_the_more_it_reads_the_more_of_its_drafts_are_right(target_dir: Path, goals: Goals) -> None:
    rates = []
    for top in (1, 8, 24):
        sizes = TokenSelectSettings(initial=1, top=top, local=2)
        with running(target_dir, drafter=initial(sizes, target_dir, target_dir)) as client:
            counts = ask(client, goals)
        rates.append(counts.accepted / counts.drafted)
    assert rates[0] < rates[1] <= rates[2], rates


def test_a_sequence_reads_nothing_that_another_one_chose(target_dir: Path) -> None:
    """What its slot held before is forgotten when it opens, so that the first draft chooses in every layer."""
    drafter, prompt = initial(FEW, target_dir, target_dir), prompts([40], seed=3)[0]
    with running(target_dir, drafter=drafter, slots=1) as client:
        selection = selecting(client).selection
        client.submit("first", prompt, 16, ignore_eos=True)
        client.wait()
        settled(client.engine)
        assert selection._begins.all()
        selecting(client).open(0, prompt[0])
        assert not selection._begins.any()


def test_a_seed_gives_the_same_text_as_without_drafts(target_dir: Path) -> None:
    prompt, sampling = prompts([21], seed=6)[0], SamplingParams(temperature=1.0, seed=77, repeatable=True)
    with running(target_dir, drafter=initial(FEW, target_dir, target_dir)) as client:
        client.submit("drafted", prompt, 30, sampling, ignore_eos=True, policy=Policy.of(ChainSettings(depth=3)))
        client.submit("plain", prompt, 30, sampling, ignore_eos=True, speculate=False)
        results = client.wait()
    assert results["drafted"].tokens == results["plain"].tokens
    assert results["drafted"].counts is not None
    assert results["drafted"].counts.drafted > 0


def test_a_target_without_rotary_positions_is_refused_at_the_start(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    message = (
        "^drafter.kind token_select needs a target with rotary positions, and GPT2LMHeadModel has no rotary positions$"
    )
    with pytest.raises(DrafterError, match=message):
        initial(TokenSelectSettings(), tmp_path, tmp_path)


def drafter_of(sizes: SelectionSizes) -> TokenSelect:
    return TokenSelect(sizes, 3)


@pytest.mark.parametrize("name", ["block", "siblings"])
def test_drafts_over_selected_tokens_leave_the_law_alone(model: LlamaForCausalLM, name: str) -> None:
    drafter = drafter_of(SelectionSizes(initial=0, top=1, local=1, threshold=0.9))
    found = test_law.p_value(
        copy.deepcopy(model), SamplingParams(1.0), test_law.named(name), count=1000, drafter=drafter
    )
    assert found > 1e-4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", ["confidence", "block", "siblings", "traversal", "naive"])
def test_in_a_hundred_thousand_runs_drafts_over_selected_tokens_leave_the_law_alone(
    model: LlamaForCausalLM, name: str, temperature: float
) -> None:
    drafter = drafter_of(SelectionSizes(initial=0, top=1, local=1, threshold=0.9))
    policy, sampling = test_law.named(name), SamplingParams(temperature)
    assert test_law.p_value(model, sampling, policy, count=100_000, drafter=drafter) > 1e-4
