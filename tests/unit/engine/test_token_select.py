"""Drafts by the target over selected tokens of the context."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from osd.config import TokenSelectSettings
from osd.drafting import DrafterError, initial
from osd.drafting.token_select import TokenSelectSession
from osd.metrics import SpeculationCounts
from tests.unit.engine.harness import Client, prompts, running

FEW = TokenSelectSettings(initial=1, top=2, local=2)
Goals = list[list[int]]


def ask(client: Client, goals: Goals) -> SpeculationCounts:
    """Submit greedy requests, compare the answers with transformers, and return the draft counts."""
    client.ask_greedily(goals)
    counters = client.engine.counters()
    assert counters.failed == 0
    assert counters.speculation().by_source.keys() <= {"token_select"}
    return counters.speculation()


def selecting(client: Client) -> TokenSelectSession:
    session = client.engine.pool.default.session
    assert isinstance(session, TokenSelectSession)
    return session


def test_unlimited_selection_drafts_are_right(target_dir: Path, goals: Goals) -> None:
    with running(target_dir, drafter=initial(TokenSelectSettings(), target_dir, target_dir)) as client:
        counts = ask(client, goals)
        assert selecting(client).selection.counts.tolist() == [0, 0]
    # Draft tokens after the end of a request count as drafted, not as accepted.
    assert counts.accepted > 0.8 * counts.drafted > 0


def test_acceptance_grows_with_the_selection(target_dir: Path, goals: Goals) -> None:
    rates = []
    for top in (1, 8, 24):
        sizes = TokenSelectSettings(initial=1, top=top, local=2)
        with running(target_dir, drafter=initial(sizes, target_dir, target_dir)) as client:
            counts = ask(client, goals)
        rates.append(counts.accepted / counts.drafted)
    assert rates[0] < rates[1] <= rates[2], rates


def test_selection_is_reset_for_a_new_sequence(target_dir: Path) -> None:
    """Opening a slot resets its selection, so that the first draft selects in every layer."""
    drafter, prompt = initial(FEW, target_dir, target_dir), prompts([40], seed=3)[0]
    with running(target_dir, drafter=drafter, slots=1) as client:
        selection = selecting(client).selection
        client.submit("first", prompt, 16, ignore_eos=True)
        client.wait()
        client.settled()
        assert selection.begins.all()
        selecting(client).open(0, prompt[0])
        assert not selection.begins.any()


def test_target_without_rotary_positions_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    message = (
        "^drafter.kind token_select needs a target with rotary positions, and GPT2LMHeadModel has no rotary positions$"
    )
    with pytest.raises(DrafterError, match=message):
        initial(TokenSelectSettings(), tmp_path, tmp_path)
