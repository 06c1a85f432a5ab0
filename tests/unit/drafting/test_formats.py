"""Export and import in the formats of other libraries, compared with their definitions."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from osd.drafting.base import DrafterError
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.formats import FORMATS, ExportOrigin, FormatError, read, write
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.medusa import Medusa
from osd.drafting.session import CommittedTokens, Runtime
from tests.tiny import HIDDEN, VOCABULARY, loaded

VARIANTS = [
    {},
    {"tap_norm": "none"},
    {"tap_norm": "joint", "residual_norm": True},
    {"tap_norm": "joint", "residual_norm": True, "output_norm": True},
    {"tap_norm": "each", "output_norm": True},
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]  # fmt: skip


@pytest.fixture
def target(target_dir):
    return loaded(target_dir)


def make_eagle(target, vocabulary=100, seed=0, **variant):
    made = Eagle.from_target(target, vocabulary)
    drafter = Eagle(replace(made.shape, **variant), made.embedding, made.target_head)
    drafter.load_weights(made.weights())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    counts = torch.rand(VOCABULARY)
    drafter.adapt_vocabulary(counts)
    return drafter


def make_batch(seed=0, length=12):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (1, length), generator=generator)
    return SimpleNamespace(
        token_ids=tokens,
        lengths=torch.tensor([length]),
        hidden=torch.randn(1, length, 3 * HIDDEN, generator=generator),
        sequence=torch.zeros(length - 5, dtype=torch.int64),
        place=torch.arange(5, length),
    )


def origin(target_dir, version=3):
    return ExportOrigin("general", version, "some/target", target_dir, 4)


@torch.inference_mode()
def eagle3(folder, embedding, batch, depth):
    """Return the logits of EAGLE-3 by the definition of the format, draft by draft and token by token."""
    config, w = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    layer = LlamaConfig(**config["transformer_layer_config"])
    eps, dim = layer.rms_norm_eps, layer.head_dim
    rotary, mlp = LlamaRotaryEmbedding(layer), LlamaMLP(layer)
    names = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    mlp.load_state_dict({name: w[f"layers.0.mlp.{name}"] for name in names})

    def norm(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    hidden = batch.hidden[0]
    if config["fc_norm"]:
        hidden = torch.cat([norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(hidden.chunk(3, -1))], -1)
    if config["norm_before_fc"]:
        hidden = norm(hidden, w["input_norm.weight"])
    fused = hidden @ w["fc.weight"].T

    def step(tokens, features):
        """Run the layer over (token, feature) pairs; return the next feature and logits of the last pair."""
        normed = norm(features, w["layers.0.hidden_norm.weight"])
        x = torch.cat([norm(embedding[tokens].float(), w["layers.0.input_layernorm.weight"]), normed], -1)
        q, k, v = (
            (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(0, 1)[None]
            for name in "qkv"
        )
        cos, sin = rotary(x[None], torch.arange(len(tokens))[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        residual = normed if config["norm_before_residual"] else features
        x = residual + mixed @ w["layers.0.self_attn.o_proj.weight"].T
        x = x + mlp(norm(x, w["layers.0.post_attention_layernorm.weight"]))
        output = norm(x[-1], w["norm.weight"])
        return output if config["norm_output"] else x[-1], output @ w["lm_head.weight"].T

    result = []
    for place in batch.place.tolist():
        row = []
        for d in range(depth):  # the prediction of ``place`` by a draft that started d tokens earlier
            known = place - 1 - d  # pairs of the target's own features
            features = fused[:known]
            for end in range(known, place):
                feature, logits = step(batch.token_ids[0, 1 : end + 1], features)
                features = torch.cat([features, feature[None]])
            row.append(logits)
        result.append(torch.stack(row))
    return torch.stack(result, 1)  # [depth, N, vocabulary]


@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_export_is_eagle_3_and_reads_back(target, target_dir, tmp_path, variant):
    drafter = make_eagle(target, **variant)
    write(drafter, "speculators", origin(target_dir), tmp_path / "out")
    batch = make_batch()
    with torch.inference_mode():
        ours = torch.stack(drafter.unroll(batch, 3))
    torch.testing.assert_close(eagle3(tmp_path / "out", drafter.embedding, batch, 3), ours, rtol=1e-4, atol=1e-4)
    name, back = read(tmp_path / "out", target_dir)
    assert (name, back.config()) == ("speculators", drafter.config())
    assert torch.equal(back.draft_ids, drafter.draft_ids)
    with torch.inference_mode():
        assert torch.equal(torch.stack(back.unroll(batch, 3)), ours)


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("variant", [VARIANTS[1], {**VARIANTS[1], **VARIANTS[5]}])
def test_head_in_the_layout_of_its_authors_reads_back(target, target_dir, tmp_path, variant, old_names):
    drafter, out = make_eagle(target, **variant), tmp_path / "out"
    write(drafter, "speculators", origin(target_dir), out)
    (out / "osd.json").unlink()
    config = json.loads((out / "config.json").read_text())
    layer, ids = config["transformer_layer_config"], config["eagle_aux_hidden_state_layer_ids"]
    if old_names:
        scaling = layer.pop("rope_parameters")
        theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
        layer |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **scaling}}
    flat = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config["draft_vocab_size"]}
    flat["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [id - 1 for id in ids]}
    (out / "config.json").write_text(json.dumps(flat))
    tensors = load_file(out / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    _, back = read(out, target_dir)
    batch = make_batch()
    with torch.inference_mode():
        assert torch.equal(torch.stack(back.unroll(batch, 3)), torch.stack(drafter.unroll(batch, 3)))


def test_pickled_head_is_refused_with_advice(target_dir, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FormatError, match="which can contain code, to safetensors"):
        read(tmp_path, target_dir)


@pytest.mark.parametrize("variant", VARIANTS)
def test_imported_variant_drafts_like_in_training(target, variant):
    from osd.verification.tree import ROOT, TreeBuilder

    drafter = make_eagle(target, **variant)
    session = drafter.session(Runtime(1, 32, 8))
    batch = make_batch(2)
    tokens = batch.token_ids[0]
    session.open(0, int(tokens[0]))
    session.commit(0, CommittedTokens(tokens[1:].tolist(), batch.hidden[0, :-1]))
    builder = TreeBuilder(1, 2, session.support)
    logits = session.expand([0], builder, torch.tensor([0]), torch.tensor([ROOT]))
    batch.sequence, batch.place = torch.zeros(1, dtype=torch.int64), torch.tensor([12])
    batch.token_ids = torch.cat([batch.token_ids, torch.zeros(1, 1, dtype=torch.int64)], 1)
    batch.hidden = torch.cat([batch.hidden, torch.zeros(1, 1, 3 * HIDDEN)], 1)
    with torch.inference_mode():
        expected = drafter.unroll(batch, 1)[0]
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)


def test_full_vocabulary_is_exported_without_maps(target, target_dir, tmp_path):
    drafter = make_eagle(target, vocabulary=VOCABULARY)
    write(drafter, "speculators", origin(target_dir), tmp_path / "out")
    assert not {"t2d", "d2t"} & load_file(tmp_path / "out" / "model.safetensors").keys()
    assert torch.equal(read(tmp_path / "out", target_dir)[1].draft_ids, torch.arange(VOCABULARY))


def test_speculators_config_has_the_fields_of_vllm(target, target_dir, tmp_path):
    drafter = make_eagle(target)
    write(drafter, "speculators", origin(target_dir), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "some/target", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (method,) = config["speculators_config"]["proposal_methods"]
    assert method["proposal_type"] == config["speculators_config"]["default_proposal_method"]
    assert method["speculative_tokens"] == 4
    assert config["eagle_aux_hidden_state_layer_ids"] == [tap + 1 for tap in drafter.needs.taps]
    assert (config["fc_norm"], config["norm_before_residual"], config["draft_vocab_size"]) == (True, False, 100)
    assert config["transformer_layer_config"]["vocab_size"] == VOCABULARY


@pytest.mark.parametrize("taps", [(0, 2, 2), (2, 0, 1)])
def test_vllm_refuses_layers_that_are_equal_or_unordered(target, taps):
    drafter = make_eagle(target, taps=taps)
    with pytest.raises(FormatError, match=r"the states of each layer once, in ascending order"):
        FORMATS["speculators"].in_vllm(drafter, 4)


def test_vocabulary_change_keeps_imported_head_rows(target):
    drafter = make_eagle(target)
    before, head = drafter.draft_ids, drafter.head.weight.clone() + 1.0
    drafter.head.weight.data.copy_(head)
    counts = torch.zeros(VOCABULARY)
    kept = before[::2]
    counts[kept] = 1.0
    drafter.adapt_vocabulary(counts)
    for number in kept.tolist():
        row = drafter.head.weight[(drafter.draft_ids == number).nonzero().item()]
        assert torch.equal(row, head[(before == number).nonzero().item()])
    new = next(number for number in drafter.draft_ids.tolist() if number not in before.tolist())
    row = drafter.head.weight[(drafter.draft_ids == new).nonzero().item()]
    assert torch.equal(row, drafter.target_head[new].float())


@pytest.mark.parametrize("layers", [1, 2])
def test_transformers_export_loads_and_reads_back(target, target_dir, tmp_path, layers):
    drafter = LanguageModel.first_layers(target, layers)
    with torch.no_grad():
        for parameter in drafter.model.get_decoder().layers.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    write(drafter, "transformers", origin(target_dir), tmp_path / "out")
    tokens = make_batch().token_ids
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    name, back = read(tmp_path / "out", target_dir)
    assert name == "transformers"
    assert back.shared
    assert set(back.weights()) == set(drafter.weights())
    with torch.inference_mode():
        ours = drafter.model(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, ours, rtol=1e-5, atol=1e-5)
        assert torch.equal(back.model(tokens).logits, ours)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_export_in_an_unsuitable_format_is_refused(target, target_dir, tmp_path):
    with pytest.raises(
        FormatError, match="transformers does not support eagle drafters; export it with --format speculators"
    ):
        write(make_eagle(target), "transformers", origin(target_dir), tmp_path / "out")
    with pytest.raises(FormatError, match="speculators does not support language_model drafters"):
        write(LanguageModel.first_layers(target, 1), "speculators", origin(target_dir), tmp_path / "out")
    with pytest.raises(
        FormatError, match="speculators does not support medusa drafters; export it with --format medusa"
    ):
        write(Medusa(target, 2, 100), "speculators", origin(target_dir), tmp_path / "out")
    for name in FORMATS:
        with pytest.raises(
            FormatError, match=f"^{name} does not support kangaroo drafters; no format does, and vLLM cannot load it$"
        ):
            write(Kangaroo.from_target(target, 100, 1), name, origin(target_dir), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def random_medusa(target):
    torch.manual_seed(2)
    drafter = Medusa(target, 3, 100)
    for parameter in drafter.trained().values():
        parameter.data.normal_(0, 0.2)
    drafter.adapt_vocabulary(torch.rand(VOCABULARY))
    return drafter


def test_medusa_export_has_the_original_layout(target, target_dir, tmp_path):
    drafter, out = random_medusa(target), tmp_path / "out"
    write(drafter, "medusa", origin(target_dir), out)
    config = json.loads((out / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert (config["model_type"], config["vocab_size"], config["hidden_size"]) == ("medusa", VOCABULARY, 64)
    assert config["original_lm_head"], "there is one output head"
    assert config["medusa_fc_bias"]
    assert FORMATS["medusa"].in_vllm(drafter, 7) == {"method": "medusa", "num_speculative_tokens": 3}
    tensors = load_file(out / "medusa_lm_head.safetensors")
    assert torch.equal(tensors["0.1.weight"], drafter.target_head)
    for head in range(3):  # a block of nn.Sequential(ResBlock, output head), and the target's own output head
        x = torch.randn(5, 64)
        block = torch.nn.functional.linear(x, tensors[f"{head}.0.linear.weight"], tensors[f"{head}.0.linear.bias"])
        ours = torch.nn.functional.linear(x, drafter.weight[head], drafter.bias[head])
        assert torch.equal(block, ours.detach())
    name, back = read(out, target_dir)
    assert (name, back.config()) == ("medusa", drafter.config())
    for name, tensor in back.weights().items():
        assert torch.equal(tensor, drafter.weights()[name])


def trained_elsewhere(target, folder, change=lambda tensors: None, **config):
    """Write heads like Medusa's code: without maps, and with the original output heads."""
    folder.mkdir()
    head = target.get_output_embeddings().weight.detach()
    tensors = {f"{i}.0.linear.weight": torch.full((64, 64), float(i)) for i in range(2)}
    tensors |= {f"{i}.0.linear.bias": torch.ones(64) for i in range(2)}
    tensors |= {f"{i}.1.weight": head.clone() for i in range(2)}
    change(tensors)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1} | config))
    return folder


