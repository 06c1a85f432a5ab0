"""Death of a Ray server under ``osd up``: one line reports it, and all processes end."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.command import all_ended, family, osd, small_options, wait_until_it_answers
from tests.fault_table import FaultResult
from tests.redis_servers import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "the raylet or the GCS of `osd up` is killed",
        "one line names it; all started processes end within 10 s; exit code 1",
        process="raylet, GCS: SIGKILL",
    ),
]

END_SECONDS = 10
SEEN_SECONDS = 1
"""Time in which the table of faults sees the processes."""


def server(pid: int, name: str) -> psutil.Process | None:
    """Return the Ray server of a process; None before it exists."""
    children = psutil.Process(pid).children()
    return next((child for child in children if child.name() == name), None)


def kill_and_watch(process, name: str, sentence: str) -> float:
    """Kill a server and check that the command ends with one line and without processes; return the seconds."""
    victim, _ = wait_until(lambda: all(found := [server(process.pid, each) for each in (name, "raylet")]) and found)
    time.sleep(SEEN_SECONDS)
    processes = family(process.pid)
    victim.kill()
    began = time.monotonic()
    assert process.wait(END_SECONDS) == 1
    seconds = time.monotonic() - began
    _, errors = process.communicate()
    assert errors.strip().splitlines()[-1] == f"osd: {sentence} (process {victim.pid}) died"
    assert "Traceback" not in errors
    assert all_ended(processes, END_SECONDS)
    return seconds


@pytest.mark.parametrize(("name", "sentence"), [("raylet", "Ray's raylet"), ("gcs_server", "Ray's GCS")])
def test_command_ends_when_ray_dies_while_it_runs(
    tiny_target: Path, tmp_path: Path, name: str, sentence: str, fault_result: FaultResult
):
    port = free_port()
    with osd(tmp_path, "up", *small_options(tiny_target, port)) as process:
        wait_until_it_answers(process, port)
        fault_result.seconds = kill_and_watch(process, name, sentence)
    assert not (tmp_path / "running.json").exists()


@pytest.mark.parametrize(("name", "sentence"), [("raylet", "Ray's raylet"), ("gcs_server", "Ray's GCS")])
def test_command_ends_when_ray_dies_while_it_starts(
    tiny_target: Path, tmp_path: Path, name: str, sentence: str, fault_result: FaultResult
):
    with osd(tmp_path, "up", *small_options(tiny_target, free_port())) as process:
        fault_result.seconds = kill_and_watch(process, name, sentence)
