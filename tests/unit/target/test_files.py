"""Files of a target that are missing, damaged, or of another kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from docs.families import make_model
from osd.target.files import TargetError, check_files
from osd.target.load import load_tokenizer
from osd.target.model import load_model
from tests.tiny import tokenizer

Spoil = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model("qwen3", tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refusal(directory: Path) -> str:
    with pytest.raises(TargetError) as refused:
        check_files(directory, "NAME")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def shard(directory: Path) -> list[Path]:
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory, max_shard_size="100KB")
    (directory / "model.safetensors").unlink(missing_ok=True)
    return sorted(directory.glob("model-*.safetensors"))


def test_whole_and_sharded_weights_are_accepted(directory: Path) -> None:
    check_files(directory, "NAME")
    assert len(shard(directory)) > 2
    check_files(directory, "NAME")


def test_missing_shard_is_named(directory: Path) -> None:
    last = shard(directory)[-1]
    last.unlink()
    assert f"NAME lacks {last.name}, which model.safetensors.index.json names" in refusal(directory)


def test_number_of_missing_shards_is_named(directory: Path) -> None:
    first, second, *_ = shard(directory)
    first.unlink()
    second.unlink()
    assert f"lacks {first.name} and 1 more" in refusal(directory)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_damaged_index_is_refused(directory: Path, content: str) -> None:
    shard(directory)
    (directory / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json of NAME is damaged" in refusal(directory)


def test_pointer_of_git_lfs_is_refused(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 270000000\n"
    (directory / "model.safetensors").write_text(pointer)
    assert "model.safetensors of NAME is a pointer of Git LFS instead of weights" in refusal(directory)


def test_cut_weights_are_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors of NAME is damaged" in refusal(directory)


@pytest.mark.parametrize("base", [None, "org/base"])
def test_adapter_is_refused_with_its_base(tmp_path: Path, base: str | None) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").touch()
    assert ("is an adapter of org/base: merge it" if base else "is an adapter: merge it") in refusal(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4"])
def test_quantised_weights_are_refused_by_method(directory: Path, method: str) -> None:
    file = directory / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "quantization_config": {"quant_method": method, "bits": 4}}))
    assert f"is quantised by {method}, which osd does not read" in refusal(directory)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "is not JSON"), ("[]", "is not a JSON object"), (None, "holds no config.json")]
)
def test_unreadable_configuration_is_refused(directory: Path, content: str | None, reason: str) -> None:
    file = directory / "config.json"
    file.unlink() if content is None else file.write_text(content)
    assert reason in refusal(directory)


def drop_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def shrink_weight(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 64)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(drop_weight, "holds no weight model.layers.1.mlp.up_proj.weight"), (shrink_weight, "do not fit its config.json")],
)
def test_weights_that_do_not_fit_are_refused(directory: Path, spoil: Spoil, reason: str) -> None:
    spoil(directory)
    with pytest.raises(TargetError, match=reason):
        load_model(directory, "float32", "cpu")


def test_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="holds no tokenizer: copy"):
        load_tokenizer(make_model("qwen3", tmp_path))
