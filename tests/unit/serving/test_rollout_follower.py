from __future__ import annotations

import errno
import itertools
import shutil
import threading
import time

import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError

from osd import drafting
from osd.config import AcceptanceHeadSettings, EagleSettings, Settings
from osd.drafting.base import DrafterError
from osd.engine.build import InitialDrafter
from osd.registry.versions import Registry, VersionError
from serving.replica import rollout_follower
from serving.replica.rollout_follower import (
    DomainFollower,
    DrafterCache,
    FollowerContext,
    Uptake,
    VersionWatcher,
    starting_drafter,
)
from tests.unit.serving.rollouts import RecordingEvents, SingleDrafterCache, at
from tests.waiting import wait_until


class ScriptedPointer:
    """Pointer with given rollouts; ``None`` means that Redis does not answer."""

    def __init__(self, *rollouts):
        self.rollouts = rollouts

    def get(self, domain):
        if not self.rollouts or self.rollouts[0] is None:
            raise RedisConnectionError
        return self.rollouts[0]

    def watch(self, domain, stop, interval):
        yield from self.rollouts
        stop.wait()


@pytest.fixture(scope="module")
def initial(tiny_target, tmp_path_factory):
    settings = Settings(home=tmp_path_factory.mktemp("home"), drafter={"kind": "language_model"})
    return drafting.initial(settings.drafter, tiny_target, settings.home_dir)


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path, drafter={"kind": "language_model"})


@pytest.fixture(scope="module")
def versions(initial, tmp_path_factory):
    """Folder of versions 1 to 3; version 2 is damaged."""
    registry = Registry(tmp_path_factory.mktemp("versions"))
    for _ in range(3):
        registry.publish("general", initial.weights(), initial.config(), {})
    weights = registry.root / "general" / "2" / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1])
    return registry.root


@pytest.fixture
def registry(settings, versions):
    return Registry(shutil.copytree(versions, settings.registry_dir))


@pytest.mark.parametrize(
    ("rollout", "version", "refused"),
    [(at(3), 3, set()), (at(2), 1, set()), (at(1), 1, set()), (None, 3, set())],
    ids=["stable version", "damaged version", "not a newer version", "no Redis"],
)
def test_start_uses_the_pointed_version_or_the_one_before_it(
    settings, registry, tiny_target, rollout, version, refused
):
    start = starting_drafter(settings, registry, ScriptedPointer(rollout), tiny_target)
    assert (start.version, start.refused) == (version, refused)


def test_start_without_a_good_version_uses_initial_weights(settings, tiny_target, initial):
    start = starting_drafter(settings, Registry(settings.registry_dir), ScriptedPointer(at(1)), tiny_target)
    assert start.version == 0
    assert all(torch.equal(weight, initial.weights()[name]) for name, weight in start.drafter.weights().items())


def test_start_without_a_registry_swaps_to_the_version_later(
    settings, registry, tiny_target, monkeypatch, caplog, short_pauses
):
    broken = FlakyRegistry(registry.root, 1, EIO)
    monkeypatch.setattr(broken, "numbers", fail_to_list)
    start = starting_drafter(settings, broken, ScriptedPointer(at(3)), tiny_target)
    assert (start.version, start.refused) == (0, set())
    assert "cannot list" in caplog.text
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, broken, engine, events, at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]


def fail_to_list(domain):
    raise OSError(errno.EIO, "no disk")


def test_start_without_a_version_list_uses_a_readable_version(settings, registry, tiny_target, monkeypatch):
    monkeypatch.setattr(registry, "numbers", fail_to_list)
    assert starting_drafter(settings, registry, ScriptedPointer(at(3)), tiny_target).version == 3


def test_recall_starts_without_a_version(tmp_path, tiny_target):
    settings = Settings(home=tmp_path, drafter={"kind": "recall"})
    start = starting_drafter(settings, Registry(settings.registry_dir), ScriptedPointer(None), tiny_target)
    assert (start.drafter.kind, start.version) == ("recall", 0)


