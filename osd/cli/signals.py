"""Signal handling of commands: the first signal unwinds the command, the second kills all its processes."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer

from osd.cli.exit_codes import INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@contextmanager
def stop_signals() -> Generator[None]:
    """Make the first Ctrl-C or SIGTERM unwind the command, and the second kill all its processes at once.

    A thread counts the signals. Python runs a handler only between two instructions of the main thread, and only once
    for several signals. Without the thread, a second signal would be lost while a library runs, for example while
    torch is loaded.
    """

    def unwind(number: int, frame: object) -> None:
        for name in _SIGNALS:
            signal.signal(name, _do_nothing)
        raise KeyboardInterrupt

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_end_at_second_signal, args=(reader,), name="signals", daemon=True).start()
    _adopt_orphans(True)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {name: signal.signal(name, unwind) for name in _SIGNALS}
    # At exit Python restores the default handlers, and a late signal would kill the process.
    atexit.register(_ignore)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None  # keep the handlers, so that a second signal works during the exit
    except BaseException:
        _restore(handlers, wakeup, writer)
        raise
    _restore(handlers, wakeup, writer)


def end_at_once(code: int) -> NoReturn:
    """Kill all child processes and exit, without the cleanup of the interpreter."""
    while _kill_descendants():
        pass  # repeat for processes that started in the meantime
    os._exit(code)


def _end_at_second_signal(reader: int) -> None:
    """Read signal numbers from a pipe until it is closed; at the second signal, end the process."""
    count = 0
    while count < 2 and (numbers := os.read(reader, 64)):
        count += sum(number in _SIGNALS for number in numbers)
    if count >= 2:
        end_at_once(INTERRUPTED)
    os.close(reader)


def _do_nothing(number: int, frame: object) -> None:
    """Do nothing; Python writes signals to the wake-up pipe only if they have a handler."""


def _adopt_orphans(adopt: bool) -> None:
    """Set whether orphaned descendants become children of this process (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt))


def _kill_descendants() -> bool:
    """Kill all descendants, and return whether any was alive."""
    import psutil

    alive = False
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive = True
                process.kill()
    return alive


def _ignore() -> None:
    for name in _SIGNALS:
        signal.signal(name, signal.SIG_IGN)


def _restore(handlers: dict[signal.Signals, Any], wakeup: int, writer: int) -> None:
    """Restore the signal handlers, the wake-up file descriptor and the parent of orphans; close ``writer``."""
    for name, handler in handlers.items():
        signal.signal(name, handler)
    signal.set_wakeup_fd(wakeup)
    os.close(writer)
    _adopt_orphans(False)
