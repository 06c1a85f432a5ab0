"""Wall clock that a test sets for the processes that it starts."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class WallClock:
    """Wall clock of processes that start within ``moving``."""

    def __init__(self, offset: Path) -> None:
        self._offset = offset
        self._write(0)

    def now(self) -> float:
        """Return the time of the clock, in seconds since the epoch."""
        return time.time() + int.from_bytes(self._offset.read_bytes(), "little", signed=True)

    def jump(self, seconds: int) -> None:
        """Move the clock of all running processes by a number of seconds."""
        self._write(round(self.now() - time.time()) + seconds)

    def _write(self, seconds: int) -> None:
        # In place, because the processes have mapped the file.
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))


@contextmanager
def moving(folder: Path) -> Iterator[WallClock]:
    """Yield the clock of all processes that start within the context, at the time of this machine."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is needed to move the clock of processes")
    library, offset = folder / "clock.so", folder / "offset"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    clock = WallClock(offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("RAY_LD_PRELOAD_ON_WORKERS", "1")
        patch.setenv("CLOCK_OFFSET_FILE", str(offset))
        yield clock
