"""Where the target's first layers should end as a drafter: more of them draft better, and each draft takes longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks import decode
from benchmarks.adaptation.adapt import FROZEN, ONLINE, StreamTraining
from benchmarks.adaptation.experiment import Experiment, Stream
from benchmarks.adaptation.learner import Recipe
from benchmarks.adaptation.offline_acceptance import Counts, total
from benchmarks.adaptation.report import Table
from benchmarks.figures import Spread
from benchmarks.isolated import DRAFT_CONTEXT, Drafting, forward_seconds, on_several_cores
from benchmarks.pair import engine_with, reading_anew
from osd.config import KangarooSettings, drafter_of
from osd.drafters.autoregressive import AutoregressiveSession, autoregressive
from osd.drafters.base import Needs
from osd.drafters.session import Runtime
from osd.drafters.trainable import Trainable
from osd.engine.policy import Policy
from osd.runtime.interface import Target

KIND = "kangaroo"

_TURNS = 15
"""Of the isolated forwards."""


@dataclass(frozen=True)
class Exit:
    """What a drafter that leaves the target behind ``layer`` layers is worth after the same training.

    ``frozen`` and ``online`` are counts on unseen records: after the first tenth of the stream alone, and after
    learning all of it online. A step of the draft takes ``step`` seconds and a plain forward ``plain``. ``speedup`` is
    over plain decoding, turn by turn on the same prompts, at ``length`` tokens a round.
    """

    layer: int
    frozen: Counts
    online: Counts
    plain: Spread
    step: Spread
    speedup: Spread
    length: float


def leaving_behind(layer: int, experiment: Experiment) -> Experiment:
    """The same experiment with drafters that leave behind ``layer``."""
    given = drafter_of(KIND, experiment.settings.drafter)
    chosen = KangarooSettings(vocabulary=given.distilled.vocabulary, exit_layer=layer)
    return replace(experiment, settings=experiment.settings.model_copy(update={"drafter": chosen}))


def sweep(
    experiment: Experiment,
    stream: Stream,
    layers: Sequence[int],
    recipe: Recipe,
    most: float,
    turns: int,
    report: Callable[[str], None] = lambda step: None,
) -> Iterator[Exit]:
    """Measure one of ``layers`` after the other.

    Args:
        experiment: with the states of all these layers recorded.
        stream: what arrives, and what is only measured on; its prompts are decoded for the speed-up.
        layers: the exits.
        recipe: how online learns.
        most: passes of the frozen drafter over its tenth.
        turns: of prompts, each decoded plainly and with drafts.
        report: told what is done.

    Raises:
        osd.drafters.DrafterError: a target has no layer behind one of these.
    """
    for layer in layers:
        report(f"behind layer {layer}: learning {len(stream.arriving)} records")
        mine = leaving_behind(layer, experiment)
        training = StreamTraining(mine, stream, KIND, recipe, most)
        frozen, online = (total([one.counts for one in training.learn(way).unseen]) for way in (FROZEN, ONLINE))
        report(f"behind layer {layer}: decoding plainly and with drafts")
        plain, step, speedup, length = _timed(mine, training.drafter, stream, turns)
        yield Exit(layer, frozen, online, plain, step, speedup, length)


def _timed(
    experiment: Experiment, drafter: Trainable, stream: Stream, turns: int
) -> tuple[Spread, Spread, Spread, float]:
    """Seconds of a plain forward and of a draft step, the speed-up, and the tokens of a round."""
    settings, tokens = reading_anew(experiment.settings), experiment.size.tokens
    prompts = [tuple(trace.prompt_ids.numpy().tolist()) for trace in stream.unseen]
    engine = engine_with(settings, experiment.setup.directory, drafter)
    policy = Policy.of(settings.growth, settings.verification)
    speedup, length = decode.against_plain(engine, prompts, turns, tokens, policy)
    depth = policy.growth.max_nodes
    runtime = Runtime.serving(1, DRAFT_CONTEXT, depth + 1, engine.target.device, engine.target)
    session = autoregressive(drafter.session(runtime))
    plains, steps = on_several_cores(
        lambda: _seconds(engine.target, session, drafter.needs, depth), settings.engine.threads
    )
    return plains, steps, speedup, length


def _seconds(target: Target, session: AutoregressiveSession, needs: Needs, depth: int) -> tuple[Spread, Spread]:
    """Of a plain forward, and of a step of drafts of ``depth`` tokens, taking turns; the first turn warms up."""
    drafting = Drafting(session, needs, target, 1)
    pairs = [(forward_seconds(target, 1, 1), drafting.seconds(depth, 2) / depth) for _ in range(_TURNS + 1)][1:]
    drafting.close()
    plains, steps = zip(*pairs, strict=True)
    return Spread.of(plains), Spread.of(steps)


def exits_table(name: str, found: Sequence[Exit]) -> Table:
    """A row for each exit."""
    columns = (
        "layers", "accepted / tested, frozen", "online", "acceptance rate", "a draft step, ms", "a plain forward, ms",
        "acceptance length", "speed-up",
    )  # fmt: skip
    rows = [
        (
            str(one.layer),
            f"{one.frozen.agreement:.3f}",
            f"{one.online.agreement:.3f}",
            f"{one.online.acceptance:.3f}",
            one.step.text(1e3),
            one.plain.text(1e3),
            f"{one.length:.2f}",
            one.speedup.text(),
        )
        for one in found
    ]
    return Table(f"{name}: exits of {KIND}, medians (least to largest)", columns, rows)