def test_growth_policy_decides_whether_a_drafter_has_a_head(settings, registry, tiny_target):
    with_head = settings.model_copy(update={"growth": AcceptanceHeadSettings()})
    for version, source in ((3, registry), (0, Registry(settings.home / "empty"))):
        start = starting_drafter(with_head, source, ScriptedPointer(at(3)), tiny_target)
        assert start.version == version
        assert start.drafter.acceptance is not None
    assert starting_drafter(settings, registry, ScriptedPointer(at(3)), tiny_target).drafter.acceptance is None


def test_drafter_cache_keeps_the_latest_configurations(tmp_path, initial, tiny_target, monkeypatch):
    made = []

    def make(config, target_dir):
        made.append(config["layers"])
        return config["layers"]

    monkeypatch.setattr(drafting, "from_config", make)
    monkeypatch.setattr(drafting, "served", lambda drafter, settings: drafter)
    cache = DrafterCache(initial, Settings(home=tmp_path, engine={"domains": 1}), tiny_target)
    assert [cache.of({"layers": number}) for number in (1, 2, 2, 1, 3, 1, 2)] == [1, 2, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]


class ScriptedEngine:
    """Engine that accepts every version except ``misfits``, and fails the first ``unswapped`` swaps."""

    drafter_version = 1
    canary_version = None

    def __init__(self, misfits=(), unswapped=0):
        self.misfits, self.staged, self.shares, self.unswapped = misfits, [], [], unswapped
        self.references = []

    def stage(self, number, weights, drafter):
        self.staged.append(number)
        if number in self.misfits:
            raise DrafterError("a shape is wrong")
        if len(self.staged) > self.unswapped:
            self.drafter_version = number

    def swap_failure(self, number):
        return "MemoryError"

    def try_canary(self, rollout, weights, drafter=None):
        assert (weights is None) == (rollout.canary == self.canary_version)
        if rollout.canary in self.misfits:
            raise DrafterError("a shape is wrong")
        self.canary_version = rollout.canary
        self.shares.append((rollout.canary, rollout.share, self.drafter_version))

    def end_canary(self):
        self.canary_version = None
        self.shares.append((None, 0.0, self.drafter_version))

    def refer(self, number, weights, drafter=None):
        self.references.append((number, self.drafter_version))


def watch(
    settings, registry, engine, events, *rollouts, until=None, unreadable=False, refused=(), cache=None, current=None
):
    """Run a watcher over ``rollouts`` and return it.

    With the condition ``until``, the pointer stays at ``current``, or else at the last rollout, until the condition
    holds.
    """
    pointer, finished = ScriptedPointer(*rollouts), threading.Event()

    def read(domain):
        if unreadable:
            raise EIO
        return (current or rollouts[-1]) if until else None

    def watch_rollouts(domain, stop, interval):
        yield from rollouts
        finished.set()
        stop.wait()

    pointer.get, pointer.watch = read, watch_rollouts
    context = FollowerContext(settings, registry, pointer, events, cache or SingleDrafterCache())
    watcher = VersionWatcher(context, engine, InitialDrafter(None, engine.drafter_version, set(refused)))
    watcher.start()
    wait_until(until or finished.is_set, every=0.002)
    watcher.close()
    return watcher


@pytest.mark.parametrize(("rollouts", "measure", "references"), [
    ([at(1), at(3), at(4)], 0.005, [(1, 3), (3, 4)]),
    ([at(1), at(3), at(4)], 0.0, []),
    ([at(3), at(1)], 0.005, [(1, 3)]),
    ([at(1), at(1, 3), at(3)], 0.005, []),
    ([at(3), at(4, changed=2.0)], 0.005, [(1, 3), (3, 4)]),
], ids=["new versions", "without measuring", "rollback", "promoted canary", "next version"])  # fmt: skip
def test_new_version_is_compared_with_the_one_before(settings, registry, initial, rollouts, measure, references):
    registry.publish(settings.domain, initial.weights(), initial.config(), {})
    settings = settings.model_copy(update={"economy": settings.economy.model_copy(update={"measure": measure})})
    engine = ScriptedEngine()
    watch(settings, registry, engine, RecordingEvents(), *rollouts)
    assert engine.references == references


