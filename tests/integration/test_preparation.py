from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from deploy.preparation import check_memory, ensure_version, prepare
from deploy.vllm.exports import prepare_export
from deploy.warm_store import WarmStore
from docs.families import make_model
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
from osd.target.load import target_directory
from osd.traffic.open_loop import Tally
from osd.vllm.exported import ExportedDrafter
from serving.vllm.exports import export_folder
from tests.pointers import put
from tests.tiny import make_tiny
from trainer.actor import open_target


@pytest.fixture
def settings(tiny_target: Path, tmp_path: Path) -> Settings:
    options = [f"home={tmp_path}", f"target.source={tiny_target}", "drafter.kind=language_model", "drafter.layers=1"]
    return load_settings(None, options, {})


def stable_version(settings: Settings, url: str, domain: str | None = None) -> int:
    with Pointer(url, settings.registry_dir) as pointer:
        rollout = pointer.get(domain or settings.domain)
    assert rollout is not None
    return rollout.stable


def serve(settings: Settings, url: str, stable: int, domain: str | None = None, **more: bool) -> Rollout:
    """Set the pointer to a version and return the rollout."""
    with Pointer(url, settings.registry_dir) as pointer:
        return put(pointer, domain or settings.domain, Rollout(stable, None, 0.0, time.time(), **more))


def with_layers(settings: Settings, layers: int) -> Settings:
    return settings.model_copy(update={"drafter": settings.drafter.model_copy(update={"layers": layers})})


def publish_copy(settings: Settings) -> int:
    """Publish a copy of the first version and return its number."""
    registry = Registry(settings.registry_dir)
    version = registry.load(settings.domain, 1)
    return registry.publish(settings.domain, version.weights, version.config, {"parent": 1})


