"""Architectures that the engine computes exactly as transformers does, and architectures that it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.families import FAMILIES, VARIANTS, make_model, row
from osd.config import EngineSettings, Settings, TargetSettings
from osd.target.architecture import check_context
from osd.target.files import TargetError
from osd.target.load import target_directory
from osd.target.opening import load_target

PAGE = (Path(__file__).parents[3] / "docs/models.md").read_text()


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_page_has_the_result_of_the_check(name: str, tmp_path: Path) -> None:
    assert f"\n{row(name, tmp_path)}\n" in PAGE


def test_page_has_no_other_models() -> None:
    names = [*FAMILIES, *VARIANTS]
    assert re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE) == names
    assert len(re.findall(r"\| yes \| (?:own|transformers) \|", PAGE)) >= 20


def test_comparison_refuses_lost_state(tmp_path: Path) -> None:
    directory = make_model("lfm2", tmp_path)
    with pytest.raises(TargetError, match="differently from transformers"):
        load_target(TargetSettings(dtype="bfloat16"), directory, slots=2, context=64, scratch=4)


def test_comparison_leaves_windows_as_they_were(tmp_path: Path) -> None:
    target = load_target(
        TargetSettings(dtype="float32"), make_model("gemma2", tmp_path), slots=1, context=30, scratch=4
    )
    windows = {getattr(module, "sliding_window", None) for module in target.model.modules()}
    assert (target.config.sliding_window, windows) == (16, {16, None})
    assert target.config._attn_implementation == "osd_slots"


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_context_beyond_fixed_angles_is_refused(rope: str, tmp_path: Path) -> None:
    name, longest = ("phi3 with longrope", 64) if rope == "longrope" else ("qwen3", 512)
    directory = make_model(name, tmp_path)
    if rope == "dynamic":
        change_config(directory, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    check_context(directory, longest)
    with pytest.raises(TargetError, match=f"engine.context is {longest + 1}.*{rope}.*set it to {longest} or less"):
        check_context(directory, longest + 1)
    with pytest.raises(TargetError, match="angles"):
        load_target(TargetSettings(dtype="float32"), directory, slots=1, context=longest + 1, scratch=4)
    with pytest.raises(TargetError, match="angles"):
        target_directory(
            Settings(target=TargetSettings(source=str(directory)), engine=EngineSettings(context=longest + 1))
        )


def change_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
