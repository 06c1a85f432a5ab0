from __future__ import annotations

import threading
import time

import pytest

from benchmarks.adaptation.net import Due, feeding
from osd.config import Settings
from osd.registry.pointer import Pointer
from osd.registry.versions import Registry, VersionError
from tests.unit.learning.toys import Toy


@pytest.fixture
def trained(tmp_path):
    """The registry of another service, with three versions."""
    registry = Registry(tmp_path / "trained")
    for number in range(3):
        drafter = Toy()
        registry.publish("general", {n: w + number for n, w in drafter.weights().items()}, drafter.config(), {})
    return registry


def test_each_version_comes_into_service_when_its_time_has_come_and_none_after_the_traffic(
    redis_url, tmp_path, trained
):
    settings, own = Settings(home=tmp_path / "home"), Registry(tmp_path / "own")
    own.publish("general", trained.load("general", 1).weights, trained.load("general", 1).config, {})
    seen = []
    with Pointer(redis_url, own.root) as pointer:
        begun = time.monotonic()
        with feeding(settings, own, redis_url, [Due(0.3, trained, 3), Due(60.0, trained, 2)]):
            while (rollout := pointer.get("general")) is None and time.monotonic() < begun + 20:
                time.sleep(0.01)
            seen.append((time.monotonic() - begun, rollout))
        assert time.monotonic() - begun < 30
    ((after, rollout),) = seen
    assert rollout is not None
    assert after >= 0.3
    assert (rollout.stable, rollout.canary) == (2, None)
    fed, known = own.load("general", 2), trained.load("general", 3)
    assert fed.config == known.config
    assert all(fed.weights[name].equal(weight) for name, weight in known.weights.items())
    assert [info.number for info in own.list("general")] == [1, 2]


def test_a_version_that_cannot_be_fed_is_an_error(redis_url, tmp_path, trained, monkeypatch):
    settings, own = Settings(home=tmp_path / "home"), Registry(tmp_path / "own")
    asked, load = threading.Event(), Registry.load

    def loaded(registry, domain, number):
        asked.set()
        return load(registry, domain, number)

    monkeypatch.setattr(Registry, "load", loaded)
    with pytest.raises(VersionError), feeding(settings, own, redis_url, [Due(0.0, trained, 9)]):
        assert asked.wait(10)
