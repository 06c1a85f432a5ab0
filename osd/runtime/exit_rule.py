"""Early exits from a forward: which rows may leave, which controller decides, and a forward up to the first exit taken.

In the layers that a row skips, its keys and values are computed from the state that it leaves with, so that later rows
find them: the "state copying" of Sun et al., ICSE 2024 (arXiv 2401.09964).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from osd.runtime.batch import PackedRows
from osd.runtime.decoder import Forward
from osd.runtime.exit_controller import EXIT, confident, odds


@dataclass(frozen=True)
class ExitRule:
    """Rows that may leave a forward early, and the rule for it.

    Behind an exit layer, row r leaves if its controller's most probable decision is EXIT, with a probability above
    ``above[r]``, and ``confirm`` agrees.

    Attributes:
        exits: numbers of layers behind which rows may leave, ascending, below the model's number of layers.
        controllers: [C, 3, hidden] float32 on the model's device.
        owners: [R] int32 on the host, the controller of each row.
        above: [R] float32 on the host; 1 for rows that never leave.
        confirm: final decision of the caller. It receives the numbers of the leaving rows in the whole forward, their
            states [n, hidden] and the number of layers they have passed; rows that it rejects continue.
    """

    exits: tuple[int, ...]
    controllers: Tensor
    owners: Tensor
    above: Tensor
    confirm: Callable[[Sequence[int], Tensor, int], Sequence[bool]]

    @property
    def any(self) -> bool:
        """Whether any row may leave."""
        return bool((self.above < 1).any())

    def select(self, rows: Tensor) -> ExitRule:
        """Return the rule of ``rows`` [n] only."""
        return replace(self, owners=self.owners[rows], above=self.above[rows])

    def leave(self, states: Tensor) -> list[int]:
        """Return the rows that leave with ``states`` [R, hidden] behind an exit."""
        left: list[int] = []
        may = (self.above < 1).nonzero().squeeze(-1)
        for owner in self.owners[may].unique().tolist():
            group = may[self.owners[may] == owner]
            logits = odds(states[group.to(states.device)].float(), self.controllers[owner])
            left += group[confident(logits, EXIT).cpu() > self.above[group]].tolist()
        return sorted(left)


@dataclass(frozen=True)
class PartialForward:
    """Forward that ended behind ``stop`` layers: at its last layer, or at an exit where the rows ``left`` may leave."""

    forward: Forward
    stop: int
    left: Sequence[int]


RunLayers = Callable[[PackedRows, Tensor, range, Tensor | None], Forward]
"""Forward of some layers, see ``osd.runtime.decoder.Decoder.forward``."""


def to_next_exit(
    run: RunLayers, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None, exit_rule: ExitRule
) -> PartialForward:
    """Run those of ``layers`` before the next exit, and find the rows that leave there."""
    stop = next((layer for layer in exit_rule.exits if layers.start < layer < layers.stop), layers.stop)
    forward = run(rows, wanted if stop == layers.stop else wanted[:0], range(layers.start, stop), states)
    left = [] if forward.states is None or stop not in exit_rule.exits else exit_rule.leave(forward.states)
    return PartialForward(forward, stop, left)
