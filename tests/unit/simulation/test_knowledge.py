"""What is known of a domain."""

from __future__ import annotations

import numpy as np
import pytest

from osd.config import DomainsAssumed
from osd.simulation.knowledge import Knowledge


def test_knowledge_saturates_and_a_change_takes_its_share_of_drafter_versions_and_recall():
    assumed = DomainsAssumed(gain=0.8, tokens=1000, recall_gain=1.0, recall_tokens=500, length=1.5, drift_loss=0.25)
    one = Knowledge(assumed, 0)
    first = one.version(1)
    one.trained, one.remembered = 1000.0, 1e9
    assert one.gained == pytest.approx(0.8 * (1 - np.exp(-1)))
    second = one.version(2)
    assert one.length(first) == pytest.approx(2.5)
    assert one.length(second) == pytest.approx(2.5 + one.gained)
    before, adds = one.gained, one.adds(second)
    one.change()
    assert one.gained == pytest.approx(0.75 * before)
    assert one.adds(second) == pytest.approx(0.75 * adds)
    assert one.recalled == pytest.approx(0.75, abs=1e-6)
    one.trained += 1e7
    assert one.gained == pytest.approx(0.8)  # all of it can be learnt again