def test_new_version_of_a_mixed_drafter_needs_no_version_before(settings, registry, initial, monkeypatch):
    """It is compared with recall alone, and the version before is not loaded."""
    registry.publish(settings.domain, initial.weights(), initial.config(), {})
    loaded, load = [], registry.load
    monkeypatch.setattr(registry, "load", lambda domain, number: loaded.append(number) or load(domain, number))
    settings = Settings(home=settings.home, drafter={"kind": "mixed", "trained": {"kind": "language_model"}})
    engine = ScriptedEngine()
    watch(settings, registry, engine, RecordingEvents(), at(1), at(3))
    assert (engine.references, loaded) == ([], [3])


@pytest.mark.parametrize("before", [0, 2], ids=["initial weights", "damaged"])
def test_unreadable_version_before_leaves_the_effect_unmeasured(settings, registry, before):
    engine, events = ScriptedEngine(), RecordingEvents()
    engine.drafter_version = before
    watcher = watch(settings, registry, engine, events, at(3))
    assert engine.references == []
    assert (events.events, watcher.rejected) == ([("swapped", 3)], 0)


def test_uptake_adds_cpu_time_and_stalled_cores():
    uptake = Uptake(cores=4)
    assert uptake.per_version(swaps=0, stall=0.0) == 0.0
    uptake.add(0.3)
    uptake.add(0.1)
    assert uptake.per_version(swaps=0, stall=0.0) == pytest.approx(0.2)
    uptake.add(0.2, versions=0)
    assert uptake.per_version(swaps=0, stall=0.0) == pytest.approx(0.3)
    assert uptake.per_version(swaps=10, stall=0.5) == pytest.approx(0.3 + 4 * 0.05)


def test_uptake_counts_only_loaded_versions(settings, registry):
    uptake = Uptake()
    context = FollowerContext(settings, registry, ScriptedPointer(), RecordingEvents(), SingleDrafterCache(), uptake)
    follower = DomainFollower(settings.domain, context, ScriptedEngine(), threading.Event())
    assert not follower.use(99, lambda version: None)
    assert uptake.per_version(0, 0.0) == 0.0

    def work(version):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    assert follower.use(3, work)
    assert uptake.per_version(0, 0.0) >= 0.05


@pytest.mark.parametrize(("misfits", "number"), [((), 2), ((), 99), ((3,), 3)], ids=["damaged", "missing", "misfit"])
def test_unusable_version_is_rejected_counted_and_reported(settings, registry, misfits, number):
    engine, events = ScriptedEngine(misfits), RecordingEvents()
    watcher = watch(settings, registry, engine, events, at(number))
    assert engine.drafter_version == 1
    assert events.events == [("rejected", number)]
    assert watcher.rejected == 1


