"""Drain of a node: it waits for running requests, up to its limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import leave as module
from deploy.leave import leave


@pytest.fixture
def drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the arguments of ``ray``, which a script replaces."""
    arguments, ray = tmp_path / "arguments", tmp_path / "ray"
    ray.write_text(f'#!/bin/sh\necho "$@" "$RAY_ENABLE_AUTO_CONNECT" > {arguments}\n')
    ray.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return arguments


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with the name of a replica of this test."""
    name = f"ray::ServeReplica:test-{os.getpid()}"
    monkeypatch.setattr(module, "_REPLICA", name)
    process = subprocess.Popen([name, "60"], executable="/bin/sleep")
    yield process
    process.kill()
    process.wait()


def test_leave_waits_for_the_replicas_of_its_node(drained: Path, replica: subprocess.Popen[bytes]):
    assert not leave(1)
    # Ray learns the node that it runs on only if it may connect by itself.
    assert drained.read_text().endswith("--deadline-remaining-seconds 1 1\n")
    replica.kill()
    replica.wait()
    assert leave(60)


def test_leave_reports_the_refusal_of_ray(drained: Path):
    drained.with_name("ray").write_text("#!/bin/sh\necho 'Error: no cluster here' >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="does not drain this node: Error: no cluster here"):
        leave(60)


def test_leave_does_not_wait_for_a_head_without_answer(drained: Path):
    drained.with_name("ray").write_text("#!/bin/sh\nexec sleep 300\n")
    with pytest.raises(RuntimeError, match="its head does not answer within 1 seconds"):
        leave(1)
