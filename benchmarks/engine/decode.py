"""``osd bench decode``: speed-up of speculative over plain decoding, and the engine's efficiency."""

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

from benchmarks import engines
from benchmarks.engine.isolated import DRAFT_CONTEXT, DraftTimer, forward_seconds, on_several_cores
from benchmarks.engine.synthetic import force_acceptance
from benchmarks.options import Draft, Parallel, Prompts, Tokens
from benchmarks.streams import TokenTimes, decoding_rate, updates_of
from benchmarks.turns import Spread, by_way, in_turns, ratios
from osd.cli.common import ConfigFile, Overrides, Temperature, fail, settings_of
from osd.cli.report import ReportFile, Table, check_files, conclude, say
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

_TURNS = 15  # turns of the isolated forwards
Step = TypeVar("Step")


def decode(
    draft: Draft = "registry",
    prompts: Prompts = "unittest",
    streams: Parallel = 1,
    waves: Annotated[int, typer.Option(min=1, help="Waves of --streams prompts, plain and speculative each.")] = 9,
    tokens: Tokens = 96,
    growth: Annotated[
        str | None, typer.Option(help="Sets growth.kind; set its parameters with --set.", metavar="KIND")
    ] = None,
    rule: Annotated[str | None, typer.Option(help="Sets verification.", metavar="NAME")] = None,
    temperature: Temperature = 0.0,
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--synthetic-acceptance",
            min=0,
            max=1,
            help="Accept this share of the longest path of every draft and ignore the target's verdict.",
        ),
    ] = None,
    json_file: ReportFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Compare speculative with plain decoding on one engine.

    Standard output gets a line of JSON for each wave, and a last line with all figures. Standard error gets the table.
    Every draft has the largest size that the growth policy allows.
    """
    chosen = [f"growth.kind={growth}"] if growth else []
    chosen += [f"verification={rule}"] if rule else []
    settings = settings_of(config, [*(overrides or ()), *chosen])
    check_files(json_file)
    engines.check_draft(draft)
    engines.check_slots(settings, streams)
    try:
        policy = Policy.of(settings.growth, settings.verification)
    except IncompatibleError as error:
        fail(error)
    if policy.growth.max_nodes > settings.engine.max_draft:
        fail(f"engine.max_draft is {settings.engine.max_draft}, but a draft may have {policy.growth.max_nodes} tokens")
    if acceptance is not None:
        policy = force_acceptance(policy, acceptance)
    with engines.loading():
        texts = load(prompts)
        directory = target_directory(settings)
        drafter, name = engines.find_drafter(settings, draft, directory)
        engines.check_alone(drafter)
        calls = DrafterCalls.of(drafter)
        engine = engines.engine_with(engines.without_prefix_cache(settings), directory, drafter)
    token_ids = engines.encode_short(engine.tokenizer, texts, engine.target.context - tokens, prompts)
    sampling = SamplingParams(temperature=temperature)
    finished: list[DecodeWave] = []
    with engines.running(engine):
        for wave in measure(engine, token_ids, waves, streams, tokens, sampling, policy, calls):
            typer.echo(json.dumps(asdict(wave)))
            finished.append(wave)
    runtime = Runtime.serving(streams, DRAFT_CONTEXT, policy.growth.max_nodes + 1, engine.target.device, engine.target)
    session = engines.autoregressive(drafter.session(runtime))
    model = on_several_cores(lambda: time_forwards(engine, session, streams, finished, _TURNS), settings.engine.threads)
    result = summarize(finished, model, streams)
    about = {"target": settings.target.source, "draft": name, "prompts": prompts, "streams": streams, "tokens": tokens}
    about |= {"temperature": temperature, "growth": settings.growth.kind, "rule": policy.rule.name}
    about |= {"synthetic_acceptance": acceptance, **figures(result)}
    typer.echo(json.dumps(about))
    conclude([table(result)], {**about, "waves": [asdict(wave) for wave in finished]}, json_file, stderr=True)


@dataclass(frozen=True)
class DecodeWave:
    """Requests decoded together in one way."""

    way: str  # PLAIN or SPECULATIVE
    tokens_per_second: float  # tokens of all streams from the last first token to the first end
    counts: SpeculationCounts  # draft counts of all streams
    calls: int  # forwards of the drafter


@dataclass(frozen=True)
class StepModel:
    """Expected time of a decoding step, from forwards that were timed without the engine.

    A step has ``steps`` forwards of the drafter and one verification: k, c and v of Leviathan et al. (2023).
    """

    plain: Spread  # seconds of a plain forward of all sequences
    steps: float  # k, drafter forwards per decoding step
    step: Spread  # c, time of a drafter forward in plain forwards
    rows: int  # verified tokens per sequence
    verify: Spread  # v, time of the verification in plain forwards

    def speedup(self, length: float) -> float:
        """Return the highest speed-up for a mean acceptance length: ``length / (k c + v)``."""
        return length / (self.steps * self.step.median + self.verify.median)

    @property
    def draft_seconds(self) -> float:
        """Seconds of the drafter's forwards in a step."""
        return self.steps * self.step.median * self.plain.median

    @property
    def verify_seconds(self) -> float:
        """Seconds of the target's forward in a step."""
        return self.verify.median * self.plain.median


