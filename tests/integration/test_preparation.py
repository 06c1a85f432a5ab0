from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from deploy.preparation import check_memory, ensure_version
from deploy.warm_store import WarmStore
from osd.config import (
    ConfigError,
    MixedSettings,
    RecallDrafterSettings,
    RecallSettings,
    Settings,
    TokenSelectSettings,
    load_settings,
)
from osd.drafting import from_config, initial, trainable
from osd.drafting.recall.memories import Memories
from osd.drafting.recall.snapshot import SNAPSHOT, Snapshots
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, Version
from osd.target.identity import Identity, identify
from osd.traffic.open_loop import Tally
from tests.pointers import put


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> Settings:
    given = [f"home={tmp_path}", f"target.source={tiny_target}", "drafter.kind=language_model", "drafter.layers=1"]
    return load_settings(None, given, {})


def pointed(settings: Settings, url: str, domain: str | None = None) -> int:
    with Pointer(url, settings.registry_dir) as pointer:
        rollout = pointer.get(domain or settings.domain)
    assert rollout is not None
    return rollout.stable


def serve(settings: Settings, url: str, stable: int, domain: str | None = None, **more: bool) -> Rollout:
    """Put a version in service."""
    with Pointer(url, settings.registry_dir) as pointer:
        return put(pointer, domain or settings.domain, Rollout(stable, None, 0.0, time.time(), **more))


def with_layers(settings: Settings, layers: int) -> Settings:
    return settings.model_copy(update={"drafter": settings.drafter.model_copy(update={"layers": layers})})


def another(settings: Settings) -> int:
    """Publish one more version like the first."""
    registry = Registry(settings.registry_dir)
    version = registry.load(settings.domain, 1)
    return registry.publish(settings.domain, version.weights, version.config, {"parent": 1})