def test_imported_medusa_heads_use_the_target_head(target, target_dir, tmp_path):
    name, drafter = read(trained_elsewhere(target, tmp_path / "in"), target_dir)
    assert name == "medusa"
    assert drafter.levels == 2
    assert drafter.draft_ids.tolist() == list(range(VOCABULARY))
    assert drafter.weights()["weight"][1].eq(1).all()


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: t["1.1.weight"].add_(1), {}, "1.1.weight must equal the target's head"),
        (lambda t: t.pop("1.0.linear.bias"), {}, "1.0.linear.bias is missing"),
        (lambda t: t.update({"1.0.linear.weight": torch.ones(8, 8)}), {}, r"1.0.linear.weight has shape \[8, 8\]"),
        (lambda t: t.update({"2.0.linear.weight": torch.ones(8, 8)}), {}, "'2.0.linear.weight' is unknown"),
        (lambda t: None, {"medusa_num_layers": 2}, "medusa_num_layers must be 1, not 2"),
        (lambda t: None, {"medusa_num_heads": 0}, "medusa_num_heads must be at least 1, not 0"),
    ],
)
def test_invalid_medusa_import_is_refused_by_name(target, target_dir, tmp_path, change, config, message):
    with pytest.raises((FormatError, DrafterError), match=message):
        read(trained_elsewhere(target, tmp_path / "in", change, **config), target_dir)


