"""Models over slots, compared with transformers' own forward."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from osd.runtime.batch import consecutive_rows
from osd.runtime.causal_lm import decoder_layers
from osd.runtime.fused import FusedDecoder
from osd.runtime.model import SlotModel, eos_ids
from osd.runtime.native import kernels
from osd.runtime.taps import tapped
from tests.device import DEVICE
from tests.unit.runtime.rows import rows_of

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True},
    "qwen2": {},
    "qwen2 with tied embeddings": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {
        "sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8,
    },
    "phi3": {"sliding_window": 5},
    "gpt_neox": {"num_key_value_heads": None},
    "olmo2": {},
}  # fmt: skip


def build(family: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    settings = {**SIZES, **FAMILIES[family]}
    settings = {key: value for key, value in settings.items() if value is not None}
    config = AutoConfig.for_model(family.split()[0], **settings)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return model


def slotted(family: str, taps: tuple[int, ...] = (), *, slots: int = 4, seed: int = 0) -> SlotModel:
    return SlotModel(build(family, seed).to(DEVICE), slots=slots, context=64, scratch=8, taps=taps)


@torch.inference_mode()
def logits_of(model: nn.Module, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def everything(count: int) -> Tensor:
    return torch.arange(count)


def prompt(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 131, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(got: Tensor, goal: Tensor) -> None:
    torch.testing.assert_close(got.cpu(), goal.cpu(), rtol=2e-4, atol=2e-4)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_logits_equal_transformers_for_any_prompt_chunks(family: str) -> None:
    plain, model, tokens = build(family), slotted(family), prompt(23)
    goal = logits_of(plain, tokens)
    close(model.forward(rows_of([(1, 0, tokens)]), everything(23)).logits, goal)
    pieces = [(0, 9), (9, 10), (10, 23)]
    close(torch.cat([model.forward(rows_of([(2, a, tokens[a:b])]), everything(b - a)).logits for a, b in pieces]), goal)


def test_forward_of_several_slots_equals_single_ones(family: str) -> None:
    plain, model = build(family), slotted(family)
    first, second, third = prompt(17, 1), prompt(6, 2), prompt(30, 3)
    model.forward(rows_of([(3, 0, first[:9]), (0, 0, third[:29])]), everything(1))
    got = model.forward(rows_of([(0, 29, third[29:]), (3, 9, first[9:]), (1, 0, second)]), everything(15)).logits
    close(got, torch.cat([logits_of(plain, third)[29:], logits_of(plain, first)[9:], logits_of(plain, second)]))


def test_forward_of_a_tree_equals_each_path_alone(family: str) -> None:
    plain, model, tokens = build(family), slotted(family), prompt(12)
    parents, drafted = [-1, -1, 0, 2, 0, 1], prompt(6, 9)
    model.forward(rows_of([(1, 0, tokens[:7])]), everything(1))
    parts = [(0, 0, prompt(5, 4)), (1, 7, tokens[7:] + drafted)]
    got = model.forward(rows_of(parts, {1: parents}), everything(16)).logits[5:]
    close(got[:5], logits_of(plain, tokens)[7:])
    for node in range(len(drafted)):
        path, above = [], node
        while above >= 0:
            path.insert(0, drafted[above])
            above = parents[above]
        close(got[5 + node], logits_of(plain, tokens + path)[-1])


def test_taps_are_the_outputs_of_their_layers(family: str) -> None:
    plain, model, tokens = build(family), slotted(family, (0, -1, 1)), prompt(11)
    with tapped(plain, (0, 1, 2)) as seen:  # see test_taps
        logits_of(plain, tokens)
    forward = model.forward(rows_of([(0, 0, tokens)]), torch.tensor([10]))
    assert model.taps == (0, 2, 1)
    close(forward.hidden, torch.cat([seen[0][0], seen[2][0], seen[1][0]], -1))


def test_forward_returns_only_the_wanted_logits(family: str) -> None:
    model, tokens = slotted(family), prompt(9)
    wanted = torch.tensor([8, 2])
    forward = model.forward(rows_of([(0, 0, tokens)]), wanted)
    assert forward.hidden is None
    close(forward.logits, model.forward(rows_of([(1, 0, tokens)]), everything(9)).logits[wanted])
    assert model.forward(rows_of([(0, 0, tokens)]), torch.empty(0, dtype=torch.int64)).logits.shape == (0, 131)


def test_load_of_staged_weights_makes_an_equal_model(family: str) -> None:
    model, tokens = slotted(family), prompt(9)
    before = model.forward(rows_of([(0, 0, tokens)]), everything(9)).logits
    reference = build(family, seed=5)
    staged = {name: model.stage(name, value.detach()) for name, value in reference.state_dict().items()}
    assert torch.equal(model.forward(rows_of([(1, 0, tokens)]), everything(9)).logits, before)
    with torch.inference_mode():
        model.load(staged)
    close(model.forward(rows_of([(2, 0, tokens)]), everything(9)).logits, logits_of(reference, tokens))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_row_is_bitwise_equal_alone_and_in_a_batch(family: str) -> None:
    model, tokens = slotted(family), prompt(10)
    alone = [model.forward(rows_of([(0, i, [token])]), everything(1)).logits[0] for i, token in enumerate(tokens)]
    crowd = model.forward(rows_of([(2, 0, prompt(21, 3)), (1, 0, tokens), (3, 0, prompt(13, 4))]), everything(44))
    if not isinstance(model.decoder, FusedDecoder):
        pytest.skip("only our kernels promise it")
    assert torch.equal(torch.stack(alone), crowd.logits[21:31])


@pytest.mark.parametrize("family", ["llama with biases", "qwen2 with tied embeddings", "gpt_neox"])
def test_int8_weights_have_a_small_error_and_can_be_loaded(family: str) -> None:
    if kernels() is None:
        pytest.skip("the kernels were not built")

    def narrow(seed: int) -> SlotModel:
        return SlotModel(build(family, seed), slots=2, context=64, scratch=8, weights="int8")

    tokens, model = prompt(12), narrow(0)
    rows = rows_of([(0, 0, tokens)])
    got, goal = model.forward(rows, everything(12)).logits, logits_of(build(family), tokens)
    assert 0 < float((got - goal).norm() / goal.norm()) < 0.05
    with torch.inference_mode():
        model.load({name: model.stage(name, value) for name, value in build(family, 5).state_dict().items()})
    reference = narrow(5).forward(rows, everything(12)).logits
    torch.testing.assert_close(model.forward(rows, everything(12)).logits, reference)


@pytest.mark.parametrize(("rope", "fused"), [("default", True), ("llama3", True), ("dynamic", False)])
def test_rotary_angles_equal_those_of_transformers(rope: str, fused: bool) -> None:
    scaling: dict[str, Any] = {"rope_type": rope, "rope_theta": 1e4}
    if rope == "llama3":
        scaling |= {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }  # fmt: skip
    if rope == "dynamic":
        scaling |= {"factor": 4.0}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, rope_parameters=scaling)
    config._attn_implementation = "eager"
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    goal = logits_of(plain, prompt(40))
    model = SlotModel(plain, slots=2, context=64, scratch=8)
    if kernels() is not None:
        assert isinstance(model.decoder, FusedDecoder) is fused
    close(model.forward(rows_of([(0, 0, prompt(40))]), everything(40)).logits, goal)


@pytest.mark.parametrize("bucketed", [False, True], ids=["as it comes", "bucketed"])
@pytest.mark.parametrize("family", ["llama", "qwen2 with tied embeddings", "olmo2", "gpt_neox"])
def test_embedded_row_equals_the_token_of_its_embedding(family: str, bucketed: bool) -> None:
    model, tokens = build(family), prompt(9)
    goal, words = logits_of(model, tokens), model.get_input_embeddings().weight.detach().clone()
    slots = SlotModel(model, slots=2, context=64, scratch=8, bucketed=bucketed, embeddings=2)
    for places in ([4, 7], [7, 2], [5]):  # each overwrites the embeddings of the previous one
        ids = tokens.copy()
        for number, place in enumerate(places):
            ids[place] = slots.vocabulary + number
        rows = replace(consecutive_rows(0, 0, ids), embedded=words[[tokens[place] for place in places]])
        logits = slots.forward(rows, everything(9)).logits
        assert logits.shape == goal.shape
        close(logits, goal)
    with pytest.raises(ValueError, match="a forward brings 3 embeddings, and there is room for 2"):
        slots.forward(replace(rows, embedded=words[:3]), everything(9))


def test_model_without_known_layers_is_refused_by_name() -> None:
    class Odd(nn.Module):
        def get_decoder(self) -> nn.Module:
            return nn.Module()

    with pytest.raises(NotImplementedError, match="Odd: cannot find its decoder layers"):
        decoder_layers(Odd())


@pytest.mark.parametrize(
    ("configured", "generated", "ends"),
    [(0, None, {0}), (0, 5, {0, 5}), ([0, 3], [3, 7], {0, 3, 7}), (None, None, set()), (None, (4,), {4})],
)
def test_ends_of_text_are_those_of_both_configurations(configured: Any, generated: Any, ends: set[int]) -> None:
    model = nn.Module()
    model.config, model.generation_config = (SimpleNamespace(eos_token_id=ids) for ids in (configured, generated))
    assert eos_ids(model) == ends
