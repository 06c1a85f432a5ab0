"""Drafts and settings of recall inside vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from osd.vllm import RecallProposer
from osd.vllm.settings import SettingsError, VllmSettings
from tests.unit.vllm.batch import VOCABULARY, Batch, config


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in ("OSD_VLLM_MEGABYTES", "OSD_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(VOCABULARY, size=count).tolist()


def test_answer_is_drafted_for_the_next_request():
    batch = Batch(RecallProposer(config()))
    answer = tokens(40, 1)
    first, second = batch.run([7, *tokens(9, 2)], answer), batch.run([8, *tokens(9, 2)], answer)
    assert first < 0.1
    assert second > 2.5, "of three tokens"


def test_answer_that_repeats_its_prompt_is_drafted():
    batch = Batch(RecallProposer(config()))
    prompt = tokens(60, 1)
    assert batch.run([*prompt, 5, 6], [*prompt[:6], *prompt[6:]]) > 2.3


def test_drafts_are_limited_and_empty_during_prefill():
    proposer = RecallProposer(config(k=2))
    proposer.load_model(object())
    batch = Batch(proposer)
    batch.run(tokens(9, 2), tokens(40, 3))
    for number in range(3):
        batch.add([number, *tokens(9, 2)], tokens(40, 3))
    for _ in range(12):
        batch.step(reading=(1,))
        assert [len(draft) for draft in batch.drafts] == [len(batch.drafts[0]), 0, len(batch.drafts[2])]
        assert max(map(len, batch.drafts)) <= 2
    assert batch.accepted > 0
    assert all(type(token) is int for draft in batch.drafts for token in draft)


def test_text_follows_its_request_when_rows_move():
    """Each answer repeats its prompt, so the text of another request would give no accepted drafts."""
    batch = Batch(RecallProposer(config()))
    prompts = [tokens(80, seed) for seed in range(4)]
    for prompt in prompts:
        batch.add([*prompt, 3], prompt)
    for _ in range(8):
        batch.step()
    batch.end(0)
    batch.accepted = batch.rounds = 0
    batch.step()
    batch.swap(0, 2)
    while len(batch.answers) > 1:
        batch.step()
        for row in reversed(range(len(batch.answers))):
            if not batch.answers[row]:
                batch.end(row)
        batch.drafts = batch.drafts[: len(batch.answers)]
    assert batch.accepted / batch.rounds > 2.5


def test_steps_without_a_proposal_do_not_lose_the_text():
    batch = Batch(RecallProposer(config()))
    answer = tokens(60, 1)
    batch.run(tokens(10, 2), answer)
    batch.add(tokens(10, 2), answer)
    for number in range(9):
        batch.step(propose=number not in (3, 4))
    batch.accepted = batch.rounds = 0
    for _ in range(4):
        batch.step()
    assert batch.accepted / batch.rounds > 2.5


def test_draft_never_exceeds_the_context():
    proposer = RecallProposer(config(length=64))
    batch = Batch(proposer, length=64)
    answer = tokens(60, 1)
    batch.run(tokens(2, 2), answer)
    batch.add(tokens(10, 2), answer)
    while batch.lengths[0] < 63:
        batch.step()
        assert batch.lengths[0] + len(batch.drafts[0]) <= 63


def test_image_ids_are_not_drafted():
    batch = Batch(RecallProposer(config()))
    image = [*tokens(8, 1), VOCABULARY, VOCABULARY]
    batch.add([*image, *image[:6]], [*image[6:8], 1, 2, 3])
    for _ in range(3):
        batch.step()
        assert all(token < VOCABULARY for token in batch.drafts[0])
    assert batch.accepted


def test_only_the_first_tensor_parallel_process_learns():
    proposer = RecallProposer(config(rank=1, processes=2))
    batch = Batch(proposer)
    answer = tokens(30, 1)
    assert batch.run([1], answer) == batch.run([1], answer) == 0
    batch = Batch(RecallProposer(config(rank=2, processes=2)))
    batch.run([1], answer)
    assert batch.run([1], answer) > 2


@pytest.mark.parametrize("k", [0, -1, 65])
def test_invalid_number_of_speculative_tokens_is_refused(k):
    with pytest.raises(SettingsError, match=rf"^num_speculative_tokens must be from 1 to 64, not {k}$"):
        RecallProposer(config(k=k))


REFUSED = {
    ("OSD_VLLM_MEGABYTE", "64"): r"^OSD_VLLM_MEGABYTE is not a setting of osd\.vllm; its settings are OSD_VLLM_",
    **dict.fromkeys(
        (("OSD_VLLM_MEGABYTES", given) for given in ("7", "1000001", "many", "-5", "1.5", "", "²")),
        r"^OSD_VLLM_MEGABYTES must be a whole number from 8 to 1000000, not '",
    ),
    **dict.fromkeys(
        (("OSD_REDIS_URL", url) for url in ("redis:/hush", "http://hush:6379", "hush")),
        r"^OSD_REDIS_URL is not a Redis URL; expected redis://",
    ),
}


@pytest.mark.parametrize(("name", "given"), REFUSED)
def test_invalid_setting_is_refused_without_the_password(monkeypatch, name, given):
    monkeypatch.setenv(name, given)
    with pytest.raises(SettingsError, match=REFUSED[name, given]) as refused:
        RecallProposer(config())
    assert "hush" not in str(refused.value)


def test_too_little_memory_is_refused_with_the_needed_megabytes(monkeypatch):
    monkeypatch.setenv("OSD_VLLM_MEGABYTES", "8")
    refused = r"^OSD_VLLM_MEGABYTES must be at least (\d+) for max_num_seqs 256, not 8$"
    with pytest.raises(SettingsError, match=refused) as error:
        RecallProposer(config(rows=256))
    monkeypatch.setenv("OSD_VLLM_MEGABYTES", str(error.value).split()[5])
    RecallProposer(config(rows=256))


def test_settings_come_from_the_environment():
    assert VllmSettings.from_environment({}) == VllmSettings(512, None)
    given = {"OSD_VLLM_MEGABYTES": "64", "OSD_REDIS_URL": "redis://h", "OSD_HOME": "/h", "OSD_VLLMX": "1"}
    assert VllmSettings.from_environment(given) == VllmSettings(64, "redis://h")


def test_empty_batch_gives_no_drafts():
    empty = np.zeros((4, 512), np.int32)
    assert RecallProposer(config()).propose([], empty[:, 0], empty, slot_mappings={}) == []
