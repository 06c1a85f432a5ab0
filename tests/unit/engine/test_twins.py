"""Requests that share a prompt share the reading of it, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from osd.capture.trace import Trace
from osd.engine.request import Sampling
from osd.target.kv_cache import PackedRows
from osd.target.model import Forward
from tests.unit.engine.harness import Client, Oracle, prompts, running

OTHER, PROMPT = prompts([3, 40], seed=8)
CHUNK = 16  # tokens, so that the prompt is read in three rounds
KINDS = ["none", "eagle", "language_model"]


class Watched:
    """The engine's forwards: how many rows each has, and a hand that holds some of them back."""

    def __init__(self, client: Client, held: tuple[int, ...]) -> None:
        self.rows: list[int] = []
        self._arrived = {number: threading.Event() for number in held}
        self._go = {number: threading.Event() for number in held}
        client.submit("first", OTHER, 1)
        client.wait()  # forwards that are only timed are over
        forward = client.engine.target.forward

        def watched(rows: PackedRows, wanted: Tensor) -> Forward:
            number = len(self.rows)
            self.rows.append(len(rows.token_ids))
            if number in self._go:
                self._arrived[number].set()
                assert self._go[number].wait(60)
            return forward(rows, wanted)

        client.engine.target.forward = watched

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        assert self._arrived[number].wait(60)
        try:
            yield
        finally:
            self._go[number].set()


@pytest.mark.parametrize("kind", KINDS)
def test_twins_are_read_once_and_answered_as_each_alone(target_dir: Path, oracle: Oracle, kind: str) -> None:
    traces: list[Trace] = []
    with running(target_dir, kind, chunk=CHUNK, traces=traces) as client:
        watched = Watched(client, (0,))
        client.submit("other", OTHER, 1)
        with watched.holding(0):
            for name in "abc":
                client.submit(name, PROMPT, 12, ignore_eos=True, capture=True)
        results = client.wait()
        client.submit("alone", PROMPT, 12, ignore_eos=True, capture=True)
        alone = client.wait()["alone"]
    assert sum(watched.rows[1:4]) == len(PROMPT)
    for name in "abc":
        assert results[name].tokens == alone.tokens == oracle.greedy(PROMPT, 12)
        assert results[name].counts == alone.counts, "their drafters know the prompt as well"
    mine = [trace for trace in traces if len(trace.prompt_ids.numpy()) == len(PROMPT)]
    assert len(mine) == 4
    for trace in mine:
        assert (trace.hidden is not None) == (kind == "eagle")
        if trace.hidden is not None and mine[0].hidden is not None:
            assert (trace.hidden.numpy() == mine[0].hidden.numpy()).all()


def test_twins_draw_for_themselves(target_dir: Path) -> None:
    with running(target_dir, "eagle", chunk=CHUNK) as client:
        watched = Watched(client, (0,))
        client.submit("other", OTHER, 1)
        with watched.holding(0):
            for seed in range(3):
                client.submit(str(seed), PROMPT, 12, Sampling(temperature=1.0, seed=seed), ignore_eos=True)
        together = [client.wait()[str(seed)].tokens for seed in range(3)]
        assert sum(watched.rows[1:4]) == len(PROMPT)
        for seed in range(3):
            client.submit(f"alone {seed}", PROMPT, 12, Sampling(temperature=1.0, seed=seed), ignore_eos=True)
            assert client.wait()[f"alone {seed}"].tokens == together[seed]
    assert len(set(map(tuple, together))) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_twins_go_on_when_the_one_that_reads_is_cancelled(target_dir: Path, oracle: Oracle, kind: str) -> None:
    with running(target_dir, kind, chunk=CHUNK) as client:
        watched = Watched(client, (0, 2))
        client.submit("other", OTHER, 1)
        with watched.holding(0):
            for name in "abc":
                client.submit(name, PROMPT, 12, ignore_eos=True)
        with watched.holding(2):
            client.engine.cancel("a")
        results = client.wait()
    assert sum(watched.rows[1:4]) == len(PROMPT)
    assert results["a"].finish == "cancelled"
    for name in "bc":
        assert results[name].tokens == oracle.greedy(PROMPT, 12)
