"""``osd bench``: measure the library on this machine."""

from __future__ import annotations

import typer

from osd.cli.bench.adaptation import adapt
from osd.cli.bench.completion import completion
from osd.cli.bench.context import context
from osd.cli.bench.costs import forward, overhead, weights
from osd.cli.bench.decoding import decode
from osd.cli.bench.kinds import drafters
from osd.cli.bench.net import net
from osd.cli.bench.over_http import http
from osd.cli.bench.peers import peers
from osd.cli.bench.recall import recall
from osd.cli.bench.rules import growth, rules
from osd.cli.bench.scaling import scaling
from osd.cli.bench.serve import serve, start
from osd.cli.bench.vllm import vllm

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
for command in (
    *(forward, decode, recall, serve, start, http, peers, vllm, rules, growth, overhead, weights),
    *(adapt, drafters, scaling, net, completion, context),
):
    app.command()(command)
