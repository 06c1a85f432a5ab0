from __future__ import annotations

import errno
import itertools
import threading
import time

import pytest
import torch
from redis.exceptions import ConnectionError as RedisGone

from osd import drafting
from osd.config import AcceptanceHeadSettings, EagleSettings, Settings
from osd.drafting.base import DrafterError
from osd.engine.build import Start
from osd.registry.versions import Registry, VersionError
from serving.replica import rollout_follower
from serving.replica.rollout_follower import DrafterCache, Follower, Uptake, Versions, VersionWatcher, starting_drafter
from tests.unit.serving.rollouts import OneDrafter, ScriptedEvents, at
from tests.waiting import wait_until


class ScriptedPointer:
    """Gives rollouts without Redis; ``None`` means that Redis does not answer."""

    def __init__(self, *rollouts):
        self.rollouts = rollouts

    def get(self, domain):
        if not self.rollouts or self.rollouts[0] is None:
            raise RedisGone
        return self.rollouts[0]

    def watch(self, domain, stop, interval):
        yield from self.rollouts
        stop.wait()


@pytest.fixture(scope="module")
def first(tiny_target, tmp_path_factory):
    settings = Settings(home=tmp_path_factory.mktemp("home"), drafter={"kind": "language_model"})
    return drafting.initial(settings.drafter, tiny_target, settings.home_dir)


@pytest.fixture
def settings(tmp_path):
    return Settings(home=tmp_path, drafter={"kind": "language_model"})


@pytest.fixture
def registry(settings, first):
    """Versions 1 to 3; the second is damaged."""
    registry = Registry(settings.registry_dir)
    for _ in range(3):
        registry.publish(settings.domain, first.weights(), first.config(), {})
    weights = settings.registry_dir / settings.domain / "2" / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1])
    return registry


@pytest.mark.parametrize(
    ("rollout", "version", "refused"),
    [(at(3), 3, set()), (at(2), 1, set()), (at(1), 1, set()), (None, 3, set())],
    ids=["as pointed", "damaged: the last good one before it", "not a newer one", "no Redis: the newest"],
)
def test_a_replica_starts_with_the_version_in_service_or_the_last_good_one(
    settings, registry, tiny_target, rollout, version, refused
):
    start = starting_drafter(settings, registry, ScriptedPointer(rollout), tiny_target)
    assert (start.version, start.refused) == (version, refused)


def test_without_any_good_version_a_replica_starts_with_initial_weights(settings, tiny_target, first):
    start = starting_drafter(settings, Registry(settings.registry_dir), ScriptedPointer(at(1)), tiny_target)
    assert start.version == 0
    assert all(torch.equal(weight, first.weights()[name]) for name, weight in start.drafter.weights().items())


def test_a_replica_that_cannot_list_the_versions_starts_and_takes_up_the_one_in_service_later(
    settings, registry, tiny_target, monkeypatch, caplog, quick
):
    broken = FlakyRegistry(registry.root, 1, EIO)
    monkeypatch.setattr(broken, "numbers", unlisted)
    start = starting_drafter(settings, broken, ScriptedPointer(at(3)), tiny_target)
    assert (start.version, start.refused) == (0, set())
    assert "cannot be listed" in caplog.text
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, broken, engine, events, at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]


def unlisted(domain):
    raise OSError(errno.EIO, "no disk")


def test_a_replica_that_cannot_list_the_versions_starts_with_the_one_in_service_where_it_can_read_that(
    settings, registry, tiny_target, monkeypatch
):
    monkeypatch.setattr(registry, "numbers", unlisted)
    assert starting_drafter(settings, registry, ScriptedPointer(at(3)), tiny_target).version == 3


def test_a_replica_that_recalls_needs_no_version(tmp_path, tiny_target):
    settings = Settings(home=tmp_path, drafter={"kind": "recall"})
    start = starting_drafter(settings, Registry(settings.registry_dir), ScriptedPointer(None), tiny_target)
    assert (start.drafter.kind, start.version) == ("recall", 0)


def test_a_replica_that_asks_a_head_has_one_whatever_its_version_says(settings, registry, tiny_target):
    asking = settings.model_copy(update={"growth": AcceptanceHeadSettings()})
    for version, place in ((3, registry), (0, Registry(settings.home / "empty"))):
        start = starting_drafter(asking, place, ScriptedPointer(at(3)), tiny_target)
        assert start.version == version
        assert start.drafter.acceptance is not None
    assert starting_drafter(settings, registry, ScriptedPointer(at(3)), tiny_target).drafter.acceptance is None