def emptied(url: str) -> str:
    """Delete all data of Redis, as a restart does, and return its URL."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


def test_new_domain_gets_its_first_version_once(settings, redis_url, tiny_target):
    for _ in range(2):
        assert ensure_version(settings, redis_url, tiny_target) == 1
        assert stable_version(settings, redis_url) == 1
    assert len(Registry(settings.registry_dir).list(settings.domain)) == 1
    assert publish_copy(settings) == 2
    assert ensure_version(settings, redis_url, tiny_target) == 1, "the pointer exists"
    assert ensure_version(settings, emptied(redis_url), tiny_target) == 1
    assert stable_version(settings, redis_url) == 1


def test_recall_domain_has_an_empty_version(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    recall_only = settings.model_copy(update={"drafter": RecallDrafterSettings()})
    for _ in range(2):
        assert ensure_version(recall_only, redis_url, tiny_target) == 2
    version = Registry(settings.registry_dir).load(settings.domain, 2)
    assert (version.weights, version.config) == ({}, {"kind": "recall"})
    assert ensure_version(settings, redis_url, tiny_target) == 1


def test_rollback_and_pin_survive_an_empty_redis(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    publish_copy(settings)
    serve(settings, redis_url, 2)
    rollout = serve(settings, redis_url, 1, pinned=True)
    with Pointer(redis_url, settings.registry_dir) as pointer:
        for _ in range(2):
            assert ensure_version(settings, emptied(redis_url), tiny_target) == 1
            assert pointer.get(settings.domain) == rollout


def test_pointer_of_another_registry_is_corrected(settings, redis_url, tiny_target, tmp_path):
    with Pointer(redis_url, tmp_path / "another") as pointer:
        for number in range(1, 10):
            (tmp_path / "another" / settings.domain / str(number)).mkdir(parents=True)
            put(pointer, settings.domain, Rollout(number, None, 0.0, time.time()))
    assert ensure_version(settings, redis_url, tiny_target) == 1
    assert stable_version(settings, redis_url) == 1
    with Pointer(redis_url, tmp_path / "another") as pointer:
        put(pointer, settings.domain, Rollout(5, None, 0.0, time.time()))
    assert ensure_version(settings, redis_url, tiny_target) == 1
    assert stable_version(settings, redis_url) == 1


def test_pointer_moved_during_the_start_is_not_lost(settings, redis_url, tiny_target, monkeypatch):
    ensure_version(settings, redis_url, tiny_target)
    wider = with_layers(settings, 2)
    replace = Pointer.replace
    concurrent = Rollout(stable=1, canary=None, share=0.0, changed=9.0, pinned=True)

    def move_before(pointer, domain, before, rollout, fence=None):
        monkeypatch.undo()
        put(pointer, domain, concurrent)
        return replace(pointer, domain, before, rollout, fence)

    monkeypatch.setattr(Pointer, "replace", move_before)
    # The version of the concurrent move does not fit these settings, so it is checked and replaced.
    assert ensure_version(wider, redis_url, tiny_target) == 2
    with Pointer(redis_url, settings.registry_dir) as pointer:
        now = pointer.get(settings.domain)
    assert now is not None
    assert now.moves == 3


def test_pointers_of_other_domains_are_restored(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    registry = Registry(settings.registry_dir)
    version = registry.load(settings.domain, 1)
    for domain, config in (("code", version.config), ("code", version.config), ("alien", {"kind": "eagle"})):
        registry.publish(domain, version.weights, config, {})
    serve(settings, redis_url, 1, "code", pinned=True)
    ensure_version(settings, emptied(redis_url), tiny_target)
    with Pointer(redis_url, settings.registry_dir) as pointer:
        assert pointer.all().keys() == {"code", settings.domain}
        assert pointer.all()["code"].pinned
    assert stable_version(settings, redis_url, "code") == 1


def test_extra_domain_copies_the_drafter_in_service_once(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    publish_copy(settings)
    serve(settings, redis_url, 2)
    more = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"extra_domains": ("code",)})})
    for _ in range(2):
        ensure_version(more, redis_url, tiny_target)
    (version,) = Registry(settings.registry_dir).list("code")
    assert version.manifest["copied"] == f"{settings.domain}/2"
    assert stable_version(settings, redis_url, "code") == 1


def test_damaged_stable_version_is_replaced_at_start(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    publish_copy(settings)
    serve(settings, redis_url, 2)
    (settings.registry_dir / settings.domain / "2" / "model.safetensors").write_bytes(b"damaged")
    assert ensure_version(settings, emptied(redis_url), tiny_target) == 1


def test_version_with_a_head_fits_the_configured_drafter(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    registry = Registry(settings.registry_dir)
    drafter = trainable(from_config(registry.load(settings.domain, 1).config, tiny_target)).add_head()
    assert registry.publish(settings.domain, drafter.weights(), drafter.config(), {"parent": 1}) == 2
    serve(settings, redis_url, 2)
    assert ensure_version(settings, emptied(redis_url), tiny_target) == 2


def test_changed_drafter_settings_start_a_new_version(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    wider = with_layers(settings, 2)
    assert ensure_version(wider, redis_url, tiny_target) == 2
    assert stable_version(settings, redis_url) == 2


def test_imported_version_of_another_size_stays_in_service(settings, redis_url, tiny_target):
    ensure_version(settings, redis_url, tiny_target)
    registry = Registry(settings.registry_dir)
    first = registry.load(settings.domain, 1)
    imported = registry.publish(settings.domain, first.weights, {**first.config, "shared": False}, {"imported": {}})
    serve(settings, redis_url, imported)
    assert ensure_version(settings, redis_url, tiny_target) == imported
    foreign = registry.publish(settings.domain, first.weights, {**first.config, "kind": "eagle"}, {"imported": {}})
    serve(settings, redis_url, foreign)
    assert ensure_version(settings, redis_url, tiny_target) == 1


def test_drafter_is_made_once_per_settings_and_target(settings, redis_url, tiny_target, monkeypatch):
    ensure_version(settings, redis_url, tiny_target)
    monkeypatch.setattr("osd.drafting.initial", lambda *arguments: pytest.fail("a drafter was made"))
    assert ensure_version(settings, emptied(redis_url), tiny_target) == 1
    (file,) = (settings.home_dir / "drafters").iterdir()
    file.write_text("{")
    with pytest.raises(pytest.fail.Exception):
        ensure_version(settings, emptied(redis_url), tiny_target)
    wider = with_layers(settings, 2)
    with pytest.raises(pytest.fail.Exception):
        ensure_version(wider, emptied(redis_url), tiny_target)


def keep_empty_table(store: WarmStore, settings: Settings, target: Identity) -> None:
    """Store the snapshot of an empty recall table."""
    folder = settings.home_dir / "snapshots"
    Snapshots(folder).write("general", Memories(settings.recall).of(""), target)
    store.keep_recalled((folder / "general" / SNAPSHOT).read_bytes(), settings.recall)


def test_new_domain_starts_from_a_matching_warm_up(settings, redis_url, tiny_target):
    store = WarmStore(settings.home_dir, tiny_target)
    mixed = settings.model_copy(update={"drafter": MixedSettings(trained=settings.drafter)})
    first = initial(settings.drafter, tiny_target, settings.home_dir)
    learned = {name: weight + 1 for name, weight in first.weights().items()}
    store.keep_drafter(Version(1, learned, json.loads(json.dumps(first.config())), {}), Tally(finished=7))
    target = identify("tiny", tiny_target)
    keep_empty_table(store, mixed, target)

    assert ensure_version(mixed, redis_url, tiny_target) == 1
    registry = Registry(settings.registry_dir)
    version = registry.load("general", 1)
    assert all(version.weights[name].equal(weight) for name, weight in learned.items())
    assert version.manifest["warm_up"]["requests"] == 7
    table = Memories(mixed.recall).of("")
    assert Snapshots(settings.registry_dir).restore("general", table, target) is not None

    other = mixed.model_copy(update={"domain": "code"})
    assert ensure_version(other, emptied(redis_url), tiny_target) == 1
    assert "warm_up" in registry.load("code", 1).manifest
    small = RecallSettings(megabytes=3)
    wider = MixedSettings(trained=settings.drafter.model_copy(update={"layers": 2}), recall=small)
    ensure_version(mixed.model_copy(update={"domain": "wide", "drafter": wider}), emptied(redis_url), tiny_target)
    assert "warm_up" not in registry.load("wide", 1).manifest
    assert not (registry.root / "wide" / SNAPSHOT).exists(), "the table has another size"


def test_existing_domain_ignores_a_later_warm_up(settings, redis_url, tiny_target):
    mixed = settings.model_copy(update={"drafter": MixedSettings(trained=settings.drafter)})
    ensure_version(mixed, redis_url, tiny_target)
    first = Registry(settings.registry_dir).load("general", 1)
    store = WarmStore(settings.home_dir, tiny_target)
    store.keep_drafter(replace(first, weights={name: weight + 1 for name, weight in first.weights.items()}), Tally())
    keep_empty_table(store, mixed, identify("tiny", tiny_target))
    assert ensure_version(mixed, emptied(redis_url), tiny_target) == 1
    assert Registry(settings.registry_dir).numbers("general") == [1]
    assert not (settings.registry_dir / "general" / SNAPSHOT).exists()


def test_target_that_only_vllm_runs_gets_a_drafter(redis_url, tmp_path):
    target = make_model("deepseek_v3", tmp_path / "target")
    values = {"target.source": target, "drafter.kind": "eagle", "drafter.vocabulary": 64, "target.tensor_parallel": 2}
    values |= {"engine.kind": "vllm", "engine.vllm.python": "/python", "home": tmp_path / "home"}
    settings = load_settings(None, [f"{name}={value}" for name, value in values.items()], {})
    prepare(settings, redis_url, target_directory(settings))
    prepare_export(settings)
    exported = ExportedDrafter.read(str(export_folder(settings) / "1"))
    config = Registry(settings.registry_dir).load("general", 1).config
    assert exported.drafter == config
    assert json.loads(json.dumps(open_target(settings).build(config).config())) == config


@pytest.fixture(scope="module")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target with a million positions."""
    return make_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=1 << 20)


