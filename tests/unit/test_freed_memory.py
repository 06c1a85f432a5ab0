"""Tests of the memory that a process gives back."""

import ctypes
import subprocess
import sys

import psutil
import pytest

from osd.freed_memory import give_back

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the allocator has no malloc_trim"
)

GIVES_BACK_TWICE = """
import psutil, time
from osd.freed_memory import give_back_regularly
give_back_regularly(0.05)
resident = lambda: psutil.Process().memory_info().rss
for _ in range(2):
    parts = [bytearray(b"x" * 60_000) for _ in range(1000)]
    full = resident()
    del parts[:-1]
    while full - resident() < 40_000_000:
        time.sleep(0.01)
"""


def test_give_back_returns_freed_memory_to_the_system():
    parts = [bytearray(b"x" * 60_000) for _ in range(1000)]  # too small for a mapping of their own
    full = psutil.Process().memory_info().rss
    del parts[:-1]  # the last one holds the end of the heap
    give_back()
    assert full - psutil.Process().memory_info().rss > 40_000_000
    assert parts[0] == b"x" * 60_000


def test_regular_giving_back_goes_on():
    subprocess.run([sys.executable, "-c", GIVES_BACK_TWICE], check=True, timeout=60)