def test_drafters_of_many_configurations_are_not_all_kept(tmp_path, first, tiny_target, monkeypatch):
    made = []

    def make(config, target_dir):
        made.append(config["layers"])
        return config["layers"]

    monkeypatch.setattr(drafting, "from_config", make)
    monkeypatch.setattr(drafting, "served", lambda drafter, settings: drafter)
    cache = DrafterCache(first, Settings(home=tmp_path, engine={"domains": 1}), tiny_target)
    assert [cache.of({"layers": number}) for number in (1, 2, 2, 1, 3, 1, 2)] == [1, 2, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]


class ScriptedEngine:
    """Takes every version but those in ``misfits``."""

    drafter_version = 1
    canary_version = None

    def __init__(self, misfits=(), unswapped=0):
        self.misfits, self.staged, self.shares, self.unswapped = misfits, [], [], unswapped

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


def followed(settings, registry, engine, events, *rollouts, until=None, unreadable=False, refused=(), cache=None):
    """Watch a pointer until a condition holds and it stays at the last of ``rollouts``, else until it has left all."""
    pointer, left = ScriptedPointer(*rollouts), threading.Event()

    def read(domain):
        if unreadable:
            raise EIO
        return rollouts[-1] if until else None

    def watched(domain, stop, interval):
        yield from rollouts
        left.set()
        stop.wait()

    pointer.get, pointer.watch = read, watched
    versions = Versions(settings, registry, pointer, events, cache or OneDrafter())
    watcher = VersionWatcher(versions, engine, Start(None, engine.drafter_version, set(refused)))
    watcher.start()
    wait_until(until or left.is_set, every=0.002)
    watcher.close()
    return watcher


def test_a_new_version_is_staged_and_told(settings, registry):
    engine, events = ScriptedEngine(), ScriptedEvents()
    watcher = followed(settings, registry, engine, events, at(1), at(3))
    assert engine.staged == [3]
    assert events.events == [("swapped", 3)]
    assert watcher.rejected == 0


def test_what_a_version_takes_is_measured_by_the_cpu_and_the_rounds_that_waited():
    uptake = Uptake(cores=4)
    assert uptake.each(swaps=0, stall=0.0) == 0.0
    uptake.add(0.3)
    uptake.add(0.1)
    assert uptake.each(swaps=0, stall=0.0) == pytest.approx(0.2)
    assert uptake.each(swaps=10, stall=0.5) == pytest.approx(0.2 + 4 * 0.05)


def test_a_version_that_is_taken_up_is_counted_and_one_that_is_refused_is_not(settings, registry):
    uptake = Uptake()
    versions = Versions(settings, registry, ScriptedPointer(), ScriptedEvents(), OneDrafter(), uptake)
    follower = Follower(settings.domain, versions, ScriptedEngine(), threading.Event())  # type: ignore[arg-type]
    assert not follower.use(99, lambda version: None)
    assert uptake.each(0, 0.0) == 0.0

    def work(version):
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    assert follower.use(3, work)
    assert uptake.each(0, 0.0) >= 0.05


@pytest.mark.parametrize(("misfits", "number"), [((), 2), ((), 99), ((3,), 3)], ids=["damaged", "missing", "misfit"])
def test_a_version_that_cannot_be_used_is_refused_counted_and_told(settings, registry, misfits, number):
    engine, events = ScriptedEngine(misfits), ScriptedEvents()
    watcher = followed(settings, registry, engine, events, at(number))
    assert engine.drafter_version == 1
    assert events.events == [("rejected", number)]
    assert watcher.rejected == 1


