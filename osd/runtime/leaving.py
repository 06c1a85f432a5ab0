"""Rows that may leave a forward early: which, by whose word, and a forward that ends where the first of them do.

The keys and values that a row has not got in the layers which it skips are made of the state that it leaves with, so
that later rows find them: the "state copying" of Sun et al., ICSE 2024 (arXiv 2401.09964).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.exit_controller import EXIT, confident, odds


@dataclass(frozen=True)
class Leaving:
    """Which rows may leave.

    Behind each of the layers ``exits``, which ascend and end before the model's last, row r leaves where controller
    ``owners[r]`` of ``controllers`` [C, 3, hidden] says EXIT as its first choice, more probably than ``above[r]``: 1
    for rows that never leave. ``owners`` [R] int32 and ``above`` [R] float32 are on the host, the controllers float32
    where the model is. Whoever reads the rows has the last word: given their numbers in the whole forward, the states
    [n, hidden] that they are about to leave with and behind how many layers, ``confirm`` says which do; the others go
    on.
    """

    exits: tuple[int, ...]
    controllers: Tensor
    owners: Tensor
    above: Tensor
    confirm: Callable[[Sequence[int], Tensor, int], Sequence[bool]]

    @property
    def any(self) -> bool:
        """Whether there is a row that may."""
        return bool((self.above < 1).any())

    def select(self, rows: Tensor) -> Leaving:
        """Of ``rows`` [n] only."""
        return replace(self, owners=self.owners[rows], above=self.above[rows])

    def leave(self, states: Tensor) -> list[int]:
        """The rows that leave with ``states`` [R, hidden] behind an exit."""
        left: list[int] = []
        may = (self.above < 1).nonzero().squeeze(-1)
        for owner in self.owners[may].unique().tolist():
            mine = may[self.owners[may] == owner]
            said = odds(states[mine.to(states.device)].float(), self.controllers[owner])
            left += mine[confident(said, EXIT).cpu() > self.above[mine]].tolist()
        return sorted(left)


@dataclass(frozen=True)
class Passed:
    """A forward that ended behind ``stop`` layers: where it was to, or at an exit where the rows ``left`` may leave."""

    forward: Forward
    stop: int
    left: Sequence[int]


Run = Callable[[PackedRows, Tensor, range, Tensor | None], Forward]
"""A forward of some layers, see ``osd.runtime.decoder.Decoder.forward``."""


def to_next_exit(
    run: Run, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None, leaving: Leaving
) -> Passed:
    """Run those of ``layers`` that come before the next exit, and see who leaves there."""
    stop = next((layer for layer in leaving.exits if layers.start < layer < layers.stop), layers.stop)
    forward = run(rows, wanted if stop == layers.stop else wanted[:0], range(layers.start, stop), states)
    left = [] if forward.states is None or stop not in leaving.exits else leaving.leave(forward.states)
    return Passed(forward, stop, left)