def restarted(url: str) -> str:
    """Let Redis lose everything, as it does when it is started again."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


def test_a_fresh_domain_gets_a_version_once_which_stays_in_service(settings, redis_url, tiny_target):
    for _ in range(2):
        assert ensure_version(settings, redis_url, tiny_target) == 1
        assert pointed(settings, redis_url) == 1
    assert len(Registry(settings.registry_dir).list(settings.domain)) == 1
    assert another(settings) == 2
    assert ensure_version(settings, redis_url, tiny_target) == 1, "the pointer is there"
    assert ensure_version(settings, restarted(redis_url), tiny_target) == 1
    assert pointed(settings, redis_url) == 1


def test_a_domain_that_recalls_begins_with_a_version_of_nothing_and_comes_back_to_it(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    recalling = settings.model_copy(update={"drafter": RecallDrafterSettings()})
    for _ in range(2):
        assert ensure_version(recalling, redis_url, tiny_target) == 2
    version = Registry(settings.registry_dir).load(settings.domain, 2)
    assert (version.weights, version.config) == ({}, {"kind": "recall"})
    assert ensure_version(settings, redis_url, tiny_target) == 1


def test_a_rollback_and_a_pin_outlive_every_restart_of_an_empty_redis(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    another(settings)
    serve(settings, redis_url, 2)
    rollout = serve(settings, redis_url, 1, pinned=True)
    with Pointer(redis_url, settings.registry_dir) as pointer:
        for _ in range(2):
            assert ensure_version(settings, restarted(redis_url), tiny_target) == 1
            assert pointer.get(settings.domain) == rollout


def test_a_redis_of_another_registry_is_corrected(settings, redis_url, tiny_target, tmp_path):
    with Pointer(redis_url, tmp_path / "another") as pointer:
        for number in range(1, 10):
            (tmp_path / "another" / settings.domain / str(number)).mkdir(parents=True)
            put(pointer, settings.domain, Rollout(number, None, 0.0, time.time()))
    assert ensure_version(settings, redis_url, tiny_target) == 1
    assert pointed(settings, redis_url) == 1
    with Pointer(redis_url, tmp_path / "another") as pointer:
        put(pointer, settings.domain, Rollout(5, None, 0.0, time.time()))
    assert ensure_version(settings, redis_url, tiny_target) == 1
    assert pointed(settings, redis_url) == 1


def test_a_pointer_that_moves_while_a_service_starts_is_not_lost(settings, redis_url, tiny_target, monkeypatch):
    ensure_version(settings, redis_url, tiny_target)
    wider = with_layers(settings, 2)
    replace = Pointer.replace
    theirs = Rollout(stable=1, canary=None, share=0.0, changed=9.0, pinned=True)

    def moved(pointer, domain, before, rollout, fence=None):
        monkeypatch.undo()
        put(pointer, domain, theirs)
        return replace(pointer, domain, before, rollout, fence)

    monkeypatch.setattr(Pointer, "replace", moved)
    # Theirs does not fit these settings: it is looked at, and then replaced.
    assert ensure_version(wider, redis_url, tiny_target) == 2
    with Pointer(redis_url, settings.registry_dir) as pointer:
        now = pointer.get(settings.domain)
    assert now is not None
    assert now.moves == 3


def test_other_domains_come_back_too_where_their_versions_fit(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    registry = Registry(settings.registry_dir)
    version = registry.load(settings.domain, 1)
    for domain, config in (("code", version.config), ("code", version.config), ("alien", {"kind": "eagle"})):
        registry.publish(domain, version.weights, config, {})
    serve(settings, redis_url, 1, "code", pinned=True)
    ensure_version(settings, restarted(redis_url), tiny_target)
    with Pointer(redis_url, settings.registry_dir) as pointer:
        assert pointer.all().keys() == {"code", settings.domain}
        assert pointer.all()["code"].pinned
    assert pointed(settings, redis_url, "code") == 1


def test_extra_domain_begins_once_with_the_drafter_in_service(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    another(settings)
    serve(settings, redis_url, 2)
    more = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"extra_domains": ("code",)})})
    for _ in range(2):
        ensure_version(more, redis_url, tiny_target)
    (version,) = Registry(settings.registry_dir).list("code")
    assert version.manifest["copied"] == f"{settings.domain}/2"
    assert pointed(settings, redis_url, "code") == 1


def test_a_damaged_version_does_not_come_back(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    another(settings)
    serve(settings, redis_url, 2)
    (settings.registry_dir / settings.domain / "2" / "model.safetensors").write_bytes(b"damaged")
    assert ensure_version(settings, restarted(redis_url), tiny_target) == 1


def test_a_version_with_an_acceptance_head_is_still_of_the_configured_drafter(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    registry = Registry(settings.registry_dir)
    drafter = trainable(from_config(registry.load(settings.domain, 1).config, tiny_target)).add_head()
    assert registry.publish(settings.domain, drafter.weights(), drafter.config(), {"parent": 1}) == 2
    serve(settings, redis_url, 2)
    assert ensure_version(settings, restarted(redis_url), tiny_target) == 2


def test_other_drafter_settings_start_a_version_of_their_own(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    wider = with_layers(settings, 2)
    assert ensure_version(wider, redis_url, tiny_target) == 2
    assert pointed(settings, redis_url) == 2


def test_a_version_that_was_trained_elsewhere_stays_in_service_whatever_its_size(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    registry = Registry(settings.registry_dir)
    first = registry.load(settings.domain, 1)
    other = registry.publish(settings.domain, first.weights, {**first.config, "shared": False}, {"imported": {}})
    serve(settings, redis_url, other)
    assert ensure_version(settings, redis_url, tiny_target) == other
    foreign = registry.publish(settings.domain, first.weights, {**first.config, "kind": "eagle"}, {"imported": {}})
    serve(settings, redis_url, foreign)
    assert ensure_version(settings, redis_url, tiny_target) == 1


def test_a_drafter_is_made_once_and_not_again_while_settings_and_target_are_the_same(
    settings, redis_url, tiny_target, monkeypatch
):
    ensure_version(settings, redis_url, tiny_target)
    monkeypatch.setattr("osd.drafting.initial", lambda *made_of: pytest.fail("a drafter was made"))
    assert ensure_version(settings, restarted(redis_url), tiny_target) == 1
    (remembered,) = (settings.home_dir / "drafters").iterdir()
    remembered.write_text("{")
    with pytest.raises(pytest.fail.Exception):
        ensure_version(settings, restarted(redis_url), tiny_target)
    wider = with_layers(settings, 2)
    with pytest.raises(pytest.fail.Exception):
        ensure_version(wider, restarted(redis_url), tiny_target)


def keep_a_table(store: WarmStore, settings: Settings, target: Identity) -> None:
    """Keep the snapshot of a table that knows nothing."""
    elsewhere = settings.home_dir / "elsewhere"
    Snapshots(elsewhere).write("general", Memories(settings.recall).of(""), target)
    store.keep_recalled((elsewhere / "general" / SNAPSHOT).read_bytes(), settings.recall)


def test_a_fresh_domain_begins_with_what_warm_up_left_of_its_target_and_configuration(settings, redis_url, tiny_target):
    store = WarmStore(settings.home_dir, tiny_target)
    mixed = settings.model_copy(update={"drafter": MixedSettings(trained=settings.drafter)})
    first = initial(settings.drafter, tiny_target, settings.home_dir)
    learnt = {name: weight + 1 for name, weight in first.weights().items()}
    store.keep_drafter(Version(1, learnt, json.loads(json.dumps(first.config())), {}), Tally(finished=7))
    target = identify("tiny", tiny_target)
    keep_a_table(store, mixed, target)

    assert ensure_version(mixed, redis_url, tiny_target) == 1
    registry = Registry(settings.registry_dir)
    version = registry.load("general", 1)
    assert all(version.weights[name].equal(weight) for name, weight in learnt.items())
    assert version.manifest["warm_up"]["requests"] == 7
    found = Memories(mixed.recall).of("")
    assert Snapshots(settings.registry_dir).restore("general", found, target) is not None

    other = mixed.model_copy(update={"domain": "code"})
    assert ensure_version(other, restarted(redis_url), tiny_target) == 1
    assert "warm_up" in registry.load("code", 1).manifest
    small = RecallSettings(megabytes=3)
    wider = MixedSettings(trained=settings.drafter.model_copy(update={"layers": 2}), recall=small)
    ensure_version(mixed.model_copy(update={"domain": "wide", "drafter": wider}), restarted(redis_url), tiny_target)
    assert "warm_up" not in registry.load("wide", 1).manifest
    assert not (registry.root / "wide" / SNAPSHOT).exists(), "the table has another size"


def test_a_domain_that_has_learnt_keeps_what_it_knows_when_a_warm_up_comes_later(settings, redis_url, tiny_target):
    mixed = settings.model_copy(update={"drafter": MixedSettings(trained=settings.drafter)})
    ensure_version(mixed, redis_url, tiny_target)
    first = Registry(settings.registry_dir).load("general", 1)
    store = WarmStore(settings.home_dir, tiny_target)
    store.keep_drafter(replace(first, weights={name: weight + 1 for name, weight in first.weights.items()}), Tally())
    keep_a_table(store, mixed, identify("tiny", tiny_target))
    assert ensure_version(mixed, restarted(redis_url), tiny_target) == 1
    assert Registry(settings.registry_dir).numbers("general") == [1]
    assert not (settings.registry_dir / "general" / SNAPSHOT).exists()


def test_less_memory_for_keys_and_values_than_one_request_may_need_is_refused(settings, tiny_target):
    check_memory(settings, tiny_target)
    roomy = settings.model_copy(update={"engine": settings.engine.model_copy(update={"kv_mb": 64})})
    check_memory(roomy, tiny_target)
    long = settings.engine.model_copy(update={"kv_mb": 1, "context": 1 << 20})
    with pytest.raises(
        ConfigError, match=r"^engine\.kv_mb is 1, and one request of engine\.context tokens may need \d+$"
    ):
        check_memory(settings.model_copy(update={"engine": long}), tiny_target)


def test_copies_of_what_token_select_chooses_are_part_of_what_one_request_may_need(settings, tiny_target):
    tight = settings.engine.model_copy(update={"kv_mb": 1, "context": 1 << 16})
    chosen = settings.model_copy(
        update={"engine": tight, "drafter": TokenSelectSettings(top=1 << 16, initial=1, local=1)}
    )
    few = settings.model_copy(update={"engine": tight, "drafter": TokenSelectSettings(top=16)})
    needed = []
    for one in (few, chosen):
        with pytest.raises(ConfigError, match="may need") as caught:
            check_memory(one, tiny_target)
        needed.append(int(str(caught.value).rsplit(" ", 1)[1]))
    assert needed[1] == pytest.approx(2 * needed[0], rel=0.05)
