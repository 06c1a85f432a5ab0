"""What rounds cost an engine on this machine, by its own cost model after it has decoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.engines import reading_anew
from benchmarks.kept import Results
from benchmarks.learning.experiment import Experiment
from benchmarks.net.turn import FROZEN, RECALL, RECALL_FROZEN, settings_of_way
from benchmarks.streams import decode
from osd import drafting
from osd.capture.trace import Trace
from osd.cli.report import say
from osd.config import Settings
from osd.drafting.base import Drafter
from osd.engine.build import InitialDrafter, make_engine
from osd.engine.request import Request, SamplingParams
from osd.runtime.device import cores
from osd.runtime.machine import Machine
from osd.simulation.step_costs import CostMeasurement
from osd.target.model import load_config

_PROMPTS, _TOKENS = 16, 48
_AT_ONCE = (1, 2, 4, 8, 16)
_ROUNDS = 2  # of all prompts: recall has seen them in the second


def engine_costs(
    settings: Settings,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    trained: float,
) -> CostMeasurement:
    """Decode ``prompts``, several numbers of them at once, and say what the cost model has learnt of that.

    Args:
        settings: of a service with such a drafter.
        directory: of the target.
        tokenizer: of the target.
        drafter: that drafts.
        prompts: token ids.
        trained: tokens that a second of a core trains, gates included, which is not measured here.
    """
    drafter = drafting.served(drafter, settings)
    engine = make_engine(reading_anew(settings), directory, tokenizer, InitialDrafter(drafter, 1), None)
    engine.start()
    try:
        for number in range(_ROUNDS):
            for at_once in _AT_ONCE[: settings.engine.slots.bit_length()]:
                say(f"costs of {settings.drafter.kind}: {at_once} at once, {number + 1} of {_ROUNDS}")
                for start in range(0, len(prompts) - at_once + 1, at_once):
                    several = prompts[start : start + at_once]
                    decode(engine, [_request(index, ids) for index, ids in enumerate(several)])
        table = engine.loop.planner.costs.table()
    finally:
        engine.stop()
    weights = drafter.weights()
    width = len(drafter.needs.taps) * load_config(directory).hidden_size
    return CostMeasurement(
        machine=str(Machine.here()),
        drafter=drafter.kind,
        cores=cores(settings.engine.threads),
        hidden_width=width,
        version_bytes=float(sum(weight.numel() * weight.element_size() for weight in weights.values())),
        tokens_per_second=trained,
        table=table,
    )


def _request(index: int, ids: tuple[int, ...]) -> Request:
    return Request(str(index), ids, _TOKENS, SamplingParams(temperature=0), ignore_eos=True, capture=True)


def costs_of_ways(
    settings: Settings,
    experiment: Experiment,
    fresh: Drafter,
    recorded: Sequence[Trace],
    trained: float,
    results: Results,
) -> None:
    """Keep the costs of recall, of the ``fresh`` drafter and of both together, a file for each kind of drafter."""
    setup = experiment.setup
    prompts = [tuple(trace.prompt_ids.numpy().tolist()) for trace in recorded[:_PROMPTS]]
    for way in (RECALL, FROZEN, RECALL_FROZEN):
        own = settings_of_way(settings, way, settings.home)
        drafter = fresh if own.drafter.trainable else drafting.initial(own.drafter, setup.directory, settings.home_dir)
        measure = partial(engine_costs, own, setup.directory, setup.tokenizer, drafter, prompts, trained)
        results.once(f"costs-{own.drafter.kind}", CostMeasurement, measure)