def test_kv_memory_below_one_request_is_refused(settings, long_target):
    check_memory(settings, long_target)
    roomy = settings.model_copy(update={"engine": settings.engine.model_copy(update={"kv_mb": 64})})
    check_memory(roomy, long_target)
    long = settings.engine.model_copy(update={"kv_mb": 1, "context": 1 << 20})
    with pytest.raises(ConfigError, match=r"^engine\.kv_mb is 1: raise it, .* engine\.context tokens needs up to \d+$"):
        check_memory(settings.model_copy(update={"engine": long}), long_target)


def test_kv_memory_of_a_request_includes_selected_tokens(settings, long_target):
    tight = settings.engine.model_copy(update={"kv_mb": 1, "context": 1 << 16})
    many = settings.model_copy(
        update={"engine": tight, "drafter": TokenSelectSettings(top=1 << 16, initial=1, local=1)}
    )
    few = settings.model_copy(update={"engine": tight, "drafter": TokenSelectSettings(top=16)})
    needed = []
    for case in (few, many):
        with pytest.raises(ConfigError, match="needs up to") as caught:
            check_memory(case, long_target)
        needed.append(int(str(caught.value).rsplit(" ", 1)[1]))
    assert needed[1] == pytest.approx(2 * needed[0], rel=0.05)