@dataclass(frozen=True)
class DecodeResult:
    """Tokens per second of both ways, their ratio wave by wave, acceptance, and the engine's efficiency.

    ``round_seconds`` is the time of a decoding step of all streams in the engine.
    """

    plain: Spread
    speculative: Spread
    speedup: Spread
    acceptance_rate: float
    mean_acceptance_length: float
    round_seconds: float
    model: StepModel
    efficiency: float


def count_calls(session: AutoregressiveSession, calls: DrafterCalls) -> AutoregressiveSession:
    """Make ``calls`` count the forwards of a session, and return the session.

    A call of ``expand`` takes one forward, or none if the forward of the root or of the nodes' block predicted these
    tokens already. A call that drafts chains takes one forward for each block of its longest chain (on a GPU, of the
    longest chain allowed), and only one for a drafter that predicts all levels at once. Trees grown in one call take
    one forward for each level.
    """
    expand, chains, trees = session.expand, session.chains, session.trees

    def expand_nodes(slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)])
        calls.forwards += bool(((depths == 0) if session.levels is not None else (depths % session.block == 0)).any())
        return expand(slots, builder, rows, nodes)

    def draft_chains(*args: Any) -> WholeDraft | None:
        proposal = chains(*args)
        if proposal is not None and session.levels is not None:
            calls.forwards += 1
        elif proposal is not None:
            deepest = proposal.draft.tokens.shape[1] if proposal.pending else int(proposal.draft.sizes.max())
            calls.forwards += -(-deepest // session.block)
        return proposal

    def grow_trees(*args: Any) -> WholeDraft | None:
        proposal = trees(*args)
        calls.forwards += 0 if proposal is None else len(proposal.expanded)
        return proposal

    session.expand = expand_nodes
    session.chains = draft_chains  # type: ignore[method-assign]
    session.trees = grow_trees  # type: ignore[method-assign]
    return session


@dataclass
class DrafterCalls:
    """Forwards of a drafter's sessions, and rows that the sessions added to the target's forward."""

    forwards: int = 0
    riders: int = 0

    @classmethod
    def of(cls, drafter: Drafter) -> DrafterCalls:
        """Return counters of all sessions that ``drafter`` opens from now on; its method ``session`` is replaced."""
        calls = cls()
        calls.count(drafter)
        return calls

    def count(self, drafter: Drafter) -> None:
        """Count the sessions that ``drafter`` opens from now on too.

        A drafter that adds rows to the target's forward makes no forwards of its own.
        """
        session = drafter.session
        if drafter.needs.riders:
            drafter.session = lambda *size: self._count_riders(session(*size))  # type: ignore[method-assign]
        else:
            drafter.session = lambda *size: count_calls(engines.autoregressive(session(*size)), self)  # type: ignore[method-assign]

    def during(self, steps: Iterable[Step]) -> Iterator[tuple[Step, DrafterCalls]]:
        """Yield each of ``steps`` with the calls since the step before."""
        forwards, riders = self.forwards, self.riders
        for step in steps:
            yield step, DrafterCalls(self.forwards - forwards, self.riders - riders)
            forwards, riders = self.forwards, self.riders

    def _count_riders(self, session: Session) -> Session:
        propose = session.propose

        def propose_and_count(request: DraftRequest, growth: Growth, noise: Noise) -> Proposal:
            proposal = propose(request, growth, noise)
            self.riders += sum(len(tree.rider_tokens) for tree in proposal.trees)
            return proposal

        session.propose = propose_and_count
        return session


def measure(
    engine: Engine, prompts: Sequence[tuple[int, ...]], waves: int, streams: int, tokens: int,
    sampling: SamplingParams, policy: Policy, calls: DrafterCalls,
) -> Iterator[DecodeWave]:  # fmt: skip
    """Decode ``streams`` prompts at a time plainly and speculatively, in turns.

    The running engine has a drafter, whose calls ``calls`` counts, and a slot per stream. Prompts are taken in order
    and repeated from the start. The first pair of waves is the warm-up; ``waves`` pairs follow. End tokens are ignored,
    and drafts have the largest size that ``policy`` allows.
    """

    def run(way: str, turn: int) -> DecodeWave:
        requests = [
            Request(
                f"{way}-{n}", prompts[(turn * streams + n) % len(prompts)], tokens, replace(sampling, seed=n),
                ignore_eos=True, speculate=way == SPECULATIVE, policy=policy,
            )
            for n in range(streams)
        ]  # fmt: skip
        before = calls.forwards
        speed, counts = decode_wave(engine, requests)
        return DecodeWave(way, speed, counts, calls.forwards - before)

    for _, wave in in_turns({way: partial(run, way) for way in (SPECULATIVE, PLAIN)}, waves, say):
        yield wave


def speedup_over_plain(
    engine: Engine, prompts: Sequence[tuple[int, ...]], turns: int, tokens: int, policy: Policy
) -> tuple[Spread, float]:
    """Return the speed-up of greedy drafts over turns with one prompt each, and the mean acceptance length."""
    with engines.running(engine):
        greedy = SamplingParams(temperature=0)
        plain, drafted = _split_waves(list(measure(engine, prompts, turns, 1, tokens, greedy, policy, DrafterCalls())))
    speedup = ratios([wave.tokens_per_second for wave in drafted], [wave.tokens_per_second for wave in plain])
    return speedup, SpeculationCounts.sum(wave.counts for wave in drafted).mean_acceptance_length


def _split_waves(waves: Sequence[DecodeWave]) -> tuple[list[DecodeWave], list[DecodeWave]]:
    """Return the plain waves and the speculative waves."""
    plain, drafted = ([wave for wave in waves if wave.way == way] for way in (PLAIN, SPECULATIVE))
    return plain, drafted


def decode_wave(engine: Engine, requests: Sequence[Request]) -> tuple[float, SpeculationCounts]:
    """Return tokens per second of ``requests`` while all of them decode, and their draft counts.

    Raises:
        BenchError: a request ended before all had started.
    """
    arrivals: TokenTimes = defaultdict(list)
    counts = SpeculationCounts()
    for moment, update in updates_of(engine, requests):
        arrivals[update.request_id].append((moment, len(update.token_ids)))
        counts.add(update.counts or SpeculationCounts())
    speed = decoding_rate(arrivals)
    if not speed:
        raise engines.BenchError("the completions are too short: one ended before all had started; raise --tokens")
    return speed, counts


def time_forwards(
    engine: Engine, session: AutoregressiveSession, streams: int, waves: Sequence[DecodeWave], turns: int
) -> StepModel:
    """Time the drafter's and the target's forwards in an average step of ``waves``; the engine must have stopped.

    Call this on a thread with the engine's cores. ``session`` is a separate session of the same drafter, with slots of
    ``DRAFT_CONTEXT`` tokens.

    Raises:
        BenchError: nothing was drafted.
    """
    drafted = [wave for wave in waves if wave.way == SPECULATIVE]
    counts = SpeculationCounts.sum(wave.counts for wave in drafted)
    if not counts.rounds:
        raise engines.BenchError("nothing was drafted")
    # Calls are counted for all sequences together, decoding steps and tokens per sequence.
    steps = sum(wave.calls for wave in drafted) * streams / counts.rounds
    rows = 1 + round(counts.drafted / counts.rounds)
    length = round(counts.mean_acceptance_length)
    forwards = max(1, round(steps))
    levels = forwards if session.levels is None else min(session.levels, max(1, rows - 1))
    assert engine.pool is not None  # noqa: S101  something was drafted
    timer = DraftTimer(session, engine.pool.default.needs, engine.target, streams)

    def forwards_of(turn: int) -> tuple[float, float, float]:
        plain = forward_seconds(engine.target, streams, 1)
        verify = forward_seconds(engine.target, streams, rows)
        return plain, timer.seconds(levels, length) / forwards, verify

    results = by_way(in_turns({"forwards": forwards_of}, turns))["forwards"]
    timer.close()
    plain, step, verify = (list(values) for values in zip(*results, strict=True))
    return StepModel(Spread.of(plain), steps, ratios(step, plain), rows, ratios(verify, plain))


def summarize(waves: Sequence[DecodeWave], model: StepModel, streams: int) -> DecodeResult:
    """Return medians over the waves of both ways, their ratios, and the efficiency relative to ``model``."""
    plain, drafted = _split_waves(waves)
    plain_speeds, speeds = ([wave.tokens_per_second for wave in way] for way in (plain, drafted))
    speedup, speed = ratios(speeds, plain_speeds), Spread.of(speeds)
    counts = SpeculationCounts.sum(wave.counts for wave in drafted)
    length = counts.mean_acceptance_length
    return DecodeResult(
        Spread.of(plain_speeds),
        speed,
        speedup,
        counts.acceptance_rate,
        length,
        streams * length / speed.median,
        model,
        speedup.median / model.speedup(length),
    )


def figures(result: DecodeResult) -> dict[str, Any]:
    """Return all fields for JSON, with the speed-up that the forwards allow."""
    return {**asdict(result), "possible_speedup": result.model.speedup(result.mean_acceptance_length)}


def table(result: DecodeResult) -> Table:
    """Return a table of the measured figures and of the speed-up that the forwards allow."""
    model = result.model
    rest = result.round_seconds - model.draft_seconds - model.verify_seconds
    rows = [
        ("plain, tokens/s", result.plain.text(digits=1)),
        ("speculative, tokens/s", result.speculative.text(digits=1)),
        ("speed-up", result.speedup.text()),
        ("acceptance rate", f"{result.acceptance_rate:.3f}"),
        ("mean acceptance length", f"{result.mean_acceptance_length:.2f}"),
        ("k, drafter calls of a step", f"{model.steps:.2f}"),
        ("c, a call in plain forwards", model.step.text(digits=3)),
        (f"v, a forward of {model.rows} in plain forwards", model.verify.text(digits=3)),
        ("speed-up that k, c and v allow", f"{model.speedup(result.mean_acceptance_length):.2f}"),
        ("engine efficiency", f"{result.efficiency:.3f}"),
        ("a step, ms", f"{result.round_seconds * 1e3:.2f}"),
        ("  the target's forward", f"{model.verify_seconds * 1e3:.2f}"),
        ("  the drafter's forwards", f"{model.draft_seconds * 1e3:.2f}"),
        ("  everything else", f"{rest * 1e3:.2f}"),
    ]
    return Table("", ("", "median (least to largest)"), rows)
