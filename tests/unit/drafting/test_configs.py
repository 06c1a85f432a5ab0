"""Invalid configurations of versions and settings are refused in one line that names the field."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.config import DRAFTER_SETTINGS, ConfigError, load_settings
from osd.drafting import DRAFTERS, DrafterError, from_config, initial
from osd.target.model import load_part
from tests.tiny import make_tiny

SETTINGS: dict[str, dict[str, Any]] = {
    **{kind: {"vocabulary": 64} for kind in ("dspark", "eagle", "early_exit", "falcon", "medusa")},
    "kangaroo": {"vocabulary": 64, "exit_layer": 1},
    "language_model": {"layers": 2, "prompt_tokens": 2},
    **{kind: {} for kind in ("prompt_tokens", "recall", "token_select")},
}
ODD: list[Any] = [-1, 1.5, "x", None, [1, "a"], 10**8]
FREE = {("eps", 1.5), ("eps", 10**8), ("rope_theta", 1.5), ("rope_theta", 10**8)}
"""Valid combinations of a field and a value of ``ODD``."""

OF_MODEL = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


@pytest.fixture(scope="module")
def configs(target_dir: Path) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    first = [initial(DRAFTER_SETTINGS[kind](**fields), target_dir, target_dir) for kind, fields in SETTINGS.items()]
    return {kind: json.loads(json.dumps(drafter.config())) for kind, drafter in zip(SETTINGS, first, strict=True)}


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the target only once, since no test changes it."""
    cached = functools.cache(load_part)
    for kind in SETTINGS.keys() - {"recall", "token_select"}:
        monkeypatch.setattr(f"{DRAFTERS[kind].__module__}.load_part", cached)


def refusal(config: dict[str, Any], target_dir: Path) -> str:
    with pytest.raises(DrafterError) as caught:
        from_config(config, target_dir)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def test_settings_cover_every_kind() -> None:
    assert SETTINGS.keys() == DRAFTERS.keys()


@pytest.mark.parametrize("kind", SETTINGS)
def test_config_with_an_invalid_field_is_refused(
    configs: dict[str, dict[str, Any]], target_dir: Path, kind: str
) -> None:
    for name in sorted(configs[kind].keys() - {"kind"}):
        for value in ODD:
            if isinstance(value, list) or (name, value) not in FREE:
                message = refusal({**configs[kind], name: value}, target_dir)
                assert name.split("_")[0] in message or "another target" in message, (name, value, message)
    assert "surprise" in refusal({**configs[kind], "surprise": 1}, target_dir)
    assert "must be true or false" in refusal({**configs[kind], "acceptance_head": "x"}, target_dir)


@pytest.mark.parametrize("name", OF_MODEL)
def test_config_with_an_invalid_model_size_is_refused(
    configs: dict[str, dict[str, Any]], target_dir: Path, name: str
) -> None:
    for value in (-1, 1.5, "x", 10**8):
        config = copy.deepcopy(configs["language_model"])
        config["model"][name] = value
        refusal(config, target_dir)


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("dspark", {"block": 65}, "block is 65, but must be at most 64"),
    ("dspark", {"layers": 9}, "layers is 9, but must be at most 8"),
    ("dspark", {"mask": 257}, "is for another target: its mask is 257, not 258"),
    ("eagle", {"kv_heads": 3}, "heads is 4, but must be a multiple of kv_heads, which is 3"),
    ("eagle", {"taps": [0, 2, 9]}, r"taps is \[0, 2, 9\], but must name layers of the target, from 0 to 3"),
    ("eagle", {"tap_norm": "some"}, "tap_norm is 'some', but must be one of each, joint, none"),
    ("eagle", {"heads": 1 << 18}, r"heads times head_dim is 4194304, but must be at most 131072"),
    ("eagle", {"kind": "oracle"}, "'oracle' is not one of dspark, eagle, early_exit, falcon, kangaroo, "),
    ("eagle", {"target_vocabulary": 260}, r"the target's embedding is \[259, 64\], the drafter is for another target"),
    ("eagle", {"heads": "4"}, "heads is '4', but must be a whole number of at least 1"),
    ("eagle", {"head_dim": 15}, "head_dim is 15, but must be even"),
    ("eagle", {"vocabulary": 10**12}, "vocabulary is 1000000000000, but must be at most 259, the target's"),
    ("early_exit", {"exits": [9]}, r"is for another target: its exits is \[9\], not \[3\]"),
    ("falcon", {"heads": 3}, "is for another target: its heads is 3, not 4"),
    ("kangaroo", {"hidden": 63}, r"the target's head is \[259, 64\], the drafter is for another target"),
    ("prompt_tokens", {"rows": 2}, "rows is 2, but must be at least 3 for 3 tokens of 1 copies"),
    ("medusa", {"surprise": 1}, "does not describe a medusa drafter: surprise is unknown"),
    ("kangaroo", {"exit_layer": 4}, "exit_layer is 4, but must be from 1 to 3: the target has 4 layers"),
    ("kangaroo", {"rope_theta": float("nan")}, "rope_theta is nan, but must be a number above 0"),
    ("falcon", {"block": 65}, "block is 65, but must be at most 64"),
    ("token_select", {"local": 0}, "local is 0, but must be a whole number of at least 1"),
    ("token_select", {"threshold": 1.5}, "threshold is 1.5, but must be a number from 0 to 1"),
    ("medusa", {"heads": True}, "heads is True, but must be a whole number of at least 1"),
    ("language_model", {"shared": 1}, "shared is 1, but must be true or false"),
    ("language_model", {"model": {"model_type": "x"}}, "model.model_type is 'x', which transformers does not have"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), ERRORS, ids=[f"{kind} {[*of]}" for kind, of, _ in ERRORS])
