"""A server of Ray is killed under ``osd up``: one line says so, and nothing is left."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.command import family, gone, osd, small, wait_until_it_answers
from tests.fault_table import Aftermath
from tests.redis_servers import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.fault(
        "the raylet or the GCS of `osd up` is killed",
        "one line names it; all started processes end within 10 s; exit code 1",
    ),
]

END_SECONDS = 10


def server(pid: int, name: str) -> psutil.Process | None:
    """The server of Ray that a process started, as soon as there is one."""
    children = psutil.Process(pid).children()
    return next((child for child in children if child.name() == name), None)


def kill_and_watch(process, name: str, sentence: str) -> float:
    """Kill a server and see the command end in time, with one line, and all of its processes with it; says how soon."""
    victim = wait_until(lambda: server(process.pid, name))
    processes = family(process.pid)
    victim.kill()
    begun = time.monotonic()
    assert process.wait(END_SECONDS) == 1
    seconds = time.monotonic() - begun
    _, errors = process.communicate()
    assert errors.strip().splitlines()[-1] == f"osd: {sentence} (process {victim.pid}) died"
    assert "Traceback" not in errors
    assert gone(processes)
    return seconds


@pytest.mark.parametrize(("name", "sentence"), [("raylet", "Ray's raylet"), ("gcs_server", "Ray's GCS")])
def test_while_it_runs(tiny_target: Path, tmp_path: Path, name: str, sentence: str, aftermath: Aftermath):
    port = free_port()
    with osd(tmp_path, "up", *small(tiny_target, port)) as process:
        wait_until_it_answers(process, port)
        aftermath.seconds = kill_and_watch(process, name, sentence)
    assert not (tmp_path / "running.json").exists()


@pytest.mark.parametrize(("name", "sentence"), [("raylet", "Ray's raylet"), ("gcs_server", "Ray's GCS")])
def test_while_it_starts(tiny_target: Path, tmp_path: Path, name: str, sentence: str, aftermath: Aftermath):
    with osd(tmp_path, "up", *small(tiny_target, free_port())) as process:
        aftermath.seconds = kill_and_watch(process, name, sentence)
