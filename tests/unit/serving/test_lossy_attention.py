"""Attention of the target over selected tokens: its settings, its effect, and contexts beyond the trained length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from deploy.preparation import check_attention
from osd.config import ConfigError, NoDrafterSettings, SelectedAttentionSettings, Settings, load_settings
from osd.engine.build import make_engine
from osd.runtime.attention.selection import TokenSelection
from tests.tiny import tokenizer
from tests.unit.engine.harness import Client, Oracle, prompts, settings

ALLOWED = ["target.attention.kind=token_select", "serving.allow_lossy=true", "drafter.kind=none"]
FEW = SelectedAttentionSettings(initial=1, top=4, local=4)


INVALID = [
    (
        [ALLOWED[0], ALLOWED[2]],
        "serving.allow_lossy (the defaults) must be true for target.attention.kind token_select, which changes "
        "answers, not False",
    ),
    (
        ALLOWED[:2],
        "drafter.kind (the defaults) must be none for target.attention.kind token_select, because the tokens "
        "that it reads would depend on the draft, not mixed",
    ),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_lossy_attention_needs_its_settings(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, options, {})
    assert str(caught.value) == message


def test_lossy_attention_is_allowed_with_its_settings() -> None:
    assert load_settings(None, ALLOWED, {}).target.attention.selection == SelectedAttentionSettings()
    assert load_settings(None, ["serving.allow_lossy=true"], {}).target.attention.selection is None


def answers(directory: Path, inputs: list[list[int]], attention: Any, **more: Any) -> list[list[int]]:
    configured: Settings = settings(directory, **more)
    target = configured.target.model_copy(update={"attention": attention})
    configured = configured.model_copy(update={"target": target, "drafter": NoDrafterSettings()})
    engine = make_engine(configured, directory, tokenizer(), None, None)
    engine.start()
    client = Client(engine)
    try:
        for index, prompt in enumerate(inputs):
            client.submit(str(index), prompt, 12, ignore_eos=True)
            client.wait()
        return [client.results[str(index)].tokens for index in range(len(inputs))]
    finally:
        engine.stop()


def test_token_selection_changes_long_texts_only(tiny_target: Path) -> None:
    oracle, inputs = Oracle(tiny_target), prompts([4, 60], seed=3)
    short, long = answers(tiny_target, inputs, FEW.model_copy(update={"top": 30}))
    assert short == oracle.greedy(inputs[0], 12)
    assert long != oracle.greedy(inputs[1], 12)


def test_token_selection_restarts_in_a_reused_slot(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget, forgotten = TokenSelection.forget, []

    def record(self: TokenSelection, slot: int) -> None:
        forgotten.append(slot)
        forget(self, slot)

    monkeypatch.setattr(TokenSelection, "forget", record)
    first, second = prompts([60, 70], seed=3)
    alone = answers(tiny_target, [first], FEW, slots=1, prefix_cache=False)
    assert answers(tiny_target, [second, first], FEW, slots=1, prefix_cache=False)[1:] == alone
    assert forgotten == [0, 0, 0]


def test_selected_attention_extends_the_context(tiny_target: Path) -> None:
    """The tiny target has 1,024 positions."""
    (text,) = prompts([1200], seed=3)
    (answer,) = answers(tiny_target, [text], FEW, context=1300, chunk=128)
    assert len(answer) == 12


def test_token_selection_needs_rotary_positions(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    message = (
        "^target.attention.kind token_select needs a target with rotary positions, and GPT2LMHeadModel has no rotary"
    )
    with pytest.raises(ConfigError, match=message):
        check_attention(load_settings(None, ALLOWED, {}), tmp_path)
    check_attention(Settings(), tmp_path)
