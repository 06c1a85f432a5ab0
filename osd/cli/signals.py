"""How a command ends that is told to: the first signal unwinds it, the second ends every process of it at once."""

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

INTERRUPTED = 130
"""The exit code of a command that the user stopped."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@contextmanager
def stop_signals() -> Generator[None]:
    """Make the first Ctrl-C or SIGTERM unwind the command, and the second end every process of it at once.

    A thread counts them. Python handles a signal between two steps of the main thread, and but once however many came:
    while that is in a library, loading torch for one, a second one would be lost.
    """

    def unwind(number: int, frame: object) -> None:
        for name in _SIGNALS:
            signal.signal(name, _counted)
        raise KeyboardInterrupt

    come, told = os.pipe()
    os.set_blocking(told, False)
    threading.Thread(target=_end_at_the_second, args=(come,), name="signals", daemon=True).start()
    _adopt_orphans(True)
    fd = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    before = {name: signal.signal(name, unwind) for name in _SIGNALS}
    # Taking itself down, Python gives signals their default meaning back, and would die of one that comes late.
    atexit.register(_ignore)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None  # the second signal keeps its meaning while the process ends
    except BaseException:
        _restore(before, fd, told)
        raise
    _restore(before, fd, told)


def end_at_once(code: int) -> NoReturn:
    """End this process and all that it started, with nothing else that the interpreter would do at its end."""
    while _kill_descendants():
        pass  # what was started while the others were killed
    os._exit(code)


def _end_at_the_second(come: int) -> None:
    """Read the numbers of signals from a pipe until its other end is closed."""
    count = 0
    while count < 2 and (numbers := os.read(come, 64)):
        count += sum(number in _SIGNALS for number in numbers)
    if count >= 2:
        end_at_once(INTERRUPTED)
    os.close(come)


def _counted(number: int, frame: object) -> None:
    """Nothing: without a handler Python would not pass the signal on."""


def _adopt_orphans(adopt: bool) -> None:
    """Whether to stay the ancestor of all that is started, also of processes whose parent ends first (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt))


def _kill_descendants() -> bool:
    """Whether any was alive."""
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


def _restore(handlers: dict[signal.Signals, Any], fd: int, told: int) -> None:
    """Give signals and orphans back to whom they belonged, and close the pipe ``told``."""
    for name, handler in handlers.items():
        signal.signal(name, handler)
    signal.set_wakeup_fd(fd)
    os.close(told)
    _adopt_orphans(False)
