"""Audit log of the actions of operators."""

from __future__ import annotations

import json

import pytest

from osd.admin import ConflictError, UnavailableError, audit
from osd.admin.audit import Actor, AuditLog
from tests.command import run_cli
from tests.waiting import together

OPS = Actor("key ops", "10.0.0.7")


def act(log, number=1):
    with log.action(OPS, "pin", domain="general") as entry:
        entry["version"] = number


def lines(home):
    return [json.loads(line) for line in (home / "audit.jsonl").read_text().splitlines()]


def test_audit_log_has_an_action_before_and_after_it(tmp_path):
    log = AuditLog(tmp_path)
    with log.action(OPS, "pin", domain="general") as entry:
        (begun,) = lines(tmp_path)
        assert begun["outcome"] == "begun"
        entry["version"] = 3
    _, done = lines(tmp_path)
    details = {"who": "key ops", "from": "10.0.0.7", "action": "pin", "domain": "general"}
    assert done.items() >= {**details, "version": 3, "outcome": "done", "id": begun["id"]}.items()
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600
    assert log.last(10) == [done]


def test_refused_action_is_logged_with_the_reason(tmp_path):
    log = AuditLog(tmp_path)
    with pytest.raises(ConflictError), log.action(OPS, "promote", domain="code"):
        raise ConflictError("domain code has no canary")
    assert [entry["outcome"] for entry in log.last(10)] == ["refused: domain code has no canary"]


def test_action_that_cannot_be_logged_does_not_happen(tmp_path):
    (tmp_path / "audit.jsonl").mkdir()
    with (
        pytest.raises(UnavailableError, match="cannot be written, nothing is done"),
        AuditLog(tmp_path).action(OPS, "pin"),
    ):
        pytest.fail("the action happened without a log entry")


def test_full_disk_leaves_no_incomplete_line_in_the_log(tmp_path, monkeypatch):
    log = AuditLog(tmp_path)
    act(log)
    write = audit.os.write
    monkeypatch.setattr(audit.os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    with pytest.raises(UnavailableError, match="the disk is full"):
        act(log)
    monkeypatch.undo()
    act(log)
    assert len(log.last(10)) == 2
    assert len(lines(tmp_path)) == 4


def test_audit_log_is_bounded_and_keeps_the_last_actions(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "MAX_BYTES", 2000)
    log = AuditLog(tmp_path)
    for number in range(30):
        act(log, number)
    assert sorted(path.name for path in tmp_path.glob("audit*")) == ["audit.1.jsonl", "audit.jsonl"]
    assert all(path.stat().st_size <= 2000 for path in tmp_path.glob("audit*"))
    assert [entry["version"] for entry in log.last(5)] == [25, 26, 27, 28, 29]


def test_concurrent_writers_do_not_mix_audit_lines(tmp_path):
    together(lambda _: [act(AuditLog(tmp_path)) for _ in range(10)], range(4))
    assert [entry["outcome"] for entry in AuditLog(tmp_path).last(100)] == ["done"] * 40


def test_audit_command_shows_the_last_actions(tmp_path):
    def shown(*arguments):
        return run_cli("audit", *arguments, home=tmp_path).stdout

    assert "no action" in shown()
    act(AuditLog(tmp_path), 1)
    act(AuditLog(tmp_path), 2)
    assert "key ops" in shown()
    assert [json.loads(line)["version"] for line in shown("--last", "1", "--json").splitlines()] == [2]
    assert len(shown("--domain", "general", "--json").splitlines()) == 2
    assert "no action of an operator on code in" in shown("--domain", "code")
