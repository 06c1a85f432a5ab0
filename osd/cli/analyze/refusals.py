"""``osd analyze refusals``: whether what the model refuses depends on how its answers are decoded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osd.analysis.refusals.answers import PLAIN
from osd.analysis.refusals.labels import LABELS
from osd.cli.common import CommandError, ConfigFile, Overrides, fail, key_of, settings_of
from osd.cli.offered import measurement
from osd.cli.report import Json, Table, check_files, say, show, write
from osd.cli.signals import stop_signals
from osd.config import ConfigError, Settings
from osd.config.secrets import secret

if TYPE_CHECKING:
    from osd.analysis.refusals.answers import Answers, Plan
    from osd.analysis.refusals.comparison import Found
    from osd.analysis.refusals.labels import Judge
    from osd.analysis.refusals.paired import Rate
    from osd.analysis.refusals.prompts import Prompt

JUDGE_KEY = "JUDGE_API_KEY"
"""The environment variable with the judge's key."""

_DRAFTS = ("recall", "mixed", "eagle", "language_model")


def refusals(
    file: Annotated[Path, typer.Argument(help="Prompts, in the shape of RMCBench's prompt.json.", metavar="FILE")],
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter, as osd bench peers has them; may be given again. recall, mixed, eagle and "
            "language_model otherwise.",
            metavar="KIND",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Ask the osd service at this address instead.")] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(help="With --url: also with the drafter of this domain; may be given again.", metavar="NAME"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, max=100, help="Sampled answers to each prompt in each way.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Of each answer at most.")] = 96,
    temperature: Annotated[float, typer.Option(min=0.01, max=2, help="Of sampled answers.")] = 0.75,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Of sampled answers.")] = 0.9,
    judge_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible endpoint that judges, instead of known phrases.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The model that judges there.", metavar="NAME")] = None,
    judge_key_file: Annotated[
        Path | None, typer.Option(help=f"File with its key; else the variable {JUDGE_KEY}.", metavar="FILE")
    ] = None,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare what is refused with and without speculation: greedy answers by token, sampled ones by a judge's labels.

    In engines of its own, in float32: with each drafter, and across a swap to another version of it. With --url: as
    the service drafts. Ends with 1 when a greedy answer differs by more than rounding, or when more sampled answers
    change their label than chance explains.
    """
    own = ["target.dtype=float32", "growth.governed=false"] if url is None else []
    settings = settings_of(config, [*(overrides or ()), *own])
    check_files(json_file)
    if domain and url is None:
        fail("--domain: needs --url; engines of the command's own take --draft")
    if draft and url is not None:
        fail("--draft: a service at --url has its own drafters; choose among them with --domain")
    drafts = list(dict.fromkeys(draft or _DRAFTS))
    from osd.analysis.refusals import RefusalsError
    from osd.analysis.refusals.answers import Plan
    from osd.analysis.refusals.comparison import ALPHA, TIES, compare
    from osd.analysis.refusals.prompts import read

    plan = Plan(tokens, rounds, temperature, top_p)
    tie = TIES[settings.target.dtype]
    try:
        prompts = read(file)
        judge = _judge(judge_url, judge_model, judge_key_file)
        with stop_signals():
            if url is None:
                answers: dict[str, Answers] = dict(measurement("refusals")(settings, prompts, drafts, plan))
            else:
                answers = _of_service(settings, url, prompts, domain or (), plan)
            say("judge")
            found = compare(prompts, answers, judge, tie)
    except (RefusalsError, ConfigError, CommandError) as error:
        fail(error)
    for table in tables(prompts, found):
        show(table)
    if json_file is not None:
        about = {"target": settings.target.source, "url": url, "prompts": len(prompts), "plan": asdict(plan)}
        about |= {"judge": judge_model or "phrases", "alpha": ALPHA, "tie": tie}
        write(json_file, {**about, "ways": [one.figures() for one in found]})
    broken = [sentence for one in found for sentence in one.broken]
    for sentence in broken:
        say(f"osd: {sentence}")
    if broken:
        raise typer.Exit(1)


def _judge(url: str | None, model: str | None, key_file: Path | None) -> Judge:
    from osd.analysis.refusals.endpoint import Endpoint
    from osd.analysis.refusals.judges import ModelJudge, PhraseJudge

    if url is None:
        if model is not None or key_file is not None:
            fail("--judge-model and --judge-key-file: need --judge-url")
        return PhraseJudge()
    if model is None:
        fail("--judge-url: needs --judge-model")
    if "@" in url:
        fail(f"--judge-url shows what is before @ to other users: use --judge-key-file or {JUDGE_KEY}")
    key = secret("--judge-key-file", key_file) if key_file else os.environ.get(JUDGE_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        fail(f"the judge's key ({key_file or JUDGE_KEY}) must be one line of printable ASCII")
    return ModelJudge(Endpoint("the judge", url, key), model)


def _of_service(
    settings: Settings, url: str, prompts: Sequence[Prompt], domains: Sequence[str], plan: Plan
) -> dict[str, Answers]:
    from osd.analysis.refusals.endpoint import Endpoint
    from osd.analysis.refusals.service import answers, ways

    endpoint = Endpoint("the service", url, key_of(settings))
    return {
        way: answers(endpoint, prompts, plan, osd, lambda step, way=way: say(f"{way}: {step}"))
        for way, osd in ways(domains)
    }


def tables(prompts: Sequence[Prompt], found: Sequence[Found]) -> list[Table]:
    """Make a table of the ways, and one of how often each group of prompts is refused."""
    return [_ways(prompts, found), _groups(found)]


def _ways(prompts: Sequence[Prompt], found: Sequence[Found]) -> Table:
    names = "identical", "near ties", "other", "flips", "by chance", "p", "lost", "gained", "p", "accepted", "drafted"
    rows: list[tuple[str, ...]] = []
    for one in found:
        others = len(one.differences) - one.ties
        greedy = [one.greedy - len(one.differences), one.ties, others]
        pairs = one.pairs
        sampled = [""] * 6
        if pairs is not None:
            flips = [str(pairs.flips), str(pairs.by_chance), f"{pairs.p_flips:.3g}"]
            sampled = [*flips, str(pairs.lost), str(pairs.gained), f"{pairs.p_refusals:.3g}"]
        rates = one.rates[0].labels
        shares = [f"{rates[label].share:.3f}" for label in LABELS]
        rows.append((one.way, *map(str, greedy), *sampled, str(one.accepted), str(one.drafted), *shares))
        pids = {flip.pid: f", from {flip.plain} to {flip.other}" for flip in one.greedy_flips}
        for difference in one.differences:
            pid = prompts[difference.prompt].pid
            rows.append((f"  pid {pid}, {difference}{pids.get(pid, '')}",))
    return Table("beside plain decoding", ("greedy, then sampled answers", *names, *LABELS), rows)


def _groups(found: Sequence[Found]) -> Table:
    plain = next(one for one in found if one.way == PLAIN)
    rows: list[tuple[str, ...]] = []
    for place, rates in enumerate(plain.rates):
        group = f"{rates.group.field} {rates.group.value}".strip()
        others = [one.rates[place].labels["GOOD"].share for one in found if one is not plain]
        between = f"{min(others):.3f} to {max(others):.3f}"
        rows.append((group, str(rates.prompts), *(_rate(rates.labels[label]) for label in LABELS), between))
    return Table("plain decoding, by group", ("share of labels", "prompts", *LABELS, "GOOD in other ways"), rows)


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3f} ({rate.low:.3f} to {rate.high:.3f})"
