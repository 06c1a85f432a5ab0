"""Language models as drafters: the target's first layers, or a model of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from osd.config import LanguageModelSettings
from osd.drafters import DrafterError, initial
from osd.drafters.language_model.drafter import LanguageModel
from tests.tiny import make_tiny
from tests.unit.drafters.sequences import at_places

LENGTH = 30


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def test_the_targets_own_embedding_and_head_are_neither_stored_nor_trained(target_dir: Path) -> None:
    drafter = initial(LanguageModelSettings(layers=2), target_dir, target_dir)
    assert drafter.needs.taps == ()
    assert drafter.draft_ids is None
    assert not [name for name in drafter.weights() if "embed" in name or "head" in name]
    assert {name.split(".")[2] for name in drafter.weights() if ".layers." in name} == {"0", "1"}
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert not [name for name in trained if "embed" in name or "head" in name]


def test_all_layers_of_the_target_are_the_target(target_dir: Path) -> None:
    drafter = initial(LanguageModelSettings(layers=4), target_dir, target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir)
    tokens = tokens_of(1)
    with torch.no_grad():
        goal = target(input_ids=tokens).logits[0, [4, 20]]
        got = drafter.unroll(at_places(tokens, None, [(0, 5), (0, 21)]), 1)[0]
    torch.testing.assert_close(got, goal, rtol=1e-4, atol=1e-4)


def test_more_layers_than_the_target_has_are_refused(target_dir: Path) -> None:
    with pytest.raises(DrafterError, match=r"drafter.layers is 5, but the target has 4 layers"):
        initial(LanguageModelSettings(layers=5), target_dir, target_dir)


def test_a_revision_without_a_source_is_refused(target_dir: Path) -> None:
    with pytest.raises(DrafterError, match=r"^drafter\.revision is of drafter\.source, which is not set$"):
        initial(LanguageModelSettings(revision="v1"), target_dir, target_dir)


def test_a_source_of_the_same_vocabulary_is_drafted_with_as_it_is(target_dir: Path, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "small", seed=8, layers=1)
    drafter = initial(LanguageModelSettings(source=str(source)), target_dir, tmp_path / "home")
    assert isinstance(drafter, LanguageModel)
    assert not drafter.shared
    assert "model.embed_tokens.weight" in drafter.weights()
    assert "lm_head.weight" not in drafter.weights()