def test_version_with_an_invalid_config_is_rejected_by_name(settings, registry, tiny_target, caplog):
    eagle = drafting.initial(EagleSettings(vocabulary=64), tiny_target, tiny_target)
    number = registry.publish(settings.domain, eagle.weights(), {**eagle.config(), "heads": 3}, {})
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, registry, engine, events, at(number), cache=DrafterCache(eagle, settings, tiny_target))
    assert engine.drafter_version == 1
    assert events.events == [("rejected", number)]
    (message,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert message.endswith("the running version stays: heads is 3, but must be a multiple of kv_heads, which is 2")


def test_next_version_is_followed_after_a_rejection(settings, registry):
    engine, events = ScriptedEngine(), RecordingEvents(failing=True)
    watcher = watch(settings, registry, engine, events, at(2), at(3))
    assert engine.drafter_version == 3
    assert watcher.rejected == 1


def test_unexpected_error_does_not_end_the_watcher(settings, registry, monkeypatch):
    engine, events = ScriptedEngine(), RecordingEvents()
    stage = engine.stage

    def fail_once(number, weights, drafter):
        monkeypatch.setattr(engine, "stage", stage)
        raise RuntimeError

    monkeypatch.setattr(engine, "stage", fail_once)
    watch(settings, registry, engine, events, at(3), at(3, changed=2.0, moves=1))
    assert events.events == [("rejected", 3), ("swapped", 3)]


def test_version_rejected_at_start_is_tried_after_a_new_pointer(settings, registry):
    engine, events = ScriptedEngine(), RecordingEvents()
    watcher = watch(settings, registry, engine, events, at(3), at(3, changed=2.0, moves=1), refused={3})
    assert events.events == [("rejected", 3), ("swapped", 3)]
    assert watcher.rejected == 1


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(rollout_follower, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(rollout_follower, "_FIRST_PAUSE", 0.01)


class FlakyRegistry(Registry):
    """Registry whose first ``failures`` loads fail with ``error``."""

    def __init__(self, root, failures, error):
        super().__init__(root)
        self.failures, self.error, self.tries = failures, error, []

    def load(self, domain, number):
        self.tries.append(time.monotonic())
        if len(self.tries) <= self.failures:
            try:
                raise self.error
            except OSError:
                if self.error.errno == errno.ESTALE:  # the registry raises its own error for a file
                    raise VersionError("general/3: cannot read model.safetensors") from None
                raise
        return super().load(domain, number)


EIO = OSError(errno.EIO, "Input/output error")
ESTALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("error", [EIO, ESTALE], ids=["OSError", "VersionError"])
def test_unreadable_version_is_retried_with_longer_pauses(settings, registry, short_pauses, error):
    flaky = FlakyRegistry(registry.root, 4, error)
    engine, events = ScriptedEngine(), RecordingEvents()
    watcher = watch(settings, flaky, engine, events, at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]
    assert watcher.rejected == 0
    pauses = [after - before for before, after in itertools.pairwise(flaky.tries[:5])]
    assert len(pauses) == 4
    assert all(pause >= 0.01 * 2**number for number, pause in enumerate(pauses))


def test_unreadable_canary_is_retried(settings, registry, short_pauses):
    flaky = FlakyRegistry(registry.root, 2, EIO)
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, flaky, engine, events, at(1, 3), until=lambda: engine.shares)
    assert engine.shares == [(3, 0.5, 1)]
    assert events.events == []


def test_moved_pointer_ends_retries_of_the_old_version(settings, registry, short_pauses):
    flaky = FlakyRegistry(registry.root, 1, EIO)
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, flaky, engine, events, at(2), at(3, moves=1), until=lambda: events.events)
    assert events.events == [("swapped", 3)]
    assert engine.staged == [3]


def test_version_unreadable_at_start_is_swapped_in_later(settings, registry, tiny_target, short_pauses):
    flaky = FlakyRegistry(registry.root, 1, EIO)
    start = starting_drafter(settings, flaky, ScriptedPointer(at(3)), tiny_target)
    assert (start.version, start.refused) == (1, set()), "2 is damaged, and 3 was not readable"
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, flaky, engine, events, at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]


def test_damaged_version_is_reported_once_and_retried(settings, registry, initial, short_pauses):
    folder = settings.registry_dir / settings.domain
    engine, events = ScriptedEngine(), RecordingEvents()

    def repair():
        if events.events == [("rejected", 2)]:
            (folder / "2" / "model.safetensors").write_bytes((folder / "1" / "model.safetensors").read_bytes())
        return engine.drafter_version == 2 and len(events.events) == 2

    watcher = watch(settings, registry, engine, events, at(2), until=repair)
    assert events.events == [("rejected", 2), ("swapped", 2)]
    assert "model.safetensors does not match the sha256" in events.reasons[0]
    assert watcher.rejected == 1


def test_lease_of_a_trainer_does_not_end_retries(settings, registry, short_pauses):
    flaky = FlakyRegistry(registry.root, 2, EIO)
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, flaky, engine, events, at(3), current=at(3, fence=1), until=lambda: events.events)
    assert events.events == [("swapped", 3)]


def test_lease_of_a_trainer_does_not_retry_a_rejected_version(settings, registry):
    engine, events = ScriptedEngine(misfits={3}), RecordingEvents()
    follower = DomainFollower(
        "general", FollowerContext(settings, registry, None, events, SingleDrafterCache()), engine, threading.Event()
    )
    for rollout in (at(3), at(3, fence=1), at(3, changed=2.0, fence=1)):
        follower.follow(rollout)
    assert engine.staged == [3]
    follower.follow(at(3, changed=2.0, moves=1, fence=1))
    assert engine.staged == [3, 3]


def test_unreadable_pointer_does_not_end_retries(settings, registry, short_pauses):
    flaky = FlakyRegistry(registry.root, 2, EIO)
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, flaky, engine, events, at(3), until=lambda: events.events, unreadable=True)
    assert events.events == [("swapped", 3)]