def test_pickled_medusa_heads_are_refused(target, target_dir, tmp_path):
    folder = trained_elsewhere(target, tmp_path / "in")
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(FormatError, match=r"must hold config.json and medusa_lm_head.safetensors"):
        read(folder, target_dir)


def test_export_into_a_filled_directory_is_refused(target, target_dir, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FormatError, match="exists and is not empty"):
        write(make_eagle(target), "speculators", origin(target_dir), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def exported(target, target_dir, folder, change=None, **config):
    """Export a drafter with changed ``config`` fields or tensors, and without its hash."""
    write(make_eagle(target), "speculators", origin(target_dir), folder)
    (folder / "osd.json").unlink()
    data = json.loads((folder / "config.json").read_text())
    layer = config.pop("layer", {})
    data["transformer_layer_config"] |= layer
    (folder / "config.json").write_text(json.dumps(data | config))
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be eagle3, not dflash"),
        ({"layer": {"model_type": "qwen3"}}, "transformer_layer_config.model_type must be llama, not qwen3"),
        ({"layer": {"num_hidden_layers": 2}}, "num_hidden_layers must be 1, not 2"),
        ({"layer": {"hidden_size": 32}}, "hidden_size is 32, but the target's is 64"),
        ({"layer": {"vocab_size": 1000}}, "vocab_size is 1000, but the target's is 259"),
        ({"layer": {"rope_parameters": {"rope_type": "dynamic"}}}, "rope_type is 'dynamic', but must be one of"),
        ({"norm_before_fc": True}, "fc_norm and norm_before_fc exclude each other"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "must be from 1 to the target's 4, not"),
        ({"transformer_layer_config": {}}, "it has no 'hidden_size'"),
    ],
)
def test_unsupported_speculators_config_is_refused(target, target_dir, tmp_path, config, message):
    with pytest.raises(FormatError, match=message):
        read(exported(target, target_dir, tmp_path / "out", **config), target_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"][:1].add_(1), "do not describe the same draft vocabulary"),
        (lambda t: t.pop("fc_norm.1.weight"), "fc_norm.0.weight' is unknown|tap_norm' is missing"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}), "up_proj.weight' is unknown"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN)}), "must equal the target's"),
    ],
)
def test_wrong_speculators_weights_are_refused(target, target_dir, tmp_path, change, message):
    with pytest.raises((FormatError, DrafterError), match=message):
        read(exported(target, target_dir, tmp_path / "out", change), target_dir)


def test_import_accepts_the_embedding_of_the_target(target, target_dir, tmp_path):
    def embed_target(tensors):
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()

    read(exported(target, target_dir, tmp_path / "out", embed_target), target_dir)


def test_import_with_a_wrong_hash_is_refused(target, target_dir, tmp_path):
    write(make_eagle(target), "speculators", origin(target_dir), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FormatError, match=r"does not match the sha256 of osd.json"):
        read(tmp_path / "out", target_dir)


def test_unknown_directory_is_refused(target_dir, tmp_path):
    with pytest.raises(FormatError, match=r"must hold config.json and model.safetensors"):
        read(tmp_path, target_dir)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="in none of the formats " + ", ".join(FORMATS)):
        read(tmp_path, target_dir)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "linear rotary embedding cannot be made: KeyError"),
        ({"rope_type": "linear", "factor": 0.0}, "finite angles"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "whole heads"),
        ({"factor": 2.0}, "rope_type is None, but must be one of default, linear"),
    ],
)
def test_unusable_rotary_scaling_is_refused(target, scaling, message):
    with pytest.raises(DrafterError, match=message):
        make_eagle(target, rope_scaling=scaling)
