"""The target itself over selected tokens: where settings allow it by name, and then beyond its trained length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from deploy.preparation import check_attention
from osd.config import ConfigError, NoDrafterSettings, SelectedAttentionSettings, Settings, load_settings
from osd.engine.build import make_engine
from osd.runtime.attention.selection import TokenSelection
from serving.replica.replica import context_of
from tests.tiny import make_tiny, tokenizer
from tests.unit.engine.harness import Client, Oracle, prompts, settings

ALLOWED = ["target.attention.kind=token_select", "serving.allow_lossy=true", "drafter.kind=none"]
FEW = SelectedAttentionSettings(initial=1, top=4, local=4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"))


REFUSED = [
    (
        [ALLOWED[0], ALLOWED[2]],
        "serving.allow_lossy (the defaults) must be true for target.attention.kind token_select, whose answers are not "
        "the target's own, not False",
    ),
    (
        ALLOWED[:2],
        "drafter.kind (the defaults) must be none for target.attention.kind token_select, as what it reads would "
        "depend on the draft, not mixed",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_answers_that_are_not_the_targets_own_are_refused_by_name(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, given, {})
    assert str(caught.value) == message


def test_where_they_are_allowed_they_may_be_asked_for() -> None:
    assert load_settings(None, ALLOWED, {}).target.attention.selected == SelectedAttentionSettings()
    assert load_settings(None, ["serving.allow_lossy=true"], {}).target.attention.selected is None


def answers(directory: Path, asked: list[list[int]], attention: Any, **more: Any) -> list[list[int]]:
    made: Settings = settings(directory, **more)
    target = made.target.model_copy(update={"attention": attention})
    made = made.model_copy(update={"target": target, "drafter": NoDrafterSettings()})
    engine = make_engine(made, directory, tokenizer(), None, None)  # type: ignore[arg-type]
    engine.start()
    client = Client(engine)
    try:
        for index, prompt in enumerate(asked):
            client.submit(str(index), prompt, 12, ignore_eos=True)
            client.wait()
        return [client.results[str(index)].tokens for index in range(len(asked))]
    finally:
        engine.stop()


def test_short_texts_are_the_targets_own_and_long_ones_are_not(tiny: Path) -> None:
    oracle, asked = Oracle(tiny), prompts([4, 60], seed=3)
    short, long = answers(tiny, asked, FEW.model_copy(update={"top": 30}))
    assert short == oracle.greedy(asked[0], 12)
    assert long != oracle.greedy(asked[1], 12)


def test_a_sequence_chooses_anew_whatever_its_slot_held_before(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget, forgotten = TokenSelection.forget, []

    def told(self: TokenSelection, slot: int) -> None:
        forgotten.append(slot)
        forget(self, slot)

    monkeypatch.setattr(TokenSelection, "forget", told)
    one, other = prompts([60, 70], seed=3)
    alone = answers(tiny, [one], FEW, slots=1, prefix_cache=False)
    assert answers(tiny, [other, one], FEW, slots=1, prefix_cache=False)[1:] == alone
    assert forgotten == [0, 0, 0]


def test_contexts_may_be_longer_than_the_trained_one(tiny: Path) -> None:
    """The tiny target knows 1,024 tokens."""
    longer = Settings().model_copy(update={"engine": Settings().engine.model_copy(update={"context": 4096})})
    assert context_of(longer, tiny) == 1024
    target = longer.target.model_copy(update={"attention": FEW})
    assert context_of(longer.model_copy(update={"target": target}), tiny) == 4096
    (text,) = prompts([1200], seed=3)
    (answer,) = answers(tiny, [text], FEW, context=1300, chunk=128)
    assert len(answer) == 12


def test_a_target_without_rotary_positions_is_refused_at_the_start(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    message = (
        "^target.attention.kind token_select needs a target with rotary positions, and GPT2LMHeadModel has no rotary"
    )
    with pytest.raises(ConfigError, match=message):
        check_attention(load_settings(None, ALLOWED, {}), tmp_path)
    check_attention(Settings(), tmp_path)
