"""Kangaroo: first versions, and the layer that it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from osd.config import KangarooSettings
from osd.drafters import DrafterError, initial
from osd.drafters.kangaroo.drafter import Kangaroo
from osd.target.model import load_model


def test_the_first_version_starts_from_the_target(target_dir: Path) -> None:
    drafter = initial(KangarooSettings(vocabulary=100_000), target_dir, target_dir)
    assert isinstance(drafter, Kangaroo)
    target = load_model(target_dir, "float32", "cpu").state_dict()
    assert (drafter.shape.exit_layer, drafter.needs.taps, drafter.needs.layers) == (1, (0,), range(1))
    assert drafter.draft_ids.tolist() == list(range(259))
    assert torch.equal(drafter.head.weight, drafter.target_head.float())
    assert torch.equal(drafter.q_proj.weight, target["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(drafter.norm.weight, target["model.norm.weight"])
    assert drafter.trained().keys() == {
        "state_norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("exit_layer", [4, 9])
def test_an_exit_that_leaves_no_layer_to_verify_with_is_refused(target_dir: Path, exit_layer: int) -> None:
    message = f"^drafter.exit_layer is {exit_layer}, but must be from 1 to 3: the target has 4 layers$"
    with pytest.raises(DrafterError, match=message):
        initial(KangarooSettings(exit_layer=exit_layer), target_dir, target_dir)
