"""Limit on the length of a text: the setting, the model or the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs.families import make_model
from osd.config import SelectedAttentionSettings, Settings
from osd.engine.build import make_engine
from osd.runtime.kv_cache import heads_of, slot_bytes
from osd.target import context
from osd.target.context import context_of, describe_context
from osd.target.load import load_tokenizer
from osd.target.model import load_config
from tests.tiny import make_tiny

LONG = 32_768


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target with many positions; in float32 a position takes 1 KiB."""
    return make_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=LONG)


def settings(**engine: Any) -> Settings:
    return Settings.model_validate({"target": {"dtype": "float32", "device": "cpu"}, "engine": engine})


def test_default_is_the_length_of_the_model(long: Path, tiny_target: Path) -> None:
    assert context_of(settings(slots=1), long) == LONG
    assert context_of(settings(), tiny_target) == 1024
    assert describe_context(settings(), tiny_target) == (
        "1,024 tokens for a prompt with its completion: the length of the model"
    )


def test_default_is_the_length_with_fixed_angles(tmp_path: Path) -> None:
    assert context_of(settings(), make_model("phi3 with longrope", tmp_path)) == 64


def test_setting_is_limited_by_the_positions_of_the_model(tiny_target: Path) -> None:
    assert context_of(settings(context=300), tiny_target) == 300
    assert context_of(settings(context=4096), tiny_target) == 1024
    selective = settings(context=4096).target.model_copy(update={"attention": SelectedAttentionSettings()})
    assert context_of(settings(context=4096).model_copy(update={"target": selective}), tiny_target) == 4096
    assert describe_context(settings(context=300), tiny_target).endswith(": engine.context")


@pytest.mark.parametrize("slots", [1, 5])
def test_all_slots_fit_a_quarter_of_the_memory(slots: int, long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "usable_memory", lambda: slots * (64 << 20))
    chosen, config = settings(slots=slots), load_config(long)
    tokens, heads = context_of(chosen, long), heads_of(config)

    def taken(tokens: int) -> int:
        places = tokens + chosen.engine.max_draft + 1
        return slots * slot_bytes(config.num_hidden_layers, heads[0], places, 4 * heads[1])

    assert taken(tokens) <= slots * (16 << 20) < taken(tokens + 256)
    assert describe_context(chosen, long).endswith(": limited by the memory; the model allows 32,768 (engine.context)")


def test_little_memory_still_leaves_the_usual_length(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "usable_memory", lambda: 1 << 20)
    assert context_of(settings(), long) == 2048


def test_engine_starts_with_any_budget_of_two_requests(long: Path) -> None:
    for megabytes in (8, 9, 21):
        chosen = settings(kv_mb=megabytes, slots=2)
        assert ": limited by engine.kv_mb; the model allows 32,768" in describe_context(chosen, long)
        engine = make_engine(chosen, long, load_tokenizer(long), None, None)
        assert engine.target.context == context_of(chosen, long) >= 2048
