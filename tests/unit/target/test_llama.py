"""Our loader of Llama-shaped models, compared with transformers on the same directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from osd.runtime.batch import consecutive_rows
from osd.runtime.causal_lm import inverse_frequencies
from osd.runtime.model import SlotModel, eos_ids
from osd.runtime.native import kernels
from osd.target.llama import LlamaWeights, read_config
from osd.target.load import load_tokenizer
from osd.target.model import check_rotary, load_config, load_model, load_served, load_weights

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": [2, 3],
    "pad_token_id": 0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}),
    "llama with biases and one table": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama with wide heads": ("llama", {"head_dim": 16}),
    "llama 3": ("llama", {"rope_parameters": _LLAMA3}),
    "stretched llama": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama with yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
}
_READ = (
    *SIZES, "head_dim", "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings", "hidden_act",
    "dtype", "model_type",
)  # fmt: skip


def write(directory: Path, kind: str = "llama", **settings: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(directory)
    return directory


def edit(directory: Path, **fields: Any) -> None:
    """Set fields of ``config.json`` and remove fields that are None."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, settings = SHAPES[request.param]
    return write(tmp_path_factory.mktemp("model"), kind, **settings)


def test_read_config_equals_that_of_transformers(directory: Path) -> None:
    config, theirs = read_config(directory), AutoConfig.from_pretrained(directory)
    wanted = {name: getattr(theirs, name, None) for name in _READ}
    wanted["head_dim"] = wanted["head_dim"] or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    assert {name: getattr(config, name) for name in _READ} == wanted
    assert load_config(directory).get_text_config() is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "auto"])
def test_load_weights_equals_the_model_of_transformers(directory: Path, dtype: str) -> None:
    loaded, theirs = load_weights(directory, dtype, "cpu"), load_model(directory, dtype, "cpu")
    assert isinstance(loaded, LlamaWeights)
    assert loaded.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert loaded.state_dict()[name].dtype == value.dtype
        assert torch.equal(loaded.state_dict()[name], value), name
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == (theirs.lm_head.weight is theirs.model.embed_tokens.weight)
    places, x = torch.arange(200)[None], torch.empty(1, 1, 1)
    for got, goal in zip(loaded.model.rotary_emb(x, places), theirs.model.rotary_emb(x, places), strict=True):
        assert torch.equal(got, goal)
    torch.testing.assert_close(inverse_frequencies(loaded), inverse_frequencies(theirs))
    assert eos_ids(loaded) == eos_ids(theirs) == {2, 3}
    assert check_rotary(directory) == 3


@pytest.mark.skipif(kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize("weights", ["full", "int8"])
def test_load_served_computes_the_logits_of_transformers(directory: Path, weights: str) -> None:
    served = load_served(directory, "bfloat16", "cpu")
    assert isinstance(served, LlamaWeights)
    logits = []
    for model in (served, load_model(directory, "bfloat16", "cpu")):
        slots = SlotModel(model, slots=1, context=64, scratch=8, weights=weights)
        logits.append(slots.forward(consecutive_rows(0, 0, list(range(5, 45))), torch.arange(40)).logits)
    assert torch.equal(*logits)


def test_load_served_without_kernels_uses_transformers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.runtime.fused.kernels", lambda: None)
    assert not isinstance(load_served(directory, "bfloat16", "cpu"), LlamaWeights)


def test_load_weights_reads_sharded_files(tmp_path: Path) -> None:
    tensors = load_file(write(tmp_path) / "model.safetensors")
    half = len(tensors) // 2
    parts = {
        "model-00001-of-00002.safetensors": list(tensors)[:half],
        "model-00002-of-00002.safetensors": list(tensors)[half:],
    }
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    loaded = load_weights(tmp_path, "auto", "cpu")
    assert isinstance(loaded, LlamaWeights)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    "fields",
    [
        {"rms_norm_eps": None},
        {"eos_token_id": None},
        {"architectures": None},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "olmo2"},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},  # no field about the window
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
    ],
)
def test_read_config_of_another_architecture_returns_none(tmp_path: Path, fields: dict[str, Any]) -> None:
    write(tmp_path)
    assert read_config(tmp_path) is not None
    edit(tmp_path, **fields)
    assert read_config(tmp_path) is None


@pytest.mark.parametrize("change", ["another name", "one too many", "one missing", "another size"])
def test_load_weights_with_other_layout_uses_transformers(tmp_path: Path, change: str) -> None:
    tensors = load_file(write(tmp_path) / "model.safetensors")
    norm = tensors["model.norm.weight"].clone()
    if change in ("another name", "one missing"):
        del tensors["model.norm.weight"]
    if change in ("another name", "one too many"):
        tensors["norm.weight"] = norm
    if change == "another size":
        tensors["model.norm.weight"] = norm[1:].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded_whole: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("osd.target.model.load_model", lambda directory, *_: loaded_whole.append(directory))
        load_weights(tmp_path, "auto", "cpu")
    assert loaded_whole == [tmp_path]


@pytest.mark.parametrize("named", ["TokenizersBackend", None])
def test_load_tokenizer_equals_that_of_transformers(tiny_target: Path, tmp_path: Path, named: str | None) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).write_bytes((tiny_target / file).read_bytes())
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert fields["tokenizer_class"] == "TokenizersBackend"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields | {"tokenizer_class": named}))
    loaded, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is type(theirs)
    assert loaded("Größe <s>")["input_ids"] == theirs("Größe <s>")["input_ids"]
    assert loaded.chat_template == theirs.chat_template


@pytest.mark.skipif(kernels() is None, reason="the kernels are not built")
def test_engine_start_imports_no_modelling_code(tiny_target: Path, tmp_path: Path) -> None:
    """Check the imports of an engine start: the modelling code takes seconds and more than 100 MB in each replica."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from osd import drafting\n"
        "from osd.config import Settings\n"
        "from osd.target.load import load_tokenizer\n"
        "from osd.engine.build import InitialDrafter, make_engine\n"
        "target, versions = Path(sys.argv[1]), json.loads(sys.argv[2])\n"
        "settings = Settings(target={'source': str(target)}, engine={'slots': 1, 'context': 64, 'threads': 1})\n"
        "made = [drafting.served(drafting.from_config(version, target), settings) for version in versions]\n"
        "engine = make_engine(settings, target, load_tokenizer(target), InitialDrafter(made[0], 1), None)\n"
        "engine.start(); engine.stop()\n"
        "heavy = ('transformers.modeling_utils', 'transformers.generation.utils', 'torch._dynamo', 'sympy', 'scipy')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    from osd import drafting
    from osd.config import Settings

    chosen = [Settings(drafter={"kind": kind}).drafter for kind in ("dspark", "eagle", "kangaroo", "medusa", "falcon")]
    versions = [drafting.initial(drafter, tiny_target, tmp_path).config() for drafter in chosen]
    command = [sys.executable, "-c", code, str(tiny_target), json.dumps(versions)]
    assert subprocess.check_output(command, text=True) == "[]\n"
