from __future__ import annotations

import math

import pytest

from osd.learning.gate import GateDecision
from osd.registry.versions import Version
from tests.unit.learning.toys import gate_figures
from trainer.investor import Worth
from trainer.publisher import Revision, held_back


@pytest.mark.parametrize(
    ("manifest", "before"),
    [
        ({"target": "new", "gate": {"acceptance": 0.5}}, None),
        ({"gate": {"acceptance": 0.5}}, None),
        ({"target": "old"}, None),
        ({"target": "old", "gate": {"acceptance": 0.5}}, 0.5),
    ],
)
def test_a_version_is_judged_again_where_it_learnt_from_another_target(manifest, before):
    revision = Revision.of(Version(3, {}, {}, manifest), "new")
    assert revision == (None if before is None else Revision(3, before))


@pytest.mark.parametrize(("now", "falls"), [(0.6, False), (0.45, False), (0.35, True), (math.nan, True)])
def test_a_version_has_fallen_on_a_new_target_by_more_than_the_setting_or_by_nan(now, falls):
    drift = Revision(3, 0.5).fallen(gate_figures((now,)), 0.1, "general")
    assert (drift is not None) is falls
    if drift is not None:
        assert (drift.domain, drift.version, drift.before) == ("general", 3, 0.5)


def test_a_candidate_that_costs_more_than_it_saves_is_held_back_with_the_reason():
    decision = held_back(GateDecision(True, False, "better"), Worth(0.001, 600.0, 2.0, 1.5))
    assert not decision.passed
    assert decision.reason == "it is expected to save 0.6 seconds of a core, and taking it up costs replicas 3"
