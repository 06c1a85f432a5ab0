"""Speculative decoding beside plain decoding on one engine, and how much of the possible speed-up it reaches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from rich.table import Table as Grid
from torch import Tensor

from benchmarks.figures import Spread
from benchmarks.isolated import Drafting, forward_seconds
from benchmarks.pair import BenchError
from benchmarks.report import columns
from benchmarks.streams import Arrivals, decoding_rate, updates_of
from osd.drafters.acceptance_head import PackedHead
from osd.drafters.autoregressive import AutoregressiveSession, WrappedSession, autoregressive
from osd.drafters.base import Drafter
from osd.drafters.session import Asked, Chains, Proposal, Session
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.metrics import SpeculationCounts
from osd.speculation.growth import Growth
from osd.speculation.noise import Noise
from osd.speculation.tree import TreeBuilder

PLAIN, SPECULATIVE = "plain", "speculative"

Step = TypeVar("Step")


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


class Counted(WrappedSession):
    """A session that counts its forwards."""

    def __init__(self, session: AutoregressiveSession, calls: Calls) -> None:
        super().__init__(session)
        self._calls = calls

    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """One forward; none where that of the root, or of the block that the nodes are in, has said everything."""
        depths = torch.where(nodes < 0, 0, builder.depths[rows, nodes.clamp(min=0)])
        self._calls.made += bool(((depths == 0) if self.levels is not None else (depths % self.block == 0)).any())
        return super().expand(slots, builder, rows, nodes)

    def chains(self, slots: Sequence[int], limits: Sequence[int], floor: float) -> Chains | None:
        """As many forwards as the longest of the drafts has blocks; on a GPU, as it may have.

        One where that says everything.
        """
        return self._counted(super().chains(slots, limits, floor))

    def judged_chains(
        self, slots: Sequence[int], limits: Sequence[int], most: float, head: PackedHead | None = None
    ) -> Chains | None:
        """As many forwards as ``chains``."""
        return self._counted(super().judged_chains(slots, limits, most, head))

    def _counted(self, chains: Chains | None) -> Chains | None:
        if chains is not None and self.levels is not None:
            self._calls.made += 1
        elif chains is not None:
            deepest = int(chains.sizes.max()) if chains.settled else chains.drafted.shape[1]
            self._calls.made += -(-deepest // self.block)
        return chains


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
            drafter.session = lambda *size: Counted(autoregressive(session(*size)), self)  # type: ignore[method-assign]

    def during(self, steps: Iterable[Step]) -> Iterator[tuple[Step, Calls]]:
        """Each of ``steps`` with what was made while it was waited for."""
        made, riders = self.made, self.riders
        for step in steps:
            yield step, Calls(self.made - made, self.riders - riders)
            made, riders = self.made, self.riders

    def _watched(self, session: Session) -> Session:
        propose = session.propose

        def counted(asked: Asked, growth: Growth, noise: Noise) -> Proposal:
            proposal = propose(asked, growth, noise)
            self.riders += sum(len(tree.rider_tokens) for tree in proposal.trees)
            return proposal

        session.propose = counted
        return session


def decode(
    engine: Engine, prompts: Sequence[tuple[int, ...]], waves: int, streams: int, tokens: int,
    sampling: SamplingParams, policy: Policy, calls: Calls, report: Callable[[str], None] = lambda step: None,
) -> Iterator[Wave]:  # fmt: skip
    """Decode ``streams`` prompts at a time plainly and speculatively, in alternation; the first wave of each warms up.

    Args:
        engine: running, with a drafter and as many slots.
        prompts: taken in order, and from the start again.
        waves: pairs to measure.
        streams: at the same time.
        tokens: of each completion, whatever its end.
        sampling: of all requests.
        policy: how to speculate; it is not governed.
        calls: of the engine's drafter.
        report: told which wave begins.
    """
    for number in range(waves + 1):
        report(f"wave {number} of {waves}")
        asked = [prompts[(number * streams + n) % len(prompts)] for n in range(streams)]
        for way in (PLAIN, SPECULATIVE) if number % 2 else (SPECULATIVE, PLAIN):
            requests = [
                Request(
                    f"{way}-{n}", prompt, tokens, replace(sampling, seed=n), ignore_eos=True,
                    speculate=way == SPECULATIVE, policy=policy,
                )
                for n, prompt in enumerate(asked)
            ]  # fmt: skip
            before = calls.made
            speed, counts = wave(engine, requests)
            if number:
                yield Wave(way, speed, counts, calls.made - before)


def against_plain(
    engine: Engine, prompts: Sequence[tuple[int, ...]], turns: int, tokens: int, policy: Policy
) -> tuple[Spread, float]:
    """The speed-up of greedy drafts over plain decoding, turn by turn on one prompt each, and the tokens of a round.

    The engine, which has a drafter, runs meanwhile.
    """
    engine.start()
    try:
        waves = list(decode(engine, prompts, turns, 1, tokens, SamplingParams(temperature=0), policy, Calls()))
    finally:
        engine.stop()
    plain, drafted = ([wave for wave in waves if wave.way == way] for way in (PLAIN, SPECULATIVE))
    ratios = [mine.tokens_per_second / other.tokens_per_second for mine, other in zip(drafted, plain, strict=True)]
    return Spread.of(ratios), SpeculationCounts.sum(wave.counts for wave in drafted).mean_acceptance_length


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
    drafting = Drafting(session, engine.pool.own.needs, engine.target, streams)
    plains, step, verify = [], [], []
    for turn in range(turns + 1):
        plain = forward_seconds(engine.target, streams, 1)
        many = forward_seconds(engine.target, streams, rows)
        seconds = drafting.seconds(levels, length)
        if turn:
            plains.append(plain)
            step.append(seconds / forwards / plain)
            verify.append(many / plain)
    drafting.close()
    return Model(Spread.of(plains), steps, Spread.of(step), rows, Spread.of(verify))


def conclude(waves: Sequence[Wave], timed: Model, streams: int) -> Found:
    """Put the figures together; waves of both ways alternate."""
    plain, mine = ([wave for wave in waves if wave.way == way] for way in (PLAIN, SPECULATIVE))
    speedup = Spread.of([a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, plain, strict=True)])
    counts = SpeculationCounts.sum(wave.counts for wave in mine)
    length = counts.mean_acceptance_length
    speed = Spread.of([wave.tokens_per_second for wave in mine])
    return Found(
        Spread.of([wave.tokens_per_second for wave in plain]),
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


def table(found: Found) -> Grid:
    """What was measured, and what the forwards allow."""
    grid = columns("", "median (least to largest)")
    timed = found.model
    rest = found.round_seconds - timed.draft_seconds - timed.verify_seconds
    for name, text in (
        ("plain, tokens/s", found.plain.text(digits=1)),
        ("speculative, tokens/s", found.speculative.text(digits=1)),
        ("speed-up", found.speedup.text()),
        ("acceptance rate", f"{found.acceptance_rate:.3f}"),
        ("mean acceptance length", f"{found.mean_acceptance_length:.2f}"),
        ("k, drafter steps a round", f"{timed.steps:.2f}"),
        ("c, a step in plain forwards", timed.step.text(digits=3)),
        (f"v, a forward of {timed.rows} in plain forwards", timed.verify.text(digits=3)),
        ("speed-up that k, c and v allow", f"{timed.speedup(found.mean_acceptance_length):.2f}"),
        ("engine efficiency", f"{found.efficiency:.3f}"),
        ("a round, ms", f"{found.round_seconds * 1e3:.2f}"),
        ("  the target's forward", f"{timed.verify_seconds * 1e3:.2f}"),
        ("  the drafter's forwards", f"{timed.draft_seconds * 1e3:.2f}"),
        ("  everything else", f"{rest * 1e3:.2f}"),
    ):
        grid.add_row(name, text)
    return grid
