"""``osd bench decode``: speed-up of speculative over plain decoding, and the share of the possible one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
import typer
from torch import Tensor

from benchmarks.engine.isolated import DRAFT_CONTEXT, Drafting, forward_seconds, on_several_cores
from benchmarks.engine.synthetic import forced
from benchmarks.engines import (
    BenchError,
    autoregressive,
    check_alone,
    check_draft,
    check_slots,
    engine_with,
    find_drafter,
    loading,
    reading_anew,
    running,
    short_enough,
)
from benchmarks.options import Draft, Parallel, Prompts, Tokens
from benchmarks.streams import Arrivals, decoding_rate, updates_of
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, Temperature, fail, settings_of
from osd.cli.report import Json, Table, check_files, conclude, say
from osd.drafting.autoregressive import AutoregressiveSession, WholeDraft
from osd.drafting.base import Drafter
from osd.drafting.compatibility import IncompatibleError
from osd.drafting.growth import Growth
from osd.drafting.session import DraftRequest, Proposal, Runtime, Session
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.target.load import target_directory
from osd.traffic import load
from osd.verification.noise import Noise
from osd.verification.tree import TreeBuilder

PLAIN, SPECULATIVE = "plain", "speculative"

_TURNS = 15  # of the isolated forwards
Step = TypeVar("Step")


def decode(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    streams: Parallel = 1,
    waves: Annotated[int, typer.Option(min=1, help="Waves of as many prompts, in both ways.")] = 9,
    tokens: Tokens = 96,
    growth: Annotated[str | None, typer.Option(help="growth.kind; its parameters with --set.", metavar="KIND")] = None,
    rule: Annotated[str | None, typer.Option(help="verification.", metavar="NAME")] = None,
    temperature: Temperature = 0.0,
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--synthetic-acceptance",
            min=0,
            max=1,
            help="Keep this share of every draft and ignore the target's verdict.",
        ),
    ] = None,
    json_file: Json = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare speculative with plain decoding on one engine.

    Writes a line of JSON for each wave and one of figures to standard output, and the table to standard error.
    Drafts are as large as their growth policy allows.
    """
    chosen = [f"growth.kind={growth}"] if growth else []
    chosen += [f"verification={rule}"] if rule else []
    settings = settings_of(config, [*(overrides or ()), *chosen])
    check_files(json_file)
    check_draft(draft)
    check_slots(settings, streams)
    try:
        policy = Policy.of(settings.growth, settings.verification)
    except IncompatibleError as error:
        fail(error)
    if policy.growth.max_nodes > settings.engine.max_draft:
        fail(f"engine.max_draft is {settings.engine.max_draft}, but a draft may have {policy.growth.max_nodes} tokens")
    if acceptance is not None:
        policy = forced(policy, acceptance)
    with loading():
        texts = load(prompts)
        directory = target_directory(settings)
        drafter, name = find_drafter(settings, draft, directory)
        check_alone(drafter)
        calls = Calls.of(drafter)
        engine = engine_with(reading_anew(settings), directory, drafter)
    asked = short_enough(engine.tokenizer, texts, settings.engine.context - tokens, prompts)
    sampling = SamplingParams(temperature=temperature)
    found: list[Wave] = []
    with running(engine):
        for one in measure(engine, asked, waves, streams, tokens, sampling, policy, calls):
            typer.echo(json.dumps(asdict(one)))
            found.append(one)
    runtime = Runtime.serving(streams, DRAFT_CONTEXT, policy.growth.max_nodes + 1, engine.target.device, engine.target)
    session = autoregressive(drafter.session(runtime))
    timed = on_several_cores(lambda: model(engine, session, streams, found, _TURNS), settings.engine.threads)
    result = concluded(found, timed, streams)
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "tokens": tokens}
    about |= {"temperature": temperature, "growth": settings.growth.kind, "rule": policy.rule.name}
    about |= {"synthetic_acceptance": acceptance, **figures(result)}
    typer.echo(json.dumps(about))
    conclude([table(result)], {**about, "waves": [asdict(one) for one in found]}, json_file, stderr=True)


@dataclass(frozen=True)
class Wave:
    """Requests decoded together in one way.

    ``tokens_per_second`` is of all streams while every one of them decodes: from the last first token to the first
    end. ``calls`` are the forwards of the drafter.
    """

    way: str
    tokens_per_second: float
    counts: SpeculationCounts
    calls: int


@dataclass(frozen=True)
class Model:
    """What a round should take by its forwards alone, each timed apart from the engine.

    A plain forward of all sequences takes ``plain`` seconds. A round has ``steps`` forwards of the drafter at ``step``
    times that, and one verification of ``rows`` tokens for each sequence at ``verify`` times it: k, c and v of
    Leviathan et al. (2023).
    """

    plain: Spread
    steps: float
    step: Spread
    rows: int
    verify: Spread

    def speedup(self, length: float) -> float:
        """The best that a mean acceptance length can give: ``length / (k c + v)``."""
        return length / (self.steps * self.step.median + self.verify.median)

    @property
    def draft_seconds(self) -> float:
        """Of the drafter's forwards in a round."""
        return self.steps * self.step.median * self.plain.median

    @property
    def verify_seconds(self) -> float:
        """Of the target's forward in a round."""
        return self.verify.median * self.plain.median


