from __future__ import annotations

import torch

from osd.registry import trained_requests as module
from osd.registry.trained_requests import REQUESTS, TrainedRequests, fingerprint, versions_trained_on
from osd.registry.versions import Registry


def publish(registry, *request_ids):
    trained = TrainedRequests()
    trained.add(request_ids)
    return registry.publish("general", {"w": torch.zeros(1)}, {}, {REQUESTS: trained.state()})


def test_trained_versions_are_the_first_one_and_all_after_it(tmp_path):
    registry = Registry(tmp_path)
    publish(registry)
    publish(registry, "cmpl-a-0", "cmpl-b-0")
    publish(registry, "cmpl-c-0")
    assert versions_trained_on(registry, "general", "cmpl-a") == [2, 3]
    assert versions_trained_on(registry, "general", "cmpl-b-0") == [2, 3]
    assert versions_trained_on(registry, "general", "cmpl-c") == [3]
    assert versions_trained_on(registry, "general", "cmpl") == []
    assert versions_trained_on(registry, "elsewhere", "cmpl-a") == []


def test_manifest_holds_only_hashes_of_request_ids(tmp_path):
    registry = Registry(tmp_path)
    publish(registry, "cmpl-secret-0")
    manifest = registry.load("general", 1).manifest
    assert manifest[REQUESTS] == [fingerprint("cmpl-secret-0")]
    assert "secret" not in str(manifest)


def test_manifest_without_a_request_list_is_skipped(tmp_path):
    registry = Registry(tmp_path)
    registry.publish("general", {"w": torch.zeros(1)}, {}, {})
    publish(registry, "a")
    assert versions_trained_on(registry, "general", "a") == [2]


def test_trained_requests_are_kept_until_published():
    trained = TrainedRequests()
    trained.add(["a-0", "b-0"])
    assert trained.contains("a")
    assert not trained.contains("c")
    successor = TrainedRequests()
    successor.add(["c-0"])
    successor.resume(trained.state())
    assert all(successor.contains(name) for name in "abc")
    successor.clear()
    assert successor.state() == []


def test_trained_requests_above_the_limit_are_dropped(monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUESTS", 3)
    trained = TrainedRequests()
    for name in "abcde":
        trained.add([name])
    assert trained.state() == [fingerprint(name) for name in "cde"]
