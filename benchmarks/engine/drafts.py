"""``osd analyze drafts``: verification rules on captured traces.

A trace holds the most probable tokens of both models; everything else counts as one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.engine import closed_forms
from benchmarks.engine.rules import Comparison, Plan, Row, kinds, report
from benchmarks.engine.rules import rules as live_rules
from benchmarks.engines import BenchError
from benchmarks.options import Contexts, Depth, Draft, Drafts, Prompts, Temperatures, TopP
from benchmarks.turns import Mean
from osd.capture.tail import NoTracesError, newest
from osd.capture.trace import ACCEPTED, NOT_DRAFTED, Trace
from osd.cli.common import ConfigFile, Overrides, fail, redis_url, settings_of
from osd.cli.report import Json, Svg, check_files
from osd.drafting.growth import DraftBudget, Reach
from osd.engine.request import SamplingParams
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import TreeBuilder

NOTE = (
    "Traces keep the most probable tokens only. Those that both models list are compared one by one; everything else "
    "is one more token, on which any two models agree more than on its parts: all shares are upper estimates, most so "
    "where the listed tokens carry little mass. Temperature is 1 without limits, whatever the requests asked for, "
    "and there is one level of drafts, because a trace holds no branches."
)
_BATCH = 512


def drafts(
    live: Annotated[bool, typer.Option("--live", help="From live models instead of captured traces.")] = False,
    records: Annotated[int, typer.Option(min=1, help="Newest traces to read.")] = 64,
    places: Annotated[int, typer.Option(min=2, help="Drafted places of them to look at.")] = 2048,
    drafts: Drafts = 3,
    depth: Depth = 3,
    draft: Draft = "skip_layers",
    prompts: Prompts = "stdlib",
    temperature: Temperatures = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    contexts: Contexts = 32,
    json_file: Json = None,
    plot: Svg = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare verification rules on captured traces.

    Ends with 1 when a rule surpasses what is possible. With --live this is osd bench rules --part rules, whose options
    it takes; without it, of those only --drafts, --json and --plot.
    """
    if live:
        part, budget = ["rules"], 1
        files = (json_file, plot, config, overrides)
        return live_rules(draft, prompts, part, temperature, top_p, drafts, depth, budget, contexts, *files)
    settings = settings_of(config, overrides)
    check_files(json_file, plot)
    url = redis_url(settings)
    if url is None:
        fail(f"nothing runs in {settings.home_dir}; start it with osd up, set redis_url, or ask for --live")
    try:
        found = places_of(list(newest(url, settings.capture.stream, records)), places)
    except NoTracesError as error:
        fail(error)
    typer.echo(NOTE)
    typer.echo(
        f"{found.records} traces; the tokens that both models list carry {found.listed:.3f} of the target's mass; "
        f"in service {found.accepted:.3f} of the drafted tokens were accepted"
    )
    about = {"stream": settings.capture.stream, "note": NOTE, "listed": found.listed}
    report([compare(found, drafts)], about, json_file, plot)


@dataclass(frozen=True)
class Places:
    """Drafted places of known distributions: ``p`` and ``q`` [N, V] over the common tokens, the rest last.

    ``listed`` is the mean mass of p on common tokens, ``accepted`` the share of drafted tokens that were.
    """

    p: Tensor
    q: Tensor
    listed: float
    accepted: float
    records: int


def places_of(traces: Sequence[Trace], most: int) -> Places:
    """The first ``most`` places of ``traces`` where a drafter's distribution is known.

    Raises:
        BenchError: there is none.
    """
    parts = [_common(trace) for trace in traces]
    wide = max(p.shape[1] for p, _ in parts)
    p, q = (torch.cat([_widened(part[side], wide) for part in parts])[:most] for side in (0, 1))
    if not len(p):
        raise BenchError("the traces hold no drafted token; was speculation on?")
    accepted = float(np.concatenate([trace.verdict.numpy()[_known(trace)] == ACCEPTED for trace in traces]).mean())
    return Places(p, q, float(1 - p[:, -1].mean()), accepted, len(traces))


