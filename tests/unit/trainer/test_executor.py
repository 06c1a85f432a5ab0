from __future__ import annotations

from types import SimpleNamespace

import pytest

from osd.config import BestFirstSettings, ChainSettings, Settings
from osd.learning.online import empty_replay
from osd.learning.value import SECOND
from tests.unit.learning.toys import HIDDEN, TARGET, VOCABULARY, Toy
from trainer.executor import TargetContext


@pytest.mark.parametrize(("growth", "second"), [(BestFirstSettings(), SECOND), (ChainSettings(), 0.0)])
def test_a_learner_counts_second_choices_where_the_service_drafts_trees(growth, second):
    settings, weights = Settings(growth=growth), Toy().weights()
    context = TargetContext(TARGET, VOCABULARY, HIDDEN, lambda config: Toy())
    version = SimpleNamespace(config=None, weights=weights)
    learner = context.learner(version, settings, empty_replay(settings.trainer), None)
    assert learner.value.traffic([]).second == second
    assert learner.gate.depth == settings.growth.lookahead
    assert all(value.equal(weights[name]) for name, value in learner.distiller.drafter.weights().items())
