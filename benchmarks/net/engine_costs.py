"""Costs of decoding steps on this machine, from the cost model of an engine that has decoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.engines import engine_with, without_prefix_cache
from benchmarks.learning.experiment import Experiment
from benchmarks.net.passes import FROZEN, RECALL, RECALL_FROZEN, settings_of_way
from benchmarks.results import Results
from benchmarks.streams import decode
from osd import drafting
from osd.capture.trace import Trace
from osd.cli.report import say
from osd.config import Settings
from osd.drafting.base import Drafter
from osd.engine.request import Request, SamplingParams
from osd.runtime.device import cores
from osd.runtime.machine import Machine
from osd.simulation.step_costs import CostMeasurement
from osd.target.model import load_config

_PROMPTS, _TOKENS = 16, 48
_AT_ONCE = (1, 2, 4, 8, 16)
_REPEATS = 2  # in the second repeat recall has seen all prompts


def engine_costs(
    settings: Settings,
    directory: Path,
    drafter: Drafter,
    prompts: Sequence[tuple[int, ...]],
    trained: float,
) -> CostMeasurement:
    """Decode ``prompts`` in batches of several sizes, and return the engine's cost model.

    ``settings`` belong to a service with this drafter. ``trained`` is the number of trained tokens per CPU second
    with gates, which this function does not measure.
    """
    drafter = drafting.served(drafter, settings)
    engine = engine_with(without_prefix_cache(settings), directory, drafter)
    engine.start()
    try:
        for number in range(_REPEATS):
            for at_once in _AT_ONCE[: settings.engine.slots.bit_length()]:
                say(f"costs of {settings.drafter.kind}: {at_once} at once, {number + 1} of {_REPEATS}")
                for start in range(0, len(prompts) - at_once + 1, at_once):
                    batch = prompts[start : start + at_once]
                    decode(engine, [_request(index, ids) for index, ids in enumerate(batch)])
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
    trained_drafter: Drafter,
    traces: Sequence[Trace],
    trained: float,
    results: Results,
) -> None:
    """Keep the costs of recall, of the drafter and of both together in one file per drafter kind."""
    setup = experiment.setup
    prompts = [tuple(trace.prompt_ids.numpy().tolist()) for trace in traces[:_PROMPTS]]
    for way in (RECALL, FROZEN, RECALL_FROZEN):
        way_settings = settings_of_way(settings, way, settings.home)
        chosen = way_settings.drafter
        drafter = trained_drafter if chosen.trainable else drafting.initial(chosen, setup.directory, settings.cache_dir)
        measure = partial(engine_costs, way_settings, setup.directory, drafter, prompts, trained)
        results.once(f"costs-{chosen.kind}", CostMeasurement, measure)