def _known(trace: Trace) -> np.ndarray:
    """Where a drafted token has the distribution that it was drawn from, [C] bool."""
    return (trace.verdict.numpy() != NOT_DRAFTED) & (trace.draft_ids.numpy() >= 0).any(-1)


def _common(trace: Trace) -> tuple[Tensor, Tensor]:
    """Both p and q [n, K + 1] of the known places, over the target's K tokens where the drafter lists them too."""
    drafted = _known(trace)
    ids, logp = trace.target_ids.numpy()[drafted], trace.target_logp.numpy()[drafted].astype(np.float64)
    draft_ids, draft_logp = trace.draft_ids.numpy()[drafted], trace.draft_logp.numpy()[drafted].astype(np.float64)
    same = ids[:, :, None] == draft_ids[:, None, :]  # [n, K, D]
    common = same.any(-1)
    p = np.where(common, np.exp(logp), 0.0)
    q = np.where(same, np.exp(draft_logp)[:, None, :], 0.0).sum(-1)
    return _with_rest(p), _with_rest(q)


def _with_rest(values: np.ndarray) -> Tensor:
    listed = torch.from_numpy(values)
    # Half precision may list a little more than 1 in all.
    listed /= listed.sum(-1, keepdim=True).clamp(min=1)
    return torch.cat([listed, (1 - listed.sum(-1, keepdim=True)).clamp(min=0)], -1)


def _widened(values: Tensor, wide: int) -> Tensor:
    """Tokens that nobody draws, before the rest."""
    return torch.cat([values[:, :-1], values.new_zeros(len(values), wide - values.shape[1]), values[:, -1:]], -1)


class _Recorded:
    """A drafter that says q [B, V]; see ``osd.drafting.growth.Source``."""

    support: Tensor | None = None
    levels: int | None = None
    reach: Reach | None = None
    block = 1

    def __init__(self, q: Tensor) -> None:
        self._logits, self._asked = q.log(), 0

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        self._asked = len(rows)
        return self._logits[rows]

    def acceptance(self) -> Tensor:
        return torch.full((self._asked,), 0.5)


def compare(places: Places, drafts: int, repeats: int = 8) -> Comparison:
    """Draft at every place in every way, ``repeats`` times, and verify by every rule."""
    sampling = SamplingParams()
    rows, broken = [], []
    for way in kinds(Plan(drafts=drafts, depth=1)):
        bound = closed_forms.bound(places.p, places.q, way.drafts, way.draw)
        first = {rule.name: torch.zeros_like(bound) for rule in way.rules}
        for start in range(0, len(places.p), _BATCH):
            p, q = places.p[start : start + _BATCH], places.q[start : start + _BATCH]
            index = torch.arange(start, start + len(p))
            batch = SamplingBatch.of([sampling] * len(p))
            for repeat in range(repeats):
                noise = Noise(index, torch.full_like(index, repeat), torch.zeros_like(index))
                draft = way.growth.grow(
                    _Recorded(q), batch, noise, DraftBudget(torch.full_like(index, way.growth.max_nodes))
                )
                target = p[:, None].expand(-1, draft.tokens.shape[1] + 1, -1)
                for rule in way.rules:
                    accepted = rule.verify(draft, target, noise).accepted > 0
                    first[rule.name][start : start + len(p)] += accepted / repeats
        for rule in way.rules:
            exact = closed_forms.acceptance(rule.name, places.p, places.q, way.drafts, way.draw)
            row = Row(
                draw=way.name,
                drafts=way.drafts,
                rule=rule.name,
                length=None,
                first=Mean.of(first[rule.name]),
                exact=None if exact is None else float(exact.mean()),
                bound=float(bound.mean()),
            )
            rows.append(row)
            if Mean.of(bound - first[rule.name]).below_zero or row.acceptance > row.bound + 1e-6:
                broken.append(row.above)
    return Comparison(sampling.temperature, sampling.top_p, len(places.p), rows, broken)
