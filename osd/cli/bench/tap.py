"""``osd bench tap``: what a tap adds to the first token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from osd.cli.bench.options import Json, Turns, check_output, say, show, write
from osd.cli.common import fail


def tap(
    users: Annotated[list[int], typer.Option(min=1, help="Who ask at the same time; may be given again.")] = [1, 8],  # noqa: B006 - typer reads it and changes nothing
    requests: Annotated[int, typer.Option(min=1, help="Of each user in a turn.")] = 50,
    events: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 32,
    turns: Turns = 9,
    json_file: Json = None,
) -> None:
    """Measure what a tap adds to a server that answers at once, on this machine."""
    check_output(json_file)
    from benchmarks import tap as bench
    from osd.capture.server import RedisError

    try:
        found = list(bench.measure(bench.Plan(tuple(users), requests, events, turns), say))
    except (RuntimeError, RedisError) as error:
        fail(error)
    show(bench.table(found))
    write(json_file, {"requests": requests, "events": events, "blocks": [asdict(block) for block in found]})
