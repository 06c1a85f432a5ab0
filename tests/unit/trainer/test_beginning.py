from __future__ import annotations

from types import SimpleNamespace

import pytest

from osd.config import BestFirstSettings, ChainSettings, Settings
from osd.learning.distiller import Distiller
from osd.learning.online import empty_replay
from osd.learning.value import SECOND
from tests.unit.learning.toys import VOCABULARY, Toy
from trainer.beginning import learner_of


@pytest.mark.parametrize(("growth", "second"), [(BestFirstSettings(), SECOND), (ChainSettings(), 0.0)])
def test_a_learner_reckons_with_second_choices_where_the_service_drafts_trees_of_what_pays(growth, second):
    settings = Settings(growth=growth)
    executor = SimpleNamespace(distiller=lambda domain, drafter, trainer: Distiller(drafter, trainer))
    context = SimpleNamespace(build=lambda config: Toy(), executor=executor, vocabulary=VOCABULARY)
    version = SimpleNamespace(config=None, weights=Toy().weights())
    learner = learner_of(version, settings, context, empty_replay(settings.trainer), None)
    assert learner.value.traffic([]).second == second
