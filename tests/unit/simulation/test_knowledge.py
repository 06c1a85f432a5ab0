"""Learning in a simulated domain."""

from __future__ import annotations

import numpy as np
import pytest

from osd.config import DomainAssumptions
from osd.simulation.knowledge import DomainKnowledge


def test_knowledge_saturates_and_a_change_reduces_it():
    assumed = DomainAssumptions(gain=0.8, tokens=1000, recall_gain=1.0, recall_tokens=500, length=1.5, drift_loss=0.25)
    domain = DomainKnowledge(assumed, 0)
    first = domain.version(1)
    domain.trained, domain.remembered = 1000.0, 1e9
    assert domain.training_gain == pytest.approx(0.8 * (1 - np.exp(-1)))
    second = domain.version(2)
    assert domain.length(first) == pytest.approx(2.5)
    assert domain.length(second) == pytest.approx(2.5 + domain.training_gain)
    before, adds = domain.training_gain, domain.version_gain(second)
    domain.change()
    assert domain.training_gain == pytest.approx(0.75 * before)
    assert domain.version_gain(second) == pytest.approx(0.75 * adds)
    assert domain.recall_gain == pytest.approx(0.75, abs=1e-6)
    domain.trained += 1e7
    assert domain.training_gain == pytest.approx(0.8)  # training can regain all
