"""``osd analyze drafts``: verification rules on captured traces.

A trace holds the most probable tokens of both models; all other tokens count as one token.
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
from benchmarks.engine.rules import RuleComparison, RulePlan, draw_kinds, exceeds, report
from benchmarks.engine.rules import rules as live_rules
from benchmarks.engines import BenchError
from benchmarks.options import Contexts, Depth, Draft, Drafts, Prompts, Temperatures, TopP
from osd.capture.tail import NoTracesError, newest
from osd.capture.trace import ACCEPTED, NOT_DRAFTED, Trace
from osd.cli.common import AsJson, ConfigFile, Overrides, fail, redis_errors, redis_url, settings_of
from osd.cli.report import ReportFile, Svg, check_files
from osd.drafting.growth import DraftBudget, Reach
from osd.engine.request import SamplingParams
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from osd.verification.tree import TreeBuilder

NOTE = (
    "Traces keep the most probable tokens only. Tokens that both models list are compared one by one; all other tokens "
    "count as one token. Two models agree more on the sum than on its parts, so all shares are upper estimates, mainly "
    "where the listed tokens have little mass. The temperature is 1 without limits, independent of the requests, and "
    "there is one level of drafts, because a trace has no branches."
)
_BATCH = 512


def drafts(
    live: Annotated[bool, typer.Option("--live", help="Use live models instead of captured traces.")] = False,
    records: Annotated[int, typer.Option(min=1, help="Number of newest traces to read.")] = 64,
    places: Annotated[int, typer.Option(min=2, help="Number of drafted positions to use.")] = 2048,
    drafts: Drafts = 3,
    depth: Depth = 3,
    draft: Draft = "skip_layers",
    prompts: Prompts = "stdlib",
    temperature: Temperatures = [0.6, 1.0],  # noqa: B006 - typer reads it and changes nothing
    top_p: TopP = 1.0,
    contexts: Contexts = 32,
    as_json: AsJson = False,
    json_file: ReportFile = None,
    plot: Svg = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare verification rules on captured traces.

    The exit code is 1 if a rule exceeds the possible acceptance. With --live this is osd bench rules --part rules and
    takes its options; otherwise only --drafts, --json, --report and --plot of them.
    """
    if live:
        part, budget = ["rules"], 1
        files = (as_json, json_file, plot, config, overrides)
        return live_rules(draft, prompts, part, temperature, top_p, drafts, depth, budget, contexts, *files)
    settings = settings_of(config, overrides)
    check_files(json_file, plot)
    url = redis_url(settings)
    if url is None:
        fail(f"no service runs in {settings.home_dir}: start it with osd up, set redis_url, or use --live")
    try:
        with redis_errors():
            traces = list(newest(url, settings.capture.stream, records))
    except NoTracesError as error:
        fail(error)
    positions = positions_of(traces, places)
    if not as_json:
        typer.echo(NOTE)
        typer.echo(
            f"{positions.records} traces; tokens that both models list have {positions.listed:.3f} of the target's "
            f"mass; the service accepted {positions.accepted:.3f} of the drafted tokens"
        )
    about = {"stream": settings.capture.stream, "note": NOTE, "listed": positions.listed}
    report([compare(positions, drafts)], about, json_file, plot, as_json=as_json)


@dataclass(frozen=True)
class TracePositions:
    """Drafted positions with known distributions: ``p`` and ``q`` [N, V] over the common tokens, with the rest last.

    ``listed`` is the mean mass of p on common tokens, ``accepted`` the share of accepted draft tokens.
    """

    p: Tensor
    q: Tensor
    listed: float
    accepted: float
    records: int


def positions_of(traces: Sequence[Trace], most: int) -> TracePositions:
    """Return the first ``most`` positions of ``traces`` at which the drafter's distribution is known.

    Raises:
        BenchError: there is no such position.
    """
    parts = [_common(trace) for trace in traces]
    width = max(p.shape[1] for p, _ in parts)
    p, q = (torch.cat([_widened(part[side], width) for part in parts])[:most] for side in (0, 1))
    if not len(p):
        raise BenchError("the traces contain no drafted token: was speculation on?")
    accepted = float(np.concatenate([trace.verdict.numpy()[_is_known(trace)] == ACCEPTED for trace in traces]).mean())
    return TracePositions(p, q, float(1 - p[:, -1].mean()), accepted, len(traces))


