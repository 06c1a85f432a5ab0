"""Recall snapshots of a replica, and the age limit of its recall tables."""

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
    """Return a context manager that runs an engine with its recall keeper."""

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


def serve(client, domain="general", user=""):
    for index, prompt in enumerate(prompts([5, 9])):
        request = f"{domain} {index}"
        client.submit(request, prompt, 12, ignore_eos=True, capture=True, domain=domain, client=user)
    client.wait()


def used(client, domain="general"):
    return sum(table.used() for table in client.engine.pool.all_memories()[domain].tables)


def test_new_replica_starts_from_the_recall_snapshot(keeping):
    with keeping() as client:
        assert used(client) == 0
        serve(client)
        before = used(client)
    with keeping() as client:
        assert used(client) == before > 0


def test_opened_domain_starts_from_its_own_snapshot(keeping):
    with keeping() as client:
        client.engine.pool.open("code", 7, {}, Recall())
        serve(client, "code")
        client.keeper.update()
        before = used(client, "code")
    with keeping() as client:
        client.engine.pool.open("code", 7, {}, Recall())
        client.keeper.update()
        assert used(client, "code") == before > 0
        assert used(client) == 0
        client.engine.pool.drop("code")
        client.engine.pool.open("code", 7, {}, Recall())
        client.keeper.update()
        assert used(client, "code") == before, "a returning domain has its snapshot too"


def test_dropped_tenant_returns_with_its_recall_table(keeping):
    with keeping() as client:
        client.submit("first", prompts([9])[0], 12, ignore_eos=True, capture=True, domain=None, tenant="acme")
        client.wait()
        client.keeper.update()
        before = used(client, "acme.general")
        for number in range(client.engine.settings.engine.domains):
            client.submit(f"{number}", [5, 6], 2, domain=None, tenant=f"t{number}")
            client.wait()
        assert "acme.general" not in client.engine.pool.all_memories()
        client.keeper.update()
        client.submit("again", [5, 6], 2, domain=None, tenant="acme")
        client.wait()
        client.keeper.update()
        assert used(client, "acme.general") == before > 0


def test_snapshot_of_another_target_logs_one_warning(keeping, tmp_path_factory, caplog):
    with keeping() as client:
        serve(client)
    with caplog.at_level("WARNING"), keeping(make_tiny(tmp_path_factory.mktemp("other"), seed=1)) as client:
        client.keeper.update()
        assert used(client) == 0
    (record,) = caplog.records
    message = "cannot use the recall snapshot of general, starting with an empty table: it is of another target"
    assert message in record.message


def test_tables_of_single_clients_have_no_snapshot(keeping, tmp_path):
    with keeping(shared=False) as client:
        serve(client, user="client")
        assert used(client) > 0
    assert not list(tmp_path.rglob("recall.safetensors"))


def test_snapshot_is_written_periodically_after_decoding(keeping, tmp_path, monkeypatch):
    monkeypatch.setattr("serving.replica.recall_keeper._POLL_SECONDS", 0.01)
    monkeypatch.setattr("serving.replica.recall_keeper._SAVE_SECONDS", 0.02)
    snapshots = Snapshots(tmp_path / "registry")
    with keeping() as client:
        time.sleep(0.2)
        assert snapshots.about("general") is None
        serve(client)
        wait_until(lambda: snapshots.about("general") is not None)


@pytest.mark.parametrize("shared", [True, False])
def test_expired_entries_are_dropped_while_running(keeping, shared, monkeypatch):
    with keeping(shared=shared, keep_days=2.0) as client:
        serve(client, user="client")
        client.keeper.save()
        assert used(client) > 0
        later = time.time() + 3 * 86_400
        monkeypatch.setattr("time.time", lambda: later)
        client.keeper.save()
        assert used(client) == 0
        monkeypatch.undo()


def test_expired_entries_are_dropped_at_start(keeping, monkeypatch):
    with keeping() as client:
        serve(client)
    later = time.time() + 3 * 86_400
    monkeypatch.setattr("time.time", lambda: later)
    with keeping(keep_days=2.0) as client:
        assert used(client) == 0


def test_snapshot_of_a_closed_domain_expires(keeping, tmp_path, monkeypatch):
    with keeping(keep_days=2.0) as client:
        client.engine.pool.open("code", 7, {}, Recall())
        serve(client, "code")
    later = time.time() + 3 * 86_400
    monkeypatch.setattr("time.time", lambda: later)
    with keeping(keep_days=2.0):
        pass
    assert not list(tmp_path.rglob("recall.safetensors"))