def test_config_error_names_the_wrong_field(
    configs: dict[str, dict[str, Any]], target_dir: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        from_config({**configs[kind], **change}, target_dir)


def test_config_with_indivisible_heads_is_refused(configs: dict[str, dict[str, Any]], target_dir: Path) -> None:
    config = copy.deepcopy(configs["language_model"])
    config["model"]["num_key_value_heads"] = 3
    with pytest.raises(DrafterError, match=r"^heads is 4, but must be a multiple of kv_heads, which is 3$"):
        from_config(config, target_dir)


@pytest.mark.parametrize("kind", ["falcon", "medusa", "prompt_tokens"])
def test_config_of_another_target_is_refused(configs: dict[str, dict[str, Any]], tmp_path: Path, kind: str) -> None:
    with pytest.raises(DrafterError, match="is for another target: its layers is 4, not 2"):
        from_config(configs[kind], make_tiny(tmp_path, layers=2))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("dspark", "rank", 9),
        ("kangaroo", "exit_layer", 3),
        ("falcon", "block", 3),
        ("language_model", "prompt_tokens", 3),
    ],
)
def test_settings_name_a_kind_with_and_without_recall(kind: str, name: str, value: int) -> None:
    alone = load_settings(None, [f"drafter.kind={kind}", f"drafter.{name}={value}"], {}).drafter
    beside = load_settings(None, [f"drafter.trained.kind={kind}", f"drafter.trained.{name}={value}"], {}).drafter
    assert (alone.kind, getattr(alone, name)) == (kind, value)
    assert beside.distilled == alone


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["kind=dspark", "layers=3"], r"drafter\.layers \(--set\) must be at most 2, not 3"),
        (["kind=dspark", "block=9"], r"drafter\.block \(--set\) must be at most 8, not 9"),
        (["kind=kangaroo", "exit_layer=0"], r"drafter\.exit_layer \(--set\) must be at least 1, not 0"),
        (["kind=kangaroo", "layers=2"], r"drafter\.layers .* is not read by kind kangaroo"),
        (["kind=falcon", "block=1"], r"drafter\.block \(--set\) must be at least 2, not 1"),
        (["kind=falcon", "block=5"], r"drafter\.block \(--set\) must be at most 4, not 5"),
        (["kind=language_model", "prompt_tokens=9"], r"drafter\.prompt_tokens \(--set\) must be at most 8, not 9"),
        (
            ["kind=prompt_tokens", "copies=2", "rows=5"],
            r"drafter\.rows \(--set\) must be at least tokens times copies, 6",
        ),
    ],
)
def test_settings_out_of_range_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, [f"drafter.{override}" for override in overrides], {})


def test_growth_deeper_than_a_block_is_refused() -> None:
    overrides = ["drafter.kind=dspark", "growth.kind=chain"]
    with pytest.raises(ConfigError, match=r"growth\.depth .*must go at most drafter\.block 4 tokens deep"):
        load_settings(None, [*overrides, "growth.depth=5"], {})
    assert load_settings(None, [*overrides, "growth.depth=5", "drafter.block=5"], {}).growth.depth_limit == ("depth", 5)


def test_growth_deeper_than_prompt_tokens_is_refused() -> None:
    overrides = ["drafter.kind=prompt_tokens", "growth.kind=chain"]
    settings: Any = load_settings(None, overrides, {}).drafter
    assert (settings.tokens, settings.copies) == (3, 1)
    with pytest.raises(ConfigError, match=r"growth\.depth .*must go at most drafter\.tokens 3 tokens deep"):
        load_settings(None, [*overrides, "growth.depth=4"], {})
