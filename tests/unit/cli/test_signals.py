"""A command is told to stop: once it unwinds, twice it ends with all that it started, wherever it is."""

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

from osd.cli.signals import INTERRUPTED, stop_signals
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
_IN_A_LIBRARY = "hashlib.pbkdf2_hmac('sha256', b'a', b'a', 1 << 30)"  # minutes, in which no handler runs


@pytest.fixture
def command(request) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A command that is busy, and a process that it started."""
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
def test_the_first_signal_unwinds_the_command(command, number):
    process, child = command
    process.send_signal(number)
    said, _ = process.communicate(timeout=HANG_SECONDS)
    assert said.strip() == "unwound"
    assert not child.is_running()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", [_IN_A_LIBRARY], indirect=True)
def test_the_second_signal_ends_everything_at_once_also_while_a_library_computes(command, second):
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
    """Wait until the library has taken a tenth of a second of the CPU: on the way there it would unwind."""
    taken = psutil.Process(process.pid).cpu_times
    before = taken().user
    while taken().user < before + 0.1:
        assert process.poll() is None
        time.sleep(0.01)


def test_what_was_there_before_is_there_again_afterwards():
    told, fd = os.pipe()
    os.set_blocking(fd, False)
    before, wakes = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)], signal.set_wakeup_fd(fd)
    others = threading.enumerate()
    try:
        with stop_signals():
            assert signal.getsignal(signal.SIGINT) != before[0]
            (counting,) = [one for one in threading.enumerate() if one.name == "signals" and one not in others]
        counting.join(HANG_SECONDS)
        assert not counting.is_alive()
        assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        assert signal.set_wakeup_fd(wakes) == fd
        os.close(fd)
        os.close(told)
