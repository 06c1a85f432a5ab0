"""TokenSelect: the target as its own drafter, which reads only selected tokens of a long context.

Wu et al., "TokenSelect", EMNLP 2025 (arXiv 2411.02886); see ``osd.runtime.attention.selection``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from osd.config import TokenSelectSettings
from osd.drafting.autoregressive import AutoregressiveSession
from osd.drafting.base import Drafter, DrafterError, Needs, required
from osd.drafting.rows import append_row
from osd.drafting.session import ANONYMOUS, Origin, Runtime
from osd.drafting.shapes import check_sizes
from osd.runtime.attention.selection import SelectionSizes, TokenSelection
from osd.runtime.batch import RowBuilder
from osd.runtime.causal_lm import attention_of, inverse_frequencies
from osd.target.model import check_rotary
from osd.verification.tree import TreeBuilder


class TokenSelect(Drafter):
    """All layers of the target over its keys and values; each layer reads the tokens that it selects.

    Verification reads every token. Drafted tokens are at the places where the target verifies them.
    """

    kind: ClassVar[str] = "token_select"

    def __init__(self, sizes: SelectionSizes, layers: int) -> None:
        """Draft with all ``layers`` of a target; raise DrafterError for impossible sizes."""
        check_sizes(top=sizes.top, local=sizes.local)
        if sizes.initial != 0:
            check_sizes(initial=sizes.initial)
        if type(sizes.threshold) not in (int, float) or not 0 <= sizes.threshold <= 1:
            raise DrafterError(f"threshold is {sizes.threshold!r}, but must be a number from 0 to 1")
        self._sizes, self.needs = sizes, Needs(layers=range(layers))

    @classmethod
    def initial(cls, settings: TokenSelectSettings, target_dir: Path, cache: Path) -> Self:
        sizes = SelectionSizes(settings.initial, settings.top, settings.local, settings.threshold)
        return cls(sizes, _rotary_layers(target_dir))

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        sizes = {name: value for name, value in config.items() if name != "kind"}
        return cls(SelectionSizes(**sizes), _rotary_layers(target_dir))

    def config(self) -> dict[str, Any]:
        sizes = asdict(self._sizes)
        return {"kind": self.kind} | {name: sizes[name] for name in ("initial", "top", "local", "threshold")}

    def session(self, runtime: Runtime) -> TokenSelectSession:
        return TokenSelectSession(self._sizes, runtime)


def _rotary_layers(directory: Path) -> int:
    """Return the number of the target's layers; raise DrafterError if it has no rotary positions."""
    try:
        return check_rotary(directory)
    except ValueError as error:
        raise DrafterError(f"drafter.kind token_select needs a target with rotary positions, and {error}") from None


class TokenSelectSession(AutoregressiveSession):
    """Session without weights of its own.

    The last committed token and the nodes of a draft run at their places in the target's slots. After the first layer
    their keys and values differ slightly from the target's; verification overwrites them before any other use.
    """

    source = "token_select"

    def __init__(self, sizes: SelectionSizes, runtime: Runtime) -> None:
        """Draft with the runtime's target, which has rotary positions."""
        super().__init__({}, runtime)
        self._target = target = required(self.source, "its target", runtime.target)
        try:
            inverse = inverse_frequencies(target.model)
        except ValueError as error:
            raise DrafterError(f"a token_select drafter needs a target with rotary positions, and {error}") from None
        self.selection = TokenSelection(sizes, inverse, attention_of(target.model)["heads"], target.cache)

    def open(self, slot: int, token: int, origin: Origin = ANONYMOUS) -> None:
        super().open(slot, token, origin)
        self.selection.forget(slot)

    @torch.inference_mode()
    def expand(self, slots: Sequence[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        ids, parents = builder.tokens.tolist(), builder.parents.tolist()
        expanded = list(zip(rows.tolist(), nodes.tolist(), strict=True))
        order = sorted(range(len(expanded)), key=expanded.__getitem__)  # the rows of a slot are neighbours
        packed, wanted = RowBuilder(), torch.empty(len(expanded), dtype=torch.int64)
        for number in order:
            row, node = expanded[number]
            slot, wanted[number] = slots[row], len(packed)
            token = self._last[slot] if node < 0 else ids[row][node]
            append_row(packed, slot, self._target.cache.length[slot], node, token, parents[row])
        logits = self._target.forward(replace(packed.build(), selection=self.selection), wanted).logits
        self.states = logits.new_empty(len(expanded), 0)
        return logits
