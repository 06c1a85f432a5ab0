"""Ring of frames in shared memory."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from osd.vllm import ring as ring_module
from osd.vllm.ring import Ring, RingError, remove
from tests.waiting import wait_until

MEMORY = Path("/dev/shm")
PAGE = 4096


@pytest.fixture
def ring():
    with closing(Ring.create(PAGE)) as ring:
        yield ring


def frames(consumer):
    return [(frame.number, frame.data) for frame in iter(consumer.get, None)]


def test_consumer_gets_the_parts_of_each_frame_joined(ring):
    with closing(Ring.attach(ring.name)) as consumer:
        assert consumer.get() is None
        assert ring.put([b"ab", memoryview(b"cd"), b""])
        assert ring.put([])
        assert frames(consumer) == [(0, b"abcd"), (1, b"")]
        assert (ring.used, consumer.counters()["frames"]) == (0, 2)


def test_frames_wrap_around_the_end_of_the_memory(ring):
    chance = np.random.default_rng(0)
    with closing(Ring.attach(ring.name)) as consumer:
        for number in range(200):
            data = chance.bytes(int(chance.integers(0, 3000)))
            assert ring.put([data])
            assert consumer.get() == (number, data)


def test_full_ring_drops_the_new_frame_and_counts_it(ring):
    with closing(Ring.attach(ring.name)) as consumer:
        kept = [ring.put([bytes([number]) * 1000]) for number in range(6)]
        assert kept == [True, True, True, True, False, False]
        assert not ring.put([bytes(PAGE)]), "a frame that never fits"
        assert frames(consumer) == [(number, bytes([number]) * 1000) for number in range(4)]
        assert ring.put([bytes(PAGE - 24)]), "a frame that fills the ring"
        assert frames(consumer) == [(7, bytes(PAGE - 24))]
        counters = consumer.counters()
        assert (counters["frames"], counters["dropped"], counters["dropped_bytes"]) == (5, 3, 2000 + PAGE)


def test_requests_of_taken_and_of_dropped_frames_are_counted(ring):
    with closing(Ring.attach(ring.name)) as consumer:
        kept = [ring.put([bytes(2000)], begun) for begun in (1, 0, 3)]
        assert kept == [True, True, False]
        assert consumer.counters()["requests"] == 0
        consumer.get()
        counters = consumer.counters()
        assert (counters["requests"], counters["dropped_requests"]) == (1, 3)


@pytest.mark.parametrize("offset", [0, 8, 16, 20, 24, 1023])
def test_damaged_frame_is_skipped_and_later_frames_are_read(ring, offset):
    with closing(Ring.attach(ring.name)) as consumer:
        ring.put([bytes(1000)])
        ring.put([bytes(10)])
        with open(MEMORY / ring.name, "r+b") as file:
            file.seek(PAGE + offset)
            file.write(b"\xff")
        assert consumer.get() is None
        assert consumer.counters()["damaged"] == 1
        ring.put([b"later"])
        assert frames(consumer) == [(2, b"later")]


@pytest.mark.parametrize("taken", [1 << 40, 0])
def test_damaged_position_of_the_consumer_is_repaired(ring, taken):
    with closing(Ring.attach(ring.name)) as consumer:
        for _ in range(9):
            ring.put([bytes(1000)])
            consumer.get()
        with open(MEMORY / ring.name, "r+b") as file:
            file.seek(16)
            file.write(taken.to_bytes(8, "little"))
        assert not ring.put([b"no room is known"])
        assert consumer.get() is None
        assert ring.put([b"later"])
        assert frames(consumer) == [(10, b"later")]


def test_both_processes_read_the_counters(ring):
    with closing(Ring.attach(ring.name)) as consumer:
        consumer.count("gaps", 3)
        ring.put([b""])
        for side in (ring, consumer):
            assert {name: value for name, value in side.counters().items() if value} == {"frames": 1, "gaps": 3}


def test_memory_is_private_and_deleted_at_the_end(ring):
    with closing(Ring.create(PAGE)) as other:
        assert stat.S_IMODE((MEMORY / other.name).stat().st_mode) == 0o600
    assert not (MEMORY / other.name).exists()


def test_memory_that_a_killed_producer_left_is_removed():
    name = "osd-test-left-behind"
    (MEMORY / name).write_bytes(b"")
    for _ in range(2):
        remove(name)
    assert not (MEMORY / name).exists()


def test_ring_without_enough_shared_memory_is_refused(monkeypatch):
    before = {file.name for file in MEMORY.iterdir()}
    with pytest.raises(RingError, match=r"MiB of shared memory are not available \(.*\): enlarge /dev/shm"):
        Ring.create(os.statvfs(MEMORY).f_blocks * os.statvfs(MEMORY).f_frsize + (1 << 30))
    assert {file.name for file in MEMORY.iterdir()} <= before


@pytest.mark.parametrize("content", [b"", bytes(PAGE), bytes(2 * PAGE)])
def test_other_shared_memory_is_no_ring(content, ends):
    name = "osd-test-no-ring"
    ends.callback(remove, name)
    (MEMORY / name).write_bytes(content)
    with pytest.raises(RingError, match="holds no ring"):
        Ring.attach(name)


def test_missing_ring_is_named():
    with pytest.raises(RingError, match="there is no ring osd-test-missing"):
        Ring.attach("osd-test-missing")


CONSUMER = """
import sys, time
from osd.vllm.ring import Ring
ring = Ring.attach(sys.argv[1])
for _ in range(int(sys.argv[2])):
    print(ring.get().number, flush=True)
time.sleep(1000)
"""


def test_next_consumer_continues_after_a_killed_one(ring):
    for number in range(5):
        ring.put([bytes([number])])
    command = [sys.executable, "-c", CONSUMER, ring.name, "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as consumer:
        assert [consumer.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
        consumer.send_signal(signal.SIGKILL)
    assert (MEMORY / ring.name).exists(), "no resource tracker of the consumer deletes the memory"
    with closing(Ring.attach(ring.name)) as second:
        assert frames(second) == [(number, bytes([number])) for number in (2, 3, 4)]


PRODUCER = """
import sys, time
from osd.vllm.ring import Ring
ring = Ring.create(4096)
print(ring.name, flush=True)
time.sleep(1000)
"""


def test_memory_of_a_killed_producer_is_deleted():
    with subprocess.Popen([sys.executable, "-c", PRODUCER], stdout=subprocess.PIPE, text=True) as producer:
        name = producer.stdout.readline().strip()
        assert (MEMORY / name).exists()
        producer.send_signal(signal.SIGKILL)
    wait_until(lambda: not (MEMORY / name).exists())


def test_capacity_holds_a_second_of_20000_tokens():
    per_token = 32 * 6 + 2 + 8 + 3 * 4096 + 2 * 3 * 4096 // 64
    assert 20_000 * per_token < ring_module.CAPACITY
    assert 16_384 * per_token < ring_module.CAPACITY
