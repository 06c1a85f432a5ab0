"""New weights of the target: a drafter of the old weights is judged on new records before training continues."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.learning.toys import TARGET, VOCABULARY, target_logits


@pytest.mark.parametrize(("change", "helps"), [(0.05, True), (4.0, False)], ids=["slight", "another model"])
def test_drafter_of_another_revision_is_judged_again(make_loop, eventually, change, helps):
    loop = make_loop()
    worker = loop.begin(60)
    eventually(lambda: worker.status()["published"] >= 1)
    loop.stop()
    stable = loop.pointer.get("general").stable
    before = loop.registry.load("general", stable).manifest
    assert before["target"] == TARGET.label

    loop.target = replace(TARGET, weights="c" * 64)
    noise = np.random.default_rng(5).normal(size=(VOCABULARY, VOCABULARY))
    loop.send(20)  # records of replicas with the old target
    worker = loop.start()
    eventually(lambda: worker.status()["refused"] >= 20)
    assert worker.status()["steps"] == 0, "the checkpoint belongs to the old target"
    assert worker.status()["version"] == stable
    loop.send(60, target=loop.target.label, logits=target_logits() + change * noise)
    eventually(lambda: any(event["kind"] == "revision" for event in loop.events.recent()))
    (event,) = [each for each in loop.events.recent() if each["kind"] == "revision"]
    assert (event["version"], event["before"]) == (stable, before["gate"]["acceptance"])
    assert (event["now"] > event["before"] - 0.1) is helps
    assert ("training continues" in event["reason"]) is helps
    assert ("training starts from its weights" in event["reason"]) is not helps
    if not helps:
        eventually(lambda: loop.pointer.get("general").stable > stable)
        newest = loop.registry.load("general", loop.pointer.get("general").stable).manifest
        assert newest["target"] == loop.target.label
        assert newest["gate"]["baseline_acceptance"] < before["gate"]["acceptance"]