def test_damaged_version_is_reported_once_while_canaries_change(settings, registry, short_pauses):
    engine, events = ScriptedEngine(), RecordingEvents()
    watcher = watch(settings, registry, engine, events, at(2), at(2, 3), at(2, 3, 0.2))
    assert events.events == [("rejected", 2)]
    assert watcher.rejected == 1
    assert engine.shares == [(3, 0.5, 1), (3, 0.2, 1)]


def test_failed_swap_is_reported_and_retried(settings, registry, short_pauses):
    engine, events = ScriptedEngine(unswapped=2), RecordingEvents()
    watcher = watch(settings, registry, engine, events, at(3), until=lambda: len(events.events) == 2)
    assert events.events == [("rejected", 3), ("swapped", 3)]
    assert events.reasons == ["it cannot be swapped in (MemoryError)", None]
    assert engine.staged == [3, 3, 3]
    assert watcher.rejected == 1


def test_late_swap_is_reported_as_failed_and_then_as_done(settings, registry, short_pauses, monkeypatch):
    monkeypatch.setattr(rollout_follower, "_SWAP_SECONDS", 0.05)
    engine, events = ScriptedEngine(unswapped=1), RecordingEvents()
    engine.swap_failure = lambda number: None

    def swap_late():
        if events.events:
            engine.drafter_version = 3
        return len(events.events) == 2

    watch(settings, registry, engine, events, at(3), until=swap_late)
    assert events.events == [("rejected", 3), ("swapped", 3)]
    assert "no swap within" in events.reasons[0]


def test_canary_follows_its_share_and_its_end(settings, registry):
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, registry, engine, events, at(1, 3), at(1, 3, 0.2), at(1, 3, 0.0), at(1, 3), at(1))
    assert engine.shares == [(3, 0.5, 1), (3, 0.2, 1), (None, 0.0, 1), (3, 0.5, 1), (None, 0.0, 1)]
    assert engine.staged == []
    assert events.events == []


def test_promoted_canary_drafts_in_its_share_until_the_swap(settings, registry):
    engine, events = ScriptedEngine(), RecordingEvents()
    watch(settings, registry, engine, events, at(1, 3), at(3))
    assert engine.staged == [3]
    assert engine.shares == [(3, 0.5, 1), (None, 0.0, 3)]
    assert events.events == [("swapped", 3)]


@pytest.mark.parametrize(("misfits", "number"), [((), 2), ((), 99), ((3,), 3)], ids=["damaged", "missing", "misfit"])
def test_stable_version_replaces_an_unusable_canary(settings, registry, misfits, number):
    engine, events = ScriptedEngine(misfits), RecordingEvents()
    engine.canary_version = 7
    watcher = watch(settings, registry, engine, events, at(1, number))
    assert events.events == [("rejected", number)]
    assert watcher.rejected == 1
    assert engine.shares == [(None, 0.0, 1)], "the earlier canary ended"
    assert engine.drafter_version == 1


def test_close_ends_the_thread(settings, registry):
    start = InitialDrafter(None, 1)
    context = FollowerContext(settings, registry, ScriptedPointer(at(1)), RecordingEvents(), SingleDrafterCache())
    watcher, before = VersionWatcher(context, ScriptedEngine(), start), threading.enumerate()
    watcher.start()
    watcher.close()
    assert threading.enumerate() == before


def test_versions_with_the_same_configuration_share_a_drafter(initial, tiny_target):
    cache = DrafterCache(initial, Settings(drafter=EagleSettings(), growth=AcceptanceHeadSettings()), tiny_target)
    assert cache.of(initial.config()) is initial
    assert cache.of({**initial.config(), "acceptance_head": True}) is initial, "with or without a head"
    eagle = drafting.initial(EagleSettings(vocabulary=64), tiny_target, tiny_target)
    second = cache.of(eagle.config())
    assert second is cache.of(eagle.config()) is not initial
    assert second.config() == {**eagle.config(), "acceptance_head": True}, "the growth policy needs a head"
    with pytest.raises(drafting.DrafterError, match="drafter kind 'magic' is not one of"):
        cache.of({"kind": "magic"})