def test_a_version_with_an_impossible_number_of_heads_is_refused_in_one_sentence_and_what_runs_stays(
    settings, registry, tiny_target, caplog
):
    eagle = drafting.initial(EagleSettings(vocabulary=64), tiny_target, tiny_target)
    number = registry.publish(settings.domain, eagle.weights(), {**eagle.config(), "heads": 3}, {})
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, registry, engine, events, at(number), cache=DrafterCache(eagle, settings, tiny_target))
    assert engine.drafter_version == 1
    assert events.events == [("rejected", number)]
    (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert said.endswith("is refused, what runs stays: heads is 3, but must be a multiple of kv_heads, which is 2")


def test_after_a_refusal_the_next_version_is_followed(settings, registry):
    engine, events = ScriptedEngine(), ScriptedEvents(gone=True)
    watcher = followed(settings, registry, engine, events, at(2), at(3))
    assert engine.drafter_version == 3
    assert watcher.rejected == 1


def test_an_error_that_nobody_foresaw_does_not_end_the_followed(settings, registry, monkeypatch):
    engine, events = ScriptedEngine(), ScriptedEvents()
    stage = engine.stage

    def fail_once(number, weights, drafter):
        monkeypatch.setattr(engine, "stage", stage)
        raise RuntimeError

    monkeypatch.setattr(engine, "stage", fail_once)
    followed(settings, registry, engine, events, at(3), at(3, changed=2.0))
    assert events.events == [("rejected", 3), ("swapped", 3)]


def test_what_was_refused_at_the_start_is_counted_once_and_tried_when_pointed_at_again(settings, registry):
    engine, events = ScriptedEngine(), ScriptedEvents()
    watcher = followed(settings, registry, engine, events, at(3), at(3, changed=2.0), refused={3})
    assert events.events == [("rejected", 3), ("swapped", 3)]
    assert watcher.rejected == 1


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(rollout_follower, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(rollout_follower, "_FIRST_PAUSE", 0.01)


class FlakyRegistry(Registry):
    """Fails to read so many times before it can."""

    def __init__(self, root, failures, error):
        super().__init__(root)
        self.failures, self.error, self.tried = failures, error, []

    def load(self, domain, number):
        self.tried.append(time.monotonic())
        if len(self.tried) <= self.failures:
            try:
                raise self.error
            except OSError:
                if self.error.errno == errno.ESTALE:  # as the registry says it of a file that it reads
                    raise VersionError("general/3: cannot read model.safetensors") from None
                raise
        return super().load(domain, number)


EIO = OSError(errno.EIO, "Input/output error")
ESTALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("error", [EIO, ESTALE], ids=["raw", "as the registry says it"])
def test_a_version_that_cannot_be_read_now_is_tried_again_with_longer_pauses(settings, registry, quick, error):
    flaky = FlakyRegistry(registry.root, 4, error)
    engine, events = ScriptedEngine(), ScriptedEvents()
    watcher = followed(settings, flaky, engine, events, at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]
    assert watcher.rejected == 0, "it was not refused"
    pauses = [later - sooner for sooner, later in itertools.pairwise(flaky.tried)]
    assert len(pauses) == 4
    assert all(pause >= 0.01 * 2**number for number, pause in enumerate(pauses))


def test_a_canary_that_cannot_be_read_now_is_tried_again(settings, registry, quick):
    flaky = FlakyRegistry(registry.root, 2, EIO)
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, flaky, engine, events, at(1, 3), until=lambda: engine.shares)
    assert engine.shares == [(3, 0.5, 1)]
    assert events.events == []


def test_a_pointer_that_moves_on_ends_the_tries(settings, registry, quick):
    flaky = FlakyRegistry(registry.root, 1, EIO)
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, flaky, engine, events, at(2), at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]
    assert engine.staged == [3]


def test_a_replica_that_could_not_read_its_version_at_the_start_takes_it_up_later(
    settings, registry, tiny_target, quick
):
    flaky = FlakyRegistry(registry.root, 1, EIO)
    start = starting_drafter(settings, flaky, ScriptedPointer(at(3)), tiny_target)
    assert (start.version, start.refused) == (1, set()), "2 is damaged, 3 was not readable"
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, flaky, engine, events, at(3), until=lambda: events.events)
    assert events.events == [("swapped", 3)]


def test_a_damaged_version_is_told_of_once_and_tried_again_until_it_is_put_right(settings, registry, first, quick):
    folder = settings.registry_dir / settings.domain
    engine, events = ScriptedEngine(), ScriptedEvents()

    def put_right():
        if events.events == [("rejected", 2)]:
            (folder / "2" / "model.safetensors").write_bytes((folder / "1" / "model.safetensors").read_bytes())
        return engine.drafter_version == 2 and len(events.events) == 2

    watcher = followed(settings, registry, engine, events, at(2), until=put_right)
    assert events.events == [("rejected", 2), ("swapped", 2)]
    assert "model.safetensors does not match the sha256" in events.reasons[0]
    assert watcher.rejected == 1


