"""``osd bench pulls`` and ``reporters``: how new versions get to many replicas, and what their reports take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, check_output, say, show, write
from osd.cli.common import fail


def pulls(
    nodes: Annotated[int, typer.Option(min=1, help="Machines, each with a cache.")] = 10,
    clients: Annotated[int, typer.Option(min=1, help="Of each machine.")] = 10,
    versions: Annotated[int, typer.Option(min=1, help="One after the other.")] = 50,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Of a version.")] = 4.0,
    at_once: Annotated[int, typer.Option(min=1, help="Machines that read weights at a time.")] = 64,
    json_file: Json = None,
) -> None:
    """Measure how soon clients on many machines have each new version, and what an object store and Redis bear.

    Each machine is a process here, with a cache of its own, and each of its clients a thread.
    """
    check_output(json_file)
    from benchmarks import pulls as bench
    from osd.capture.server import RedisError

    plan = bench.Plan(nodes, clients, versions, megabytes, at_once)
    try:
        found = list(bench.measure(plan, say))
    except (RuntimeError, RedisError) as error:
        fail(error)
    show(bench.table(plan, found))
    write(json_file, {**asdict(plan), "pulled": [asdict(one) for one in found]})


def reporters(
    replicas: Annotated[list[int], typer.Option(min=1, help="May be given again.")] = [100, 1000],  # noqa: B006 - typer reads it and changes nothing
    seconds: Annotated[float, typer.Option(min=4, help="For each of the two.")] = 20.0,
    json_file: Json = None,
) -> None:
    """Measure what Redis and the actor that keeps all metrics take of what many simulated replicas tell and ask."""
    check_output(json_file)
    from benchmarks import reporters as bench
    from osd.capture.server import RedisError

    try:
        found = [bench.measure(count, seconds, say) for count in replicas]
    except (RuntimeError, RedisError) as error:
        fail(error)
    show(bench.table(found))
    write(json_file, {"seconds": seconds, "found": [asdict(one) for one in found]})