def _is_known(trace: Trace) -> np.ndarray:
    """Return the mask [C] of draft tokens with a recorded distribution."""
    return (trace.verdict.numpy() != NOT_DRAFTED) & (trace.draft_ids.numpy() >= 0).any(-1)


def _common(trace: Trace) -> tuple[Tensor, Tensor]:
    """Return p and q [n, K + 1] of the known positions, over the target's K tokens that the drafter lists too."""
    drafted = _is_known(trace)
    ids, logp = trace.target_ids.numpy()[drafted], trace.target_logp.numpy()[drafted].astype(np.float64)
    draft_ids, draft_logp = trace.draft_ids.numpy()[drafted], trace.draft_logp.numpy()[drafted].astype(np.float64)
    same = ids[:, :, None] == draft_ids[:, None, :]  # [n, K, D]
    common = same.any(-1)
    p = np.where(common, np.exp(logp), 0.0)
    q = np.where(same, np.exp(draft_logp)[:, None, :], 0.0).sum(-1)
    return _with_rest(p), _with_rest(q)


def _with_rest(values: np.ndarray) -> Tensor:
    listed = torch.from_numpy(values)
    # In half precision the listed probabilities may sum to slightly more than 1.
    listed /= listed.sum(-1, keepdim=True).clamp(min=1)
    return torch.cat([listed, (1 - listed.sum(-1, keepdim=True)).clamp(min=0)], -1)


def _widened(values: Tensor, width: int) -> Tensor:
    """Pad with tokens of probability 0 before the rest."""
    return torch.cat([values[:, :-1], values.new_zeros(len(values), width - values.shape[1]), values[:, -1:]], -1)


class _RecordedSource:
    """Proposal source with the fixed distribution q [B, V]; see ``osd.drafting.growth.Source``."""

    support: Tensor | None = None
    levels: int | None = None
    reach: Reach | None = None
    block = 1

    def __init__(self, q: Tensor) -> None:
        self._logits, self._row_count = q.log(), 0

    def expand(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        self._row_count = len(rows)
        return self._logits[rows]

    def acceptance(self) -> Tensor:
        return torch.full((self._row_count,), 0.5)


def compare(positions: TracePositions, drafts: int, repeats: int = 8) -> RuleComparison:
    """Draft at every position with every draw, ``repeats`` times, and verify with every rule."""
    sampling = SamplingParams()
    rows, broken = [], []
    for kind in draw_kinds(RulePlan(drafts=drafts, depth=1)):
        bound = closed_forms.bound(positions.p, positions.q, kind.drafts, kind.draw)
        accepted_first = {rule.name: torch.zeros_like(bound) for rule in kind.rules}
        for start in range(0, len(positions.p), _BATCH):
            p, q = positions.p[start : start + _BATCH], positions.q[start : start + _BATCH]
            index = torch.arange(start, start + len(p))
            batch = SamplingBatch.of([sampling] * len(p))
            for repeat in range(repeats):
                noise = Noise(index, torch.full_like(index, repeat), torch.zeros_like(index))
                draft = kind.growth.grow(
                    _RecordedSource(q), batch, noise, DraftBudget(torch.full_like(index, kind.growth.max_nodes))
                )
                target = p[:, None].expand(-1, draft.tokens.shape[1] + 1, -1)
                for rule in kind.rules:
                    is_accepted = rule.verify(draft, target, noise).accepted > 0
                    accepted_first[rule.name][start : start + len(p)] += is_accepted / repeats
        for rule in kind.rules:
            exact = closed_forms.acceptance(rule.name, positions.p, positions.q, kind.drafts, kind.draw)
            row = kind.result(rule, None, accepted_first[rule.name], exact, bound)
            rows.append(row)
            if exceeds(bound, accepted_first[rule.name], exact):
                broken.append(row.above)
    return RuleComparison(sampling.temperature, sampling.top_p, len(positions.p), rows, broken)
