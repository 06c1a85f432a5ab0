"""Embedding and head of targets that our engine cannot run, and targets that only vLLM runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from docs.families import make_model
from osd.config import Settings
from osd.runtime.causal_lm import end_weights
from osd.target.ends import check_sizes, load_ends, read_ends
from osd.target.files import TargetError
from osd.target.load import target_directory
from tests.tiny import HIDDEN, VOCABULARY, make_tiny

QUANTISED = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
WEIGHTS = "model.safetensors"


def change_config(directory: Path, **fields: Any) -> Path:
    file = directory / "config.json"
    kept = {name: value for name, value in (json.loads(file.read_text()) | fields).items() if value is not None}
    file.write_text(json.dumps(kept))
    return directory


def change_weights(directory: Path, **names: str | None) -> Path:
    """Rename weights by the first part of their name; None removes them."""
    renamed = {}
    for name, value in load_file(directory / WEIGHTS).items():
        first, _, rest = name.partition(".")
        if (begin := names.get(first, first)) is not None:
            renamed[f"{begin}.{rest}"] = value
    save_file(renamed, directory / WEIGHTS, {"format": "pt"})
    return directory


def quantised(directory: Path) -> Path:
    """Write a Llama whose layers have packed weights, and whose head is its embedding."""
    weights = load_file(make_tiny(directory) / WEIGHTS)
    packed = {name: value.to(torch.int8) for name, value in weights.items() if "_proj" in name}
    whole = {name: value for name, value in weights.items() if name not in packed}
    save_file(
        whole | {name.replace(".weight", ".qweight"): value for name, value in packed.items()}, directory / WEIGHTS
    )
    return change_config(directory, **QUANTISED)


def settings(source: Path, **engine: Any) -> Settings:
    return Settings(target={"source": str(source)}, engine=engine)  # type: ignore[arg-type]


VLLM: dict[str, Any] = {"kind": "vllm", "vllm": {"python": "/python"}}


def test_ends_of_an_unknown_architecture_are_those_of_its_file(tmp_path: Path) -> None:
    directory = make_model("deepseek_v3", tmp_path)
    embedding, head = end_weights(load_ends(directory))
    weights = load_file(directory / WEIGHTS)
    assert embedding.equal(weights["model.embed_tokens.weight"].bfloat16())
    assert head.equal(weights["lm_head.weight"].bfloat16())
    assert not embedding.equal(head)


def test_head_of_a_quantised_target_can_be_its_embedding(tmp_path: Path) -> None:
    embedding, head = end_weights(load_ends(quantised(tmp_path)))
    assert embedding.shape == (VOCABULARY, HIDDEN)
    assert head.equal(embedding)


def test_ends_inside_a_larger_model_are_found(tmp_path: Path) -> None:
    directory = change_weights(
        make_model("deepseek_v3", tmp_path), model="model.language_model", lm_head="text.lm_head"
    )
    embedding, head = end_weights(read_ends(directory))
    assert embedding.shape == head.shape == (VOCABULARY, HIDDEN)


def test_ends_of_a_known_architecture_are_those_of_its_model(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path)
    for known, read in zip(end_weights(load_ends(directory)), end_weights(read_ends(directory)), strict=True):
        assert known.equal(read)


def refusal(directory: Path) -> str:
    with pytest.raises(TargetError) as refused:
        read_ends(directory)
    message = str(refused.value)
    assert "\n" not in message
    assert message.endswith(": set drafter.kind=none to serve it without drafts")
    return message


def test_missing_or_ambiguous_end_is_refused(tmp_path: Path) -> None:
    directory = make_model("deepseek_v3", tmp_path)
    change_weights(directory, lm_head="second.embed_tokens")
    assert f"has more than one embedding of [{VOCABULARY}, {HIDDEN}]" in refusal(directory)
    change_weights(directory, second=None)
    assert f"has no head of [{VOCABULARY}, {HIDDEN}]" in refusal(directory)
    change_weights(directory, model="renamed.parts")
    assert "has no head of" in refusal(directory)
    change_config(directory, vocab_size=VOCABULARY + 1)
    assert f"has no embedding of [{VOCABULARY + 1}, {HIDDEN}]" in refusal(directory)


def test_target_without_the_sizes_of_a_drafter_is_refused(tmp_path: Path) -> None:
    assert "has no num_attention_heads, and a drafter needs it" in refusal(make_model("mamba", tmp_path))


def test_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    change_config(make_tiny(tmp_path), model_type="no-such-model", auto_map={"AutoConfig": "code.Config"})
    assert "transformers cannot read config.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "diffllama", "mamba"])
def test_architecture_is_left_to_vllm(name: str, tmp_path: Path) -> None:
    directory = make_model(name, tmp_path)
    assert target_directory(settings(directory, **VLLM)) == directory


def test_quantised_weights_are_left_to_vllm(tmp_path: Path) -> None:
    directory = quantised(tmp_path)
    assert target_directory(settings(directory, **VLLM)) == directory
    assert check_sizes(directory).hidden_size == HIDDEN
    with pytest.raises(TargetError, match="is quantised by gptq, which osd does not read"):
        target_directory(settings(directory))


def test_length_of_a_context_is_left_to_vllm(tmp_path: Path) -> None:
    directory = make_model("phi3 with longrope", tmp_path)
    assert target_directory(settings(directory, **VLLM)) == directory
    with pytest.raises(TargetError, match=r"engine\.context is 2048"):
        target_directory(settings(directory, context=2048))


def test_damaged_files_are_refused_for_vllm_too(tmp_path: Path) -> None:
    directory = make_model("gpt_oss", tmp_path)
    file = directory / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TargetError, match="is damaged"):
        target_directory(settings(directory, **VLLM))
