"""What a drafter shares with its target is in memory once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osd.config import EagleSettings, FalconSettings, KangarooSettings, MedusaSettings
from osd.drafters import initial
from osd.drafters.session import Runtime
from osd.runtime.model import SlotModel
from osd.target.model import load_model

KINDS = [EagleSettings(vocabulary=100), FalconSettings(vocabulary=100), MedusaSettings(), KangarooSettings()]


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.kind)
@pytest.mark.parametrize("same", [True, False])
def test_the_targets_own_table_serves_a_drafter_where_it_is_the_same(
    target_dir: Path, settings: Any, same: bool
) -> None:
    drafter: Any = initial(settings, target_dir, target_dir)
    model = load_model(target_dir, "bfloat16", "cpu")
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += not same
    needs = drafter.needs
    target = SlotModel(model, slots=2, context=32, scratch=8, taps=needs.taps)
    before = drafter.target_head.clone()
    session = drafter.session(Runtime.serving(2, 32, 8, target=target))
    shared = drafter.target_head.untyped_storage().data_ptr() == target.embedding.untyped_storage().data_ptr()
    assert shared == same
    assert torch.equal(drafter.target_head, before)
    assert session.stage(drafter.weights())
