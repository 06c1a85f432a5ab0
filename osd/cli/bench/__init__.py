"""``osd bench``: measure the library on this machine."""

from __future__ import annotations

import typer

from osd.cli.bench.adaptation import ablate, adapt, poison, shift
from osd.cli.bench.decode import decode
from osd.cli.bench.forward import forward
from osd.cli.bench.governor import governor
from osd.cli.bench.growth import growth
from osd.cli.bench.lossless import lossless
from osd.cli.bench.net import net
from osd.cli.bench.overhead import overhead
from osd.cli.bench.peers import peers
from osd.cli.bench.plain import plain
from osd.cli.bench.rules import rules
from osd.cli.bench.serve import serve, start
from osd.cli.bench.weights import weights

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
for command in (
    forward,
    decode,
    serve,
    start,
    peers,
    rules,
    growth,
    lossless,
    overhead,
    governor,
    plain,
    weights,
    adapt,
    shift,
    ablate,
    poison,
    net,
):
    app.command()(command)
