from __future__ import annotations

import torch

from osd.registry import learnt as learnt_module
from osd.registry.learnt import REQUESTS, Learnt, fingerprint, versions_with
from osd.registry.versions import Registry


def publish(registry, *request_ids):
    learnt = Learnt()
    learnt.add(request_ids)
    return registry.publish("general", {"w": torch.zeros(1)}, {}, {REQUESTS: learnt.state()})


def test_the_version_that_first_learnt_from_a_request_and_all_after_it_are_named(tmp_path):
    registry = Registry(tmp_path)
    publish(registry)
    publish(registry, "cmpl-a-0", "cmpl-b-0")
    publish(registry, "cmpl-c-0")
    assert versions_with(registry, "general", "cmpl-a") == [2, 3]
    assert versions_with(registry, "general", "cmpl-b-0") == [2, 3]
    assert versions_with(registry, "general", "cmpl-c") == [3]
    assert versions_with(registry, "general", "cmpl") == []
    assert versions_with(registry, "elsewhere", "cmpl-a") == []


def test_a_manifest_names_no_request_in_clear(tmp_path):
    registry = Registry(tmp_path)
    publish(registry, "cmpl-secret-0")
    manifest = registry.load("general", 1).manifest
    assert manifest[REQUESTS] == [fingerprint("cmpl-secret-0")]
    assert "secret" not in str(manifest)


def test_versions_of_before_there_was_such_a_list_are_not_in_the_way(tmp_path):
    registry = Registry(tmp_path)
    registry.publish("general", {"w": torch.zeros(1)}, {}, {})
    publish(registry, "a")
    assert versions_with(registry, "general", "a") == [2]


def test_what_a_manifest_names_is_not_named_again_and_a_checkpoint_keeps_the_rest():
    learnt = Learnt()
    learnt.add(["a-0", "b-0"])
    assert learnt.knows("a")
    assert not learnt.knows("c")
    successor = Learnt()
    successor.add(["c-0"])
    successor.resume(learnt.state())
    assert all(successor.knows(name) for name in "abc")
    successor.published()
    assert successor.state() == []


def test_without_a_version_the_newest_requests_are_remembered_and_no_more(monkeypatch):
    monkeypatch.setattr(learnt_module, "MOST", 3)
    learnt = Learnt()
    for name in "abcde":
        learnt.add([name])
    assert learnt.state() == [fingerprint(name) for name in "cde"]