def test_a_pointer_that_cannot_be_read_does_not_end_the_tries(settings, registry, quick):
    flaky = FlakyRegistry(registry.root, 2, EIO)
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, flaky, engine, events, at(3), until=lambda: events.events, unreadable=True)
    assert events.events == [("swapped", 3)]


def test_a_version_that_is_damaged_is_told_of_once_while_the_canary_beside_it_changes(settings, registry, quick):
    engine, events = ScriptedEngine(), ScriptedEvents()
    watcher = followed(settings, registry, engine, events, at(2), at(2, 3), at(2, 3, 0.2))
    assert events.events == [("rejected", 2)]
    assert watcher.rejected == 1
    assert engine.shares == [(3, 0.5, 1), (3, 0.2, 1)]


def test_a_swap_that_fails_is_told_as_failed_and_tried_again(settings, registry, quick):
    engine, events = ScriptedEngine(unswapped=2), ScriptedEvents()
    watcher = followed(settings, registry, engine, events, at(3), until=lambda: len(events.events) == 2)
    assert events.events == [("rejected", 3), ("swapped", 3)]
    assert events.reasons == ["it cannot be swapped in (MemoryError)", None]
    assert engine.staged == [3, 3, 3]
    assert watcher.rejected == 1


def test_a_swap_that_comes_late_is_told_as_failed_and_then_as_done(settings, registry, quick, monkeypatch):
    monkeypatch.setattr(rollout_follower, "_SWAP_SECONDS", 0.05)
    engine, events = ScriptedEngine(unswapped=1), ScriptedEvents()
    engine.swap_failure = lambda number: None

    def swapped_late():
        if events.events:
            engine.drafter_version = 3
        return len(events.events) == 2

    followed(settings, registry, engine, events, at(3), until=swapped_late)
    assert events.events == [("rejected", 3), ("swapped", 3)]
    assert "no swap within" in events.reasons[0]


def test_a_canary_is_tried_has_its_share_changed_and_is_ended(settings, registry):
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, registry, engine, events, at(1, 3), at(1, 3, 0.2), at(1, 3, 0.0), at(1, 3), at(1))
    assert engine.shares == [(3, 0.5, 1), (3, 0.2, 1), (None, 0.0, 1), (3, 0.5, 1), (None, 0.0, 1)]
    assert engine.staged == []
    assert events.events == []


def test_a_canary_that_is_promoted_serves_its_share_until_it_serves_all(settings, registry):
    engine, events = ScriptedEngine(), ScriptedEvents()
    followed(settings, registry, engine, events, at(1, 3), at(3))
    assert engine.staged == [3]
    assert engine.shares == [(3, 0.5, 1), (None, 0.0, 3)]
    assert events.events == [("swapped", 3)]


@pytest.mark.parametrize(("misfits", "number"), [((), 2), ((), 99), ((3,), 3)], ids=["damaged", "missing", "misfit"])
def test_a_canary_that_cannot_be_used_is_refused_and_stable_serves_its_share(settings, registry, misfits, number):
    engine, events = ScriptedEngine(misfits), ScriptedEvents()
    engine.canary_version = 7
    watcher = followed(settings, registry, engine, events, at(1, number))
    assert events.events == [("rejected", number)]
    assert watcher.rejected == 1
    assert engine.shares == [(None, 0.0, 1)], "the canary before it has been decided on"
    assert engine.drafter_version == 1


def test_closing_ends_the_thread(settings, registry):
    start = Start(None, 1)
    versions = Versions(settings, registry, ScriptedPointer(at(1)), ScriptedEvents(), OneDrafter())
    watcher, before = VersionWatcher(versions, ScriptedEngine(), start), threading.enumerate()
    watcher.start()
    watcher.close()
    assert threading.enumerate() == before


def test_versions_of_one_configuration_share_a_drafter_and_another_configuration_makes_another(first, tiny_target):
    cache = DrafterCache(first, Settings(drafter=EagleSettings(), growth=AcceptanceHeadSettings()), tiny_target)
    assert cache.of(first.config()) is first
    assert cache.of({**first.config(), "acceptance_head": True}) is first, "with or without a head"
    eagle = drafting.initial(EagleSettings(vocabulary=64), tiny_target, tiny_target)
    other = cache.of(eagle.config())
    assert other is cache.of(eagle.config()) is not first
    assert other.config() == {**eagle.config(), "acceptance_head": True}, "as the growth policy asks"
    with pytest.raises(drafting.DrafterError, match="drafter kind 'magic' is not one of"):
        cache.of({"kind": "magic"})
