"""Drafts by the target's first layers: verification resumes from them and runs no layer twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from osd.capture.trace import Trace, decode, encode
from osd.config import ConfidenceSettings, DynamicTreeSettings, GrowthSettings, KangarooSettings
from osd.drafting import Trainable, initial
from osd.engine import loop
from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.model import SlotModel
from tests.unit.engine.harness import LENGTHS, Client, prompts, running

LAYERS = 4


def kangaroo(directory: Path, exit_layer: int = 1) -> Trainable:
    """Return an untrained drafter with a little noise."""
    torch.manual_seed(4)
    drafter = initial(KangarooSettings(vocabulary=200, exit_layer=exit_layer), directory, directory)
    assert isinstance(drafter, Trainable)
    with torch.no_grad():
        for parameter in (weight for weight in drafter.parameters() if weight.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return drafter


Goals = list[list[int]]


@contextmanager
def counting(client: Client) -> Iterator[Counter[tuple[int, int, int]]]:
    """Count the runs of each layer by slot and place, and check that none runs twice within a step."""
    runs: Counter[tuple[int, int, int]] = Counter()
    total: Counter[tuple[int, int, int]] = Counter()
    target = client.engine.target
    forward, draft, advance = target.forward, loop.draft, loop.advance

    def counted(rows: PackedRows, wanted: Any, layers: range | None = None, states: Any = None) -> Forward:
        every = range(LAYERS) if layers is None else layers
        places = list(zip(rows.slots.tolist(), rows.stores.tolist(), strict=True))
        runs.update((layer, *place) for layer in every for place in places)
        return forward(rows, wanted, layers, states)

    def began(*planned: Any) -> Any:
        runs.clear()
        return draft(*planned)

    def ended(*verified: Any) -> Any:
        total.update(runs)
        twice.extend(runs - Counter(set(runs)))
        return advance(*verified)

    twice: list[tuple[int, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", counted)
        patch.setattr(loop, "draft", began)
        patch.setattr(loop, "advance", ended)
        yield total
    assert not twice, "layers ran twice"


@pytest.mark.parametrize(
    "growth",
    [ConfidenceSettings(depth=4, eta=0.05, governed=False), DynamicTreeSettings(budget=6, governed=False)],
    ids=lambda growth: growth.kind,
)
def test_drafted_layers_are_not_run_again(target_dir: Path, goals: Goals, growth: GrowthSettings) -> None:
    """Every layer runs once for the same rows, because drafts are a part of the verification."""
    with running(target_dir, drafter=kangaroo(target_dir), growth=growth, chunk=4) as client:
        other = initial(KangarooSettings(vocabulary=100, exit_layer=1), target_dir, target_dir)
        client.engine.pool.open("other", 1, other.weights(), other)
        with counting(client) as total:
            for index, prompt in enumerate(prompts(LENGTHS)):
                domain, speculate = ("other", True) if index == 1 else ("general", index != 3)
                client.submit(str(index), prompt, 12, ignore_eos=True, domain=domain, speculate=speculate)
            results = client.wait()
        drafted = client.engine.counters().speculation().drafted
    assert [results[str(index)].tokens for index in range(len(LENGTHS))] == [goal[:12] for goal in goals]
    rows = [sum(count for (layer, _, _), count in total.items() if layer == at) for at in range(LAYERS)]
    assert drafted > 20
    assert len(set(rows)) == 1, rows


def test_repeated_layers_are_detected(target_dir: Path, goals: Goals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osd.engine.step.resumed_rows", lambda *args: [])
    with (
        running(target_dir, drafter=kangaroo(target_dir)) as client,
        pytest.raises(AssertionError, match="twice"),
        counting(client),
    ):
        client.ask_greedily(goals)


def test_drafters_with_different_exits_share_a_step(target_dir: Path, goals: Goals) -> None:
    drafters = {f"from {layer}": kangaroo(target_dir, layer) for layer in (1, 2, 3)}
    with running_tapped(target_dir, (0, 1, 2), drafters["from 2"]) as client:
        for name, drafter in drafters.items():
            client.engine.pool.open(name, 1, drafter.weights(), drafter)
        for name in drafters:
            for index, prompt in enumerate(prompts(LENGTHS)):
                client.submit(f"{name} {index}", prompt, 12, ignore_eos=True, domain=name)
        results = client.wait()
        drafted = {domain for domain, _ in client.engine.counters().by_version}
    assert drafted == set(drafters)
    for name in drafters:
        assert [results[f"{name} {index}"].tokens for index in range(len(LENGTHS))] == [goal[:12] for goal in goals]


@contextmanager
def running_tapped(directory: Path, taps: tuple[int, ...], drafter: Trainable, **more: Any) -> Iterator[Client]:
    """Run an engine whose target has more taps than its drafter reads."""
    with pytest.MonkeyPatch.context() as patch:
        made = SlotModel.__init__

        def tapped(self: SlotModel, model: Any, **how: Any) -> None:
            made(self, model, **{**how, "taps": taps})

        patch.setattr(SlotModel, "__init__", tapped)
        with running(directory, drafter=drafter, slots=15, **more) as client:
            yield client


def test_traces_have_the_exit_states_of_drafted_rows(target_dir: Path) -> None:
    traces_by_name: dict[str, Trace] = {}
    for name, drafter in (("drafted", kangaroo(target_dir, 2)), ("plain", None)):
        traces: list[Trace] = []
        drafter = drafter or kangaroo(target_dir, 2)
        with running(target_dir, drafter=drafter, traces=traces) as client:
            client.engine.set_speculation(name == "drafted")
            client.submit("r", prompts([9], seed=4)[0], 24, ignore_eos=True, capture=True)
            client.wait()
        (traces_by_name[name],) = (decode(encode(trace)) for trace in traces)
    assert (traces_by_name["drafted"].drafted.numpy() >= 0).sum() > 10
    for name in ("completion_ids", "target_ids"):
        assert (
            getattr(traces_by_name["drafted"], name).numpy() == getattr(traces_by_name["plain"], name).numpy()
        ).all()
    drafted_states, plain_states = (trace.hidden for trace in (traces_by_name["drafted"], traces_by_name["plain"]))
    assert (drafted_states.numpy() == plain_states.numpy()).all()
