"""Signals to a command: the first signal unwinds it, the second kills it with all child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from osd.cli.exit_codes import INTERRUPTED
from osd.cli.signals import stop_signals
from tests.waiting import HANG_SECONDS

_COMMAND = """
import hashlib, subprocess, sys, time
from osd.cli.signals import stop_signals
with stop_signals():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], stdout=subprocess.DEVNULL)
    try:
        print(child.pid, flush=True)
        {doing}
    finally:
        child.kill()
        child.wait()
        print("unwound", flush=True)
"""
_WAITS = "time.sleep(300)"
_IN_A_LIBRARY = "hashlib.pbkdf2_hmac('sha256', b'a', b'a', 1 << 30)"  # takes minutes, during which no handler runs


@pytest.fixture
def command(request) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """Return a busy command and its child process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND.format(doing=request.param)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    try:
        yield process, child
    finally:
        process.kill()
        if child.is_running():
            child.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [_WAITS], indirect=True)
def test_first_signal_unwinds_the_command(command, number):
    process, child = command
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert output.strip() == "unwound"
    assert not child.is_running()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [_IN_A_LIBRARY], indirect=True)
def test_second_signal_kills_all_processes_during_a_library_call(command, second):
    process, child = command
    _until_it_computes(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(second)
    assert process.wait(HANG_SECONDS) == INTERRUPTED
    assert process.stdout.read() == ""
    assert not psutil.wait_procs([child], 60)[1]


def _until_it_computes(process: subprocess.Popen[str]) -> None:
    """Wait until the library has used 0.1 seconds of CPU; before, a signal would unwind the command."""
    taken = psutil.Process(process.pid).cpu_times
    before = taken().user
    while taken().user < before + 0.1:
        assert process.poll() is None
        time.sleep(0.01)


def test_handlers_and_wakeup_fd_are_restored():
    reader, fd = os.pipe()
    os.set_blocking(fd, False)
    before, wakes = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)], signal.set_wakeup_fd(fd)
    threads_before = threading.enumerate()
    try:
        with stop_signals():
            assert signal.getsignal(signal.SIGINT) != before[0]
            (counter,) = [
                thread for thread in threading.enumerate() if thread.name == "signals" and thread not in threads_before
            ]
        counter.join(HANG_SECONDS)
        assert not counter.is_alive()
        assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        assert signal.set_wakeup_fd(wakes) == fd
        os.close(fd)
        os.close(reader)
