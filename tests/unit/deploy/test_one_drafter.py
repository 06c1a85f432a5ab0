"""Settings for servers that draft with the trained drafter alone."""

from __future__ import annotations

import pytest

from deploy.embedded import Embedded
from deploy.learning import Learning
from osd.config import ConfigError, Settings
from osd.config.drafter import MixedSettings
from tests.unit.deploy.test_vllm_checks import interpreter

TRAINED = {"kind": "eagle", "vocabulary": 500}


@pytest.mark.parametrize("capture", [True, False])
def test_a_drafter_that_learns_for_another_server_has_no_recall(capture: bool):
    settings = Settings.model_validate({"drafter": {"kind": "mixed", "trained": TRAINED}})
    learning = Learning(settings, capture=capture)
    assert isinstance(settings.drafter, MixedSettings)
    assert learning.settings.drafter == settings.drafter.trained
    assert not learning.settings.drafter.mixes
    assert learning.settings.trainer.domains == ("all" if capture else settings.trainer.domains)


def test_a_service_with_vllm_drafts_without_recall(tmp_path):
    engine = {"kind": "vllm", "vllm": {"python": interpreter(tmp_path)}}
    assert Embedded(Settings.model_validate({"engine": engine})).settings.drafter.kind == "eagle"


def test_settings_of_recall_are_refused():
    settings = Settings.model_validate({"drafter": {"recall": {"megabytes": 64}}})
    with pytest.raises(ConfigError, match=r"drafter\.recall: .* remove these settings"):
        Learning(settings)
