"""What the trainers of several domains read of Redis: with one stream for all of them, and with one for each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import redis
from rich.table import Table as Grid

from benchmarks.figures import Spread
from benchmarks.report import columns
from osd.capture.reader import TraceReader
from osd.capture.streams import counter_key, stream_of
from osd.capture.trace import FIELD, NOT_DRAFTED, Array, Trace, encode
from osd.capture.waiting import group_of
from osd.config import CaptureSettings
from osd.redis_client import connect

SINGLE, EACH = "one stream", "one each"
WAYS = (SINGLE, EACH)
_PROMPT, _COMPLETION, _TOP_K = 128, 128, 32
_BATCH = 16  # records, as a trainer reads them


@dataclass(frozen=True)
class Plan:
    """``records`` in all, spread evenly over ``domains``; with ``width`` numbers of 16 bits a token."""

    domains: int
    records: int
    width: int
    turns: int


@dataclass(frozen=True)
class Reading:
    """What all trainers together took to have their records: bytes out of Redis, and CPU seconds of theirs."""

    way: str
    turn: int
    kept: int
    read: int
    bytes: int
    cpu_seconds: float


def measure(url: str, plan: Plan) -> Iterator[Reading]:
    """Read the same records in both ways, which take turns; the Redis at ``url`` is emptied each time."""
    settings = CaptureSettings(max_records=plan.records, keep_mb=None)
    data = [encode(_record(plan, number)) for number in range(plan.records)]
    with connect(url, timeout=30.0) as client:
        for turn in range(plan.turns + 1):
            for way in WAYS if turn % 2 else reversed(WAYS):
                client.flushall()
                _fill(client, settings, plan, way, data)
                found = _read(client, url, settings, plan, way, turn)
                if turn:  # the first one warms up
                    yield found


def table(found: Sequence[Reading]) -> Grid:
    """The figures of each way."""
    grid = columns("way", "records read", "of these kept", "MB out of Redis", "CPU seconds")
    for way in WAYS:
        mine = [reading for reading in found if reading.way == way]
        size, cpu = Spread.of([one.bytes / 1e6 for one in mine]), Spread.of([one.cpu_seconds for one in mine])
        grid.add_row(way, str(mine[0].read), str(mine[0].kept), size.text(digits=1), cpu.text(digits=3))
    return grid


def _domain(plan: Plan, number: int) -> str:
    return f"domain-{number % plan.domains}"


def _fill(client: redis.Redis, settings: CaptureSettings, plan: Plan, way: str, data: Sequence[bytes]) -> None:
    for number, record in enumerate(data):
        single = way == SINGLE  # as earlier versions of the service wrote, and trainers still read
        stream = settings.stream if single else stream_of(settings.stream, _domain(plan, number))
        count = client.incr(counter_key(stream))
        client.xadd(stream, {FIELD: record}, id=f"{count}-{0 if single else int(1000 * time.time())}")


def _read(client: redis.Redis, url: str, settings: CaptureSettings, plan: Plan, way: str, turn: int) -> Reading:
    domains = [f"domain-{number}" for number in range(plan.domains)]
    readers = [TraceReader(url, settings, domain, group_of(domain), "trainer") for domain in domains]
    kept = read = 0
    before, began = _sent(client), time.process_time()
    for domain, reader in zip(domains, readers, strict=True):
        while batch := reader.read(_BATCH, 0):
            read += len(batch)
            kept += sum(given.record.domain == domain for given in batch)
            reader.ack([given.place for given in batch])
    took, sent = time.process_time() - began, _sent(client) - before
    for reader in readers:
        reader.close()
    return Reading(way, turn, kept, read, sent, took)


def _sent(client: redis.Redis) -> int:
    about: Any = client.info("stats")
    return about["total_net_output_bytes"]


def _record(plan: Plan, number: int) -> Trace:
    chance = np.random.default_rng(number)
    tokens = _PROMPT + _COMPLETION
    ids = chance.integers(0, 49_000, tokens, np.int32)
    top = Array.of(chance.integers(0, 49_000, (_COMPLETION, _TOP_K), np.int32))
    logp = Array.of(chance.normal(size=(_COMPLETION, _TOP_K)).astype(np.float16))
    tail = Array.of(chance.normal(size=_COMPLETION).astype(np.float16))
    none = Array.of(np.full(_COMPLETION, -1, np.int32))
    hidden = chance.integers(0, 1 << 16, (tokens - 1, plan.width)).astype(np.uint16)
    return Trace(
        request_id=f"request-{number}", segment=0, domain=_domain(plan, number), target="synthetic",
        drafter_domain=_domain(plan, number), drafter_version=1, created=time.time(), temperature=0.0, top_k=0,
        top_p=1.0, prompt_ids=Array.of(ids[:_PROMPT]), completion_ids=Array.of(ids[_PROMPT:]), target_ids=top,
        target_logp=logp, target_tail=tail, draft_ids=top, draft_logp=logp, draft_tail=tail, drafted=none,
        verdict=Array.of(np.full(_COMPLETION, NOT_DRAFTED, np.int8)), sources=(),
        source=Array.of(np.full(_COMPLETION, -1, np.int8)), hidden=Array.of(hidden, "bfloat16"),
    )  # fmt: skip
