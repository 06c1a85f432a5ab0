"""First versions of drafters, and settings that do not fit the target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from docs.families import make_model
from osd.config import EagleSettings, FalconSettings, KangarooSettings, LanguageModelSettings
from osd.drafting import DrafterError, from_config, initial
from osd.target.model import load_model
from tests.tiny import make_tiny
from tests.unit.drafting.sequences import at_places, random_tokens

LENGTH = 30


def test_shared_embedding_and_head_are_not_stored(target_dir: Path) -> None:
    drafter = initial(LanguageModelSettings(layers=2), target_dir, target_dir)
    assert drafter.needs.taps == ()
    assert drafter.draft_ids is None
    assert not [name for name in drafter.weights() if "embed" in name or "head" in name]
    assert {name.split(".")[2] for name in drafter.weights() if ".layers." in name} == {"0", "1"}
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert not [name for name in trained if "embed" in name or "head" in name]


def test_language_model_of_all_layers_equals_the_target(target_dir: Path) -> None:
    drafter = initial(LanguageModelSettings(layers=4), target_dir, target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir)
    tokens = random_tokens(1)
    with torch.no_grad():
        goal = target(input_ids=tokens).logits[0, [4, 20]]
        got = drafter.unroll(at_places(tokens, None, [(0, 5), (0, 21)]), 1)[0]
    torch.testing.assert_close(got, goal, rtol=1e-4, atol=1e-4)


def test_more_layers_than_the_target_are_refused(target_dir: Path) -> None:
    with pytest.raises(DrafterError, match=r"drafter.layers is 5, but the target has 4 layers"):
        initial(LanguageModelSettings(layers=5), target_dir, target_dir)


def test_revision_without_source_is_refused(target_dir: Path) -> None:
    with pytest.raises(DrafterError, match=r"^drafter\.revision is set without drafter\.source, whose revision it is$"):
        initial(LanguageModelSettings(revision="v1"), target_dir, target_dir)


def test_source_with_equal_vocabulary_is_not_translated(target_dir: Path, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "small", seed=8, layers=1)
    drafter = initial(LanguageModelSettings(source=str(source)), target_dir, tmp_path / "home")
    assert not drafter.shared
    assert drafter.draft_ids is None
    assert "translation" not in drafter.config()
    assert "model.embed_tokens.weight" in drafter.weights()
    assert "lm_head.weight" not in drafter.weights()


def test_eagle_of_a_target_that_vllm_runs_starts_from_its_head(tmp_path: Path) -> None:
    target_dir = make_model("deepseek_v3", tmp_path / "target")
    drafter = initial(EagleSettings(vocabulary=64), target_dir, tmp_path)
    head = load_file(target_dir / "model.safetensors")["lm_head.weight"]
    assert drafter.weights()["head.weight"].float().equal(head[:64].bfloat16().float())
    again = from_config(drafter.config(), target_dir)
    again.load_weights(drafter.weights())
    assert again.config() == drafter.config()


def test_kangaroo_starts_from_the_next_target_layer(target_dir: Path) -> None:
    drafter = initial(KangarooSettings(vocabulary=100_000), target_dir, target_dir)
    target = load_model(target_dir, "float32", "cpu").state_dict()
    assert (drafter.shape.exit_layer, drafter.needs.taps, drafter.needs.layers) == (1, (0,), range(1))
    assert torch.equal(drafter.q_proj.weight, target["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(drafter.norm.weight, target["model.norm.weight"])
    assert drafter.trained().keys() == {
        "state_norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("exit_layer", [4, 9])
def test_exit_after_the_last_layer_is_refused(target_dir: Path, exit_layer: int) -> None:
    message = f"^drafter.exit_layer is {exit_layer}, but must be from 1 to 3: the target has 4 layers$"
    with pytest.raises(DrafterError, match=message):
        initial(KangarooSettings(exit_layer=exit_layer), target_dir, target_dir)


@torch.no_grad()
def test_new_falcon_passes_target_features_through(target_dir: Path) -> None:
    drafter = initial(FalconSettings(vocabulary=100_000), target_dir, target_dir)
    hidden = 7 * torch.randn(1, LENGTH, 64, generator=torch.Generator().manual_seed(1))
    read = drafter.starts(at_places(random_tokens(1), hidden, [(0, 9)]), 2).states[0, :, -1]
    assert float(torch.cosine_similarity(read[1:], hidden[0, 1:-1]).mean()) > 0.8
