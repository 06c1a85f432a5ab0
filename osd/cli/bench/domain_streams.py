"""``osd bench streams``: what trainers of several domains read of Redis."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Turns, check_output, say, show, write
from osd.cli.common import fail


def streams(
    domains: Annotated[int, typer.Option(min=1, max=64, help="Each with a trainer.")] = 10,
    records: Annotated[int, typer.Option(min=1, max=2000, help="Of all domains together.")] = 500,
    width: Annotated[int, typer.Option(min=1, max=1 << 14, help="Numbers of hidden states for each token.")] = 1728,
    turns: Turns = 5,
    json_file: Json = None,
) -> None:
    """Count the bytes and CPU seconds that trainers take to read their records, from one stream and from one each."""
    check_output(json_file)
    from benchmarks import domain_streams as bench
    from osd.capture.server import RedisError, RedisServer

    plan, found = bench.Plan(domains, records, width, turns), list[bench.Reading]()
    try:
        with RedisServer(max(2 * records * (width + 512) // 2000, 64)) as server:
            for reading in bench.measure(server.url, plan):
                say(f"turn {reading.turn}, {reading.way}: {reading.bytes / 1e6:.1f} MB, {reading.cpu_seconds:.3f} s")
                found.append(reading)
    except RedisError as error:
        fail(error)
    show(bench.table(found))
    write(json_file, {**asdict(plan), "readings": [asdict(reading) for reading in found]})
