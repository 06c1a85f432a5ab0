"""``osd bench``: measure the library on this machine."""

from __future__ import annotations

import typer

from osd.cli.bench.adaptation import ablate, adapt, poison, shift
from osd.cli.bench.beside import beside
from osd.cli.bench.completion import completion
from osd.cli.bench.context import context
from osd.cli.bench.costs import forward, overhead, weights
from osd.cli.bench.decoding import decode, governor, lossless, plain
from osd.cli.bench.exits import exits
from osd.cli.bench.kinds import drafters
from osd.cli.bench.ledger import ledger
from osd.cli.bench.net import net
from osd.cli.bench.over_http import http
from osd.cli.bench.peers import peers
from osd.cli.bench.pulls import pulls, reporters
from osd.cli.bench.recall import recall
from osd.cli.bench.rules import growth, rules
from osd.cli.bench.scaling import scaling
from osd.cli.bench.scheduling import scheduling
from osd.cli.bench.serve import replicas, serve, start
from osd.cli.bench.simulated import simulated
from osd.cli.bench.stopping import stopping
from osd.cli.bench.structured import structured
from osd.cli.bench.tap import tap
from osd.cli.bench.versions import versions
from osd.cli.bench.vllm import vllm

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
for command in (
    *(
        forward,
        decode,
        recall,
        serve,
        replicas,
        start,
        peers,
        vllm,
        rules,
        growth,
        lossless,
        overhead,
        governor,
        plain,
        weights,
    ),
    *(
        adapt,
        shift,
        ablate,
        drafters,
        exits,
        stopping,
        scaling,
        poison,
        net,
        simulated,
        ledger,
        versions,
        scheduling,
        http,
        structured,
        completion,
        context,
        tap,
        pulls,
        reporters,
        beside,
    ),
):
    app.command()(command)
