"""What a replica recalls outlives it, unless it is of something else, of single clients, or too old."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from osd.drafting.recall.drafter import Recall
from osd.drafting.recall.snapshot import Snapshots
from osd.target.identity import identify
from serving.replica.recall_keeper import RecallKeeper
from tests.tiny import make_tiny
from tests.unit.engine.harness import prompts, running
from tests.waiting import wait_until

NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def keeping(tiny_target, tmp_path):
    """Runs an engine with its keeper, as a replica does."""

    @contextmanager
    def keeping(directory=tiny_target, keep_days=None, **more):
        with running(directory, drafter=Recall(), keep_days=keep_days, **more) as client:
            settings = client.engine.settings.model_copy(update={"home": tmp_path})
            keeper = RecallKeeper(settings, NO_REDIS, "a", identify("tiny", directory), client.engine)
            keeper.start()
            client.keeper = keeper
            try:
                yield client
            finally:
                keeper.close()

    return keeping


def serve(client, domain="general", whose=""):
    for index, prompt in enumerate(prompts([5, 9])):
        request = f"{domain} {index}"
        client.submit(request, prompt, 12, ignore_eos=True, capture=True, domain=domain, client=whose)
    client.wait()


def used(client, domain="general"):
    return sum(table.used() for table in client.engine.pool.recalled()[domain].tables)


def test_a_new_replica_starts_with_what_the_last_one_recalled(keeping):
    with keeping() as client:
        assert used(client) == 0
        serve(client)
        before = used(client)
    with keeping() as client:
        assert used(client) == before > 0


def test_another_domain_starts_with_its_own_when_it_is_opened(keeping):
    with keeping() as client:
        client.engine.pool.open("code", 7, {}, Recall())
        serve(client, "code")
        client.keeper.look()
        before = used(client, "code")
    with keeping() as client:
        client.engine.pool.open("code", 7, {}, Recall())
        client.keeper.look()
        assert used(client, "code") == before > 0
        assert used(client) == 0
        client.engine.pool.drop("code")
        client.engine.pool.open("code", 7, {}, Recall())
        client.keeper.look()
        assert used(client, "code") == before, "a domain that comes back does too"


def test_a_tenant_that_gives_way_to_another_finds_again_what_it_recalled(keeping):
    with keeping() as client:
        client.submit("hers", prompts([9])[0], 12, ignore_eos=True, capture=True, domain=None, tenant="acme")
        client.wait()
        client.keeper.look()
        before = used(client, "acme.general")
        for number in range(client.engine.settings.engine.domains):
            client.submit(f"{number}", [5, 6], 2, domain=None, tenant=f"t{number}")
            client.wait()
        assert "acme.general" not in client.engine.pool.recalled()
        client.keeper.look()
        client.submit("again", [5, 6], 2, domain=None, tenant="acme")
        client.wait()
        client.keeper.look()
        assert used(client, "acme.general") == before > 0


def test_a_snapshot_of_another_target_is_refused_in_one_sentence(keeping, tmp_path_factory, caplog):
    with keeping() as client:
        serve(client)
    with caplog.at_level("WARNING"), keeping(make_tiny(tmp_path_factory.mktemp("other"), seed=1)) as client:
        client.keeper.look()
        assert used(client) == 0
    (record,) = caplog.records
    assert (
        "the snapshot of what general recalled is refused, it starts empty: it is of another target" in record.message
    )


def test_what_single_clients_said_is_not_written_down(keeping, tmp_path):
    with keeping(shared=False) as client:
        serve(client, whose="hers")
        assert used(client) > 0
    assert not list(tmp_path.rglob("recall.safetensors"))


def test_snapshots_are_written_each_minute_in_which_something_was_decoded(keeping, tmp_path, monkeypatch):
    monkeypatch.setattr("serving.replica.recall_keeper._LOOK_SECONDS", 0.01)
    monkeypatch.setattr("serving.replica.recall_keeper._SAVE_SECONDS", 0.02)
    snapshots = Snapshots(tmp_path / "registry")
    with keeping() as client:
        time.sleep(0.2)
        assert snapshots.about("general") is None
        serve(client)
        wait_until(lambda: snapshots.about("general") is not None)


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_too_old_is_dropped_while_it_runs(keeping, shared, monkeypatch):
    with keeping(shared=shared, keep_days=2.0) as client:
        serve(client, whose="hers")
        client.keeper.save()
        assert used(client) > 0
        later = time.time() + 3 * 86_400
        monkeypatch.setattr("time.time", lambda: later)
        client.keeper.save()
        assert used(client) == 0
        monkeypatch.undo()


def test_what_is_too_old_is_dropped_when_it_starts(keeping, monkeypatch):
    with keeping() as client:
        serve(client)
    later = time.time() + 3 * 86_400
    monkeypatch.setattr("time.time", lambda: later)
    with keeping(keep_days=2.0) as client:
        assert used(client) == 0


def test_a_snapshot_that_nobody_renews_ages_too(keeping, tmp_path, monkeypatch):
    with keeping(keep_days=2.0) as client:
        client.engine.pool.open("code", 7, {}, Recall())
        serve(client, "code")
    later = time.time() + 3 * 86_400
    monkeypatch.setattr("time.time", lambda: later)
    with keeping(keep_days=2.0):
        pass
    assert not list(tmp_path.rglob("recall.safetensors"))
