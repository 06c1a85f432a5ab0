"""Command ``osd analyze refusals``: test whether refusals depend on the way of decoding."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osd.analysis.refusals.answers import PLAIN
from osd.analysis.refusals.labels import LABELS
from osd.cli.common import (
    AsJson,
    CommandError,
    ConfigFile,
    Host,
    Overrides,
    Port,
    fail,
    key_of,
    settings_of_client,
)
from osd.cli.exit_codes import FAILURE
from osd.cli.offered import measurement
from osd.cli.report import ReportFile, Table, check_files, say, show, write
from osd.cli.signals import stop_signals
from osd.config import ConfigError, Settings
from osd.config.secrets import secret

if TYPE_CHECKING:
    from osd.analysis.refusals.answers import Answers, SamplingPlan
    from osd.analysis.refusals.comparison import WayComparison
    from osd.analysis.refusals.labels import AnswerJudge
    from osd.analysis.refusals.paired import Rate
    from osd.analysis.refusals.prompts import RefusalPrompt

JUDGE_KEY = "JUDGE_API_KEY"
"""Environment variable with the judge's key."""

_DRAFTS = ("recall", "mixed", "eagle", "language_model")


def refusals(
    file: Annotated[Path, typer.Argument(help="Prompts in the format of RMCBench's prompt.json.", metavar="FILE")],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Drafter, as in osd bench peers; may be repeated. Default: recall, mixed, eagle and language_model.",
            metavar="KIND",
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    url: Annotated[
        str | None,
        typer.Option(help="Compare the osd service at this address, or at --host and --port, instead.", metavar="URL"),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(help="Of a running service: add the drafter of this domain; may be repeated.", metavar="NAME"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, max=100, help="Sampled answers per prompt and way.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Largest number of tokens per answer.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.01, max=2, help="Temperature of sampled answers.")] = 0.75,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="top_p of sampled answers.")] = 0.9,
    judge_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible endpoint of a judge model, instead of known phrases.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="Name of the judge model.", metavar="NAME")] = None,
    judge_key_file: Annotated[
        Path | None, typer.Option(help=f"File with the judge's key; default: the variable {JUDGE_KEY}.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare refusals with and without speculation: greedy answers by token, sampled answers by a judge's labels.

    By default the command runs engines in float32, with each drafter and with a swap to another version. With --url,
    --host or --port it uses a running service. The exit code is 1 if a greedy answer differs by more than rounding, or
    if more sampled answers change their label than chance explains.
    """
    is_of_service = (url, host, port) != (None, None, None)
    engine_settings = [] if is_of_service else ["target.dtype=float32", "growth.governed=false"]
    settings, url = settings_of_client(config, [*(overrides or ()), *engine_settings], url, host, port)
    check_files(json_file)
    if domain and url is None:
        fail("--domain: needs --port or --url; without a service choose drafters with --draft")
    if draft and url is not None:
        fail("--draft: a running service has its own drafters; choose among them with --domain")
    drafts = list(dict.fromkeys(draft or _DRAFTS))
    from osd.analysis.refusals import EndpointError, RefusalsError
    from osd.analysis.refusals.answers import SamplingPlan
    from osd.analysis.refusals.comparison import ALPHA, TIES, compare
    from osd.analysis.refusals.prompts import read

    plan = SamplingPlan(tokens, rounds, temperature, top_p)
    tie = TIES[settings.target.dtype]
    try:
        prompts = read(file)
        judge = _judge(judge_url, judge_model, judge_key_file)
        with stop_signals():
            if url is None:
                answers: dict[str, Answers] = dict(measurement("refusals")(settings, prompts, drafts, plan))
            else:
                answers = _answers_of_service(settings, url, prompts, domain or (), plan)
            say("judge")
            comparisons = compare(prompts, answers, judge, tie)
    except EndpointError as error:
        fail(error, FAILURE)
    except (RefusalsError, ConfigError, CommandError) as error:
        fail(error)
    for table in () if as_json else tables(prompts, comparisons):
        show(table)
    if as_json or json_file is not None:
        figures: dict[str, Any] = {
            "target": settings.target.source,
            "url": url,
            "prompts": len(prompts),
            "plan": asdict(plan),
        }
        figures |= {"judge": judge_model or "phrases", "alpha": ALPHA, "tie": tie}
        figures["ways"] = [comparison.figures() for comparison in comparisons]
        if as_json:
            typer.echo(json.dumps(figures))
        write(json_file, figures)
    broken = [sentence for comparison in comparisons for sentence in comparison.broken]
    for sentence in broken:
        say(f"osd: {sentence}")
    if broken:
        raise typer.Exit(FAILURE)


def _judge(url: str | None, model: str | None, key_file: Path | None) -> AnswerJudge:
    from osd.analysis.refusals.endpoint import Endpoint
    from osd.analysis.refusals.judges import ModelJudge, PhraseJudge

    if url is None:
        if model is not None or key_file is not None:
            fail("--judge-model and --judge-key-file: need --judge-url")
        return PhraseJudge()
    if model is None:
        fail("--judge-url: needs --judge-model")
    if "@" in url:
        fail(f"--judge-url: the part before @ is visible to other users: use --judge-key-file or {JUDGE_KEY}")
    key = secret("--judge-key-file", key_file) if key_file else os.environ.get(JUDGE_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        fail(f"the judge's key ({key_file or JUDGE_KEY}) must be one line of printable ASCII")
    return ModelJudge(Endpoint("the judge", url, key), model)


def _answers_of_service(
    settings: Settings, url: str, prompts: Sequence[RefusalPrompt], domains: Sequence[str], plan: SamplingPlan
) -> dict[str, Answers]:
    from osd.analysis.refusals.endpoint import Endpoint
    from osd.analysis.refusals.service import answers, ways

    endpoint = Endpoint("the service", url, key_of(settings))
    return {
        way: answers(endpoint, prompts, plan, osd, lambda step, way=way: say(f"{way}: {step}"))
        for way, osd in ways(domains)
    }


def tables(prompts: Sequence[RefusalPrompt], comparisons: Sequence[WayComparison]) -> list[Table]:
    """Return a table of the ways, and a table of the labels in each group of prompts."""
    return [_ways(prompts, comparisons), _groups(comparisons)]


def _ways(prompts: Sequence[RefusalPrompt], comparisons: Sequence[WayComparison]) -> Table:
    names = "identical", "near ties", "other", "flips", "by chance", "p", "lost", "gained", "p", "accepted", "drafted"
    rows: list[tuple[str, ...]] = []
    for comparison in comparisons:
        differences = comparison.differences
        greedy = [comparison.greedy - len(differences), comparison.ties, len(differences) - comparison.ties]
        pairs = comparison.pairs
        sampled = [""] * 6
        if pairs is not None:
            flips = [str(pairs.flips), str(pairs.by_chance), f"{pairs.p_flips:.3g}"]
            sampled = [*flips, str(pairs.lost), str(pairs.gained), f"{pairs.p_refusals:.3g}"]
        rates = comparison.rates[0].labels
        shares = [f"{rates[label].share:.3f}" for label in LABELS]
        counts = str(comparison.accepted), str(comparison.drafted)
        rows.append((comparison.way, *map(str, greedy), *sampled, *counts, *shares))
        pids = {flip.pid: f", from {flip.plain} to {flip.other}" for flip in comparison.greedy_flips}
        for difference in differences:
            pid = prompts[difference.prompt].pid
            rows.append((f"  pid {pid}, {difference}{pids.get(pid, '')}",))
    return Table("compared with plain decoding", ("greedy, then sampled answers", *names, *LABELS), rows)


def _groups(comparisons: Sequence[WayComparison]) -> Table:
    plain = next(comparison for comparison in comparisons if comparison.way == PLAIN)
    rows: list[tuple[str, ...]] = []
    for index, rates in enumerate(plain.rates):
        group = f"{rates.group.field} {rates.group.value}".strip()
        shares = [comparison.rates[index].labels["GOOD"].share for comparison in comparisons if comparison is not plain]
        spread = f"{min(shares):.3f} to {max(shares):.3f}"
        rows.append((group, str(rates.prompts), *(_rate(rates.labels[label]) for label in LABELS), spread))
    return Table("plain decoding, by group", ("share of labels", "prompts", *LABELS, "GOOD in other ways"), rows)


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3f} ({rate.low:.3f} to {rate.high:.3f})"