@dataclass(frozen=True)
class Found:
    """Tokens a second of both ways, their ratio wave by wave, acceptance, and the engine's efficiency.

    ``round_seconds`` is what a round of all streams took in the engine.
    """

    plain: Spread
    speculative: Spread
    speedup: Spread
    acceptance_rate: float
    mean_acceptance_length: float
    round_seconds: float
    model: Model
    efficiency: float


def counted(session: AutoregressiveSession, calls: Calls) -> AutoregressiveSession:
    """Have ``calls`` count the forwards of a session, and return the session.

    A call of ``expand`` takes one forward, or none if the forward of the root or of the nodes' block predicted these
    tokens already. A call that drafts chains takes one forward for each block of its longest chain (on a GPU, of the
    longest chain allowed), and only one for a drafter that predicts all levels at once. Trees that are grown in one
    call take one forward for each level.
    """
    expand, chains, trees = session.expand, session.chains, session.trees

    def expanded(slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)])
        calls.made += bool(((depths == 0) if session.levels is not None else (depths % session.block == 0)).any())
        return expand(slots, builder, rows, nodes)

    def drafted(*given: Any) -> WholeDraft | None:
        whole = chains(*given)
        if whole is not None and session.levels is not None:
            calls.made += 1
        elif whole is not None:
            deepest = whole.draft.tokens.shape[1] if whole.pending else int(whole.draft.sizes.max())
            calls.made += -(-deepest // session.block)
        return whole

    def grown(*given: Any) -> WholeDraft | None:
        whole = trees(*given)
        calls.made += 0 if whole is None else len(whole.expanded)
        return whole

    session.expand = expanded
    session.chains = drafted  # type: ignore[method-assign]
    session.trees = grown  # type: ignore[method-assign]
    return session


@dataclass
class Calls:
    """Forwards that the sessions of a drafter have made, and rows that they sent along with the target's."""

    made: int = 0
    riders: int = 0

    @classmethod
    def of(cls, drafter: Drafter) -> Calls:
        """Count those of all sessions that ``drafter`` opens from now on."""
        calls = cls()
        calls.count(drafter)
        return calls

    def count(self, drafter: Drafter) -> None:
        """Count those of all sessions that ``drafter`` opens from now on, too.

        One that rides in the target's own forward makes none.
        """
        session = drafter.session
        if drafter.needs.riders:
            drafter.session = lambda *size: self._watched(session(*size))  # type: ignore[method-assign]
        else:
            drafter.session = lambda *size: counted(autoregressive(session(*size)), self)  # type: ignore[method-assign]

    def during(self, steps: Iterable[Step]) -> Iterator[tuple[Step, Calls]]:
        """Each of ``steps`` with what was made while it was waited for."""
        made, riders = self.made, self.riders
        for step in steps:
            yield step, Calls(self.made - made, self.riders - riders)
            made, riders = self.made, self.riders

    def _watched(self, session: Session) -> Session:
        propose = session.propose

        def counted(request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
            proposal = propose(request, growth, noise)
            self.riders += sum(len(tree.rider_tokens) for tree in proposal.trees)
            return proposal

        session.propose = counted
        return session


def measure(
    engine: Engine, prompts: Sequence[tuple[int, ...]], waves: int, streams: int, tokens: int,
    sampling: SamplingParams, policy: Policy, calls: Calls,
) -> Iterator[Wave]:  # fmt: skip
    """Decode ``streams`` prompts at a time plainly and speculatively, in turns.

    Args:
        engine: Running, with a drafter and as many slots.
        prompts: Taken in order, and from the start again.
        waves: Pairs to measure, after one that warms up.
        streams: Prompts at the same time.
        tokens: Tokens of each completion; an end token does not end it.
        sampling: Sampling of all requests.
        policy: Growth and rule of the drafts, which are as large as it allows.
        calls: Calls of the engine's drafter.
    """

    def run(way: str, turn: int) -> Wave:
        requests = [
            Request(
                f"{way}-{n}", prompts[(turn * streams + n) % len(prompts)], tokens, replace(sampling, seed=n),
                ignore_eos=True, speculate=way == SPECULATIVE, policy=policy,
            )
            for n in range(streams)
        ]  # fmt: skip
        before = calls.made
        speed, counts = wave(engine, requests)
        return Wave(way, speed, counts, calls.made - before)

    for _, one in in_turns({way: partial(run, way) for way in (SPECULATIVE, PLAIN)}, waves, say):
        yield one


def against_plain(
    engine: Engine, prompts: Sequence[tuple[int, ...]], turns: int, tokens: int, policy: Policy
) -> tuple[Spread, float]:
    """Return the speed-up of greedy drafts, turn by turn on one prompt each, and the mean acceptance length."""
    with running(engine):
        greedy = SamplingParams(temperature=0)
        plain, drafted = _ways(list(measure(engine, prompts, turns, 1, tokens, greedy, policy, Calls())))
    speedup = ratios([one.tokens_per_second for one in drafted], [one.tokens_per_second for one in plain])
    return speedup, SpeculationCounts.sum(one.counts for one in drafted).mean_acceptance_length


def _ways(waves: Sequence[Wave]) -> tuple[list[Wave], list[Wave]]:
    """Return the plain waves and the speculative ones."""
    plain, drafted = ([one for one in waves if one.way == way] for way in (PLAIN, SPECULATIVE))
    return plain, drafted


def wave(engine: Engine, requests: Sequence[Request]) -> tuple[float, SpeculationCounts]:
    """Tokens a second of ``requests`` while all of them decode, and what they drafted.

    Raises:
        BenchError: one ended before all had begun.
    """
    arrivals: Arrivals = defaultdict(list)
    counts = SpeculationCounts()
    for moment, update in updates_of(engine, requests):
        arrivals[update.request_id].append((moment, len(update.token_ids)))
        counts.add(update.counts or SpeculationCounts())
    speed = decoding_rate(arrivals)
    if not speed:
        raise BenchError("the completions are too short: one ended before all had begun; ask for more tokens")
    return speed, counts


def model(engine: Engine, session: AutoregressiveSession, streams: int, waves: Sequence[Wave], turns: int) -> Model:
    """Time the forwards that the rounds of ``waves`` were made of. The engine must have stopped.

    Call it on a thread with the engine's cores; ``session`` is another one of the same drafter, with slots of
    ``DRAFT_CONTEXT`` tokens.

    Raises:
        BenchError: nothing was drafted.
    """
    drafted = [wave for wave in waves if wave.way == SPECULATIVE]
    counts = SpeculationCounts.sum(wave.counts for wave in drafted)
    if not counts.rounds:
        raise BenchError("nothing was drafted")
    # Calls are counted for all sequences together, rounds and tokens for each.
    steps = sum(wave.calls for wave in drafted) * streams / counts.rounds
    rows = 1 + round(counts.drafted / counts.rounds)
    length = round(counts.mean_acceptance_length)
    forwards = max(1, round(steps))
    levels = forwards if session.levels is None else min(session.levels, max(1, rows - 1))
    assert engine.pool is not None  # noqa: S101  something was drafted
    drafting = Drafting(session, engine.pool.default.needs, engine.target, streams)

    def forwards_of(turn: int) -> tuple[float, float, float]:
        plain = forward_seconds(engine.target, streams, 1)
        many = forward_seconds(engine.target, streams, rows)
        return plain, drafting.seconds(levels, length) / forwards, many

    found = by_way(in_turns({"forwards": forwards_of}, turns))["forwards"]
    drafting.close()
    plain, step, many = (list(values) for values in zip(*found, strict=True))
    return Model(Spread.of(plain), steps, ratios(step, plain), rows, ratios(many, plain))


def concluded(waves: Sequence[Wave], timed: Model, streams: int) -> Found:
    """Put the figures together."""
    plain, mine = _ways(waves)
    plain_speeds, speeds = ([one.tokens_per_second for one in way] for way in (plain, mine))
    speedup, speed = ratios(speeds, plain_speeds), Spread.of(speeds)
    counts = SpeculationCounts.sum(one.counts for one in mine)
    length = counts.mean_acceptance_length
    return Found(
        Spread.of(plain_speeds),
        speed,
        speedup,
        counts.acceptance_rate,
        length,
        streams * length / speed.median,
        timed,
        speedup.median / timed.speedup(length),
    )


def figures(found: Found) -> dict[str, Any]:
    """All of it, with the speed-up that the forwards allow."""
    return {**asdict(found), "possible_speedup": found.model.speedup(found.mean_acceptance_length)}


def table(found: Found) -> Table:
    """Make a table of what was measured, and what the forwards allow."""
    timed = found.model
    rest = found.round_seconds - timed.draft_seconds - timed.verify_seconds
    rows = [
        ("plain, tokens/s", found.plain.text(digits=1)),
        ("speculative, tokens/s", found.speculative.text(digits=1)),
        ("speed-up", found.speedup.text()),
        ("acceptance rate", f"{found.acceptance_rate:.3f}"),
        ("mean acceptance length", f"{found.mean_acceptance_length:.2f}"),
        ("k, drafter calls of a step", f"{timed.steps:.2f}"),
        ("c, a call in plain forwards", timed.step.text(digits=3)),
        (f"v, a forward of {timed.rows} in plain forwards", timed.verify.text(digits=3)),
        ("speed-up that k, c and v allow", f"{timed.speedup(found.mean_acceptance_length):.2f}"),
        ("engine efficiency", f"{found.efficiency:.3f}"),
        ("a step, ms", f"{found.round_seconds * 1e3:.2f}"),
        ("  the target's forward", f"{timed.verify_seconds * 1e3:.2f}"),
        ("  the drafter's forwards", f"{timed.draft_seconds * 1e3:.2f}"),
        ("  everything else", f"{rest * 1e3:.2f}"),
    ]
    return Table("", ("", "median (least to largest)"), rows)
