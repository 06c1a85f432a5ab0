"""Draft trees to verify, and the C kernel that compares them with tokens drawn from the target's logits on a CPU.

Candidates that were chosen are looked up in what is drawn from the target, as ``naive`` does; a last child that was
drawn from a distribution of few tokens is verified as ``greedy_multidraft`` does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from osd.runtime.native import kernels
from osd.verification.base import Rule, Walk, follow
from osd.verification.sampling import SamplingParams
from osd.verification.tree import DraftBatch

_LEAST = -87.0
"""The logarithm of a probability, in those of the largest, below which float32 has none."""

Accepted = tuple[list[int], int]
"""The accepted nodes of a draft, and the token that follows them."""


class LastDrawn(NamedTuple):
    """What last children were drawn from, off the children chosen before them: an entry a root and an entry a node.

    Those of one sequence stand behind those of the one before. ``child`` is the number of the node that was drawn, -1
    where none was; ``ids`` are ``KEPT`` tokens an entry and ``q`` their probabilities, 0 where there are none.
    """

    child: array[Any]
    ids: array[Any]
    q: array[Any]


@dataclass(frozen=True)
class Drafts:
    """Draft trees of B sequences, which are all greedy or all sampled, and how to verify them.

    Attributes:
        trees: tokens and parents of the nodes of each sequence.
        settings: sampling settings of each sequence.
        steps: number of the decoding step within each request.
        lengths: tokens of each text before this step.
        rule: verifies sampled drafts.
        walk: verifies greedy drafts.
        draft: the same trees with their q; None where tokens were chosen on the host.
        last_drawn: of all sequences, where ``verify.follows_last_drawn`` allows to draw last children.
        pending: only the device knows the tokens and sizes of ``draft``, which are chains. ``trees`` have as many
            nodes as there may be.
    """

    trees: Sequence[tuple[list[int], list[int]]]
    settings: Sequence[SamplingParams]
    steps: Sequence[int]
    lengths: Sequence[int]
    rule: Rule
    walk: Walk = follow
    draft: DraftBatch | None = None
    last_drawn: LastDrawn | None = None
    pending: bool = False

    @property
    def rows(self) -> list[int]:
        """Rows of p of each sequence: one after the root and one after each node."""
        return [1 + len(tokens) for tokens, _ in self.trees]

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Step and first index of each sequence's draws.

        A repeatable request draws by the positions of its tokens alone: where its decoding steps end changes no token.
        """
        sequences = zip(self.settings, self.steps, self.lengths, strict=True)
        return [(0, length) if settings.repeatable else (step, 0) for settings, step, length in sequences]


class _Drafted(ctypes.Structure):
    _fields_ = [("child", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("q", ctypes.c_void_p)]


def softmaxes(settings: SamplingParams) -> bool:
    """Whether these settings make softmaxes at a temperature, of which min-p at most takes something."""
    return settings.temperature > 0 and settings.top_k == 0 and settings.top_p >= 1


def follow_draws(logits: Tensor, drafts: Drafts, sequences: Sequence[int]) -> dict[int, Accepted]:
    """Paths of some sequences: those that ``Naive`` accepts, but for last children that were drawn.

    Args:
        logits: [R, vocabulary] float32 on a CPU, contiguous, after the roots and nodes of all drafts.
        drafts: of all sequences.
        sequences: those with settings that make softmaxes.

    Raises:
        ValueError: the logits are not numbers.
        MemoryError: there is no room for their sums.
    """
    if not sequences:
        return {}
    library = kernels()
    assert library is not None  # noqa: S101  else they are not readable
    trees, settings, keys = [drafts.trees[b] for b in sequences], [drafts.settings[b] for b in sequences], drafts.keys
    first, drawings = list(accumulate(drafts.rows, initial=0)), array("q")
    for b in sequences:
        drawings.extend((first[b], len(drafts.trees[b][0]), drafts.settings[b].seed, *keys[b]))
    tokens = array("q", [token for tokens, _ in trees for token in tokens])
    parents = array("q", [parent for _, parents in trees for parent in parents])
    scales = array("f", [1 / one.temperature for one in settings])
    least = torch.tensor([one.min_p for one in settings]).log().clamp(min=_LEAST)
    count = len(trees)
    path, accepted, following = array("q", [0] * len(tokens)), array("q", [0] * count), array("q", [0] * count)
    last = None if drafts.last_drawn is None else ctypes.byref(_Drafted(*map(_at, drafts.last_drawn)))
    failed = library.osd_follow_draws(
        logits.data_ptr(), logits.shape[1], count, _at(drawings), last, _at(tokens), _at(parents), _at(scales),
        least.data_ptr(), _at(path), _at(accepted), _at(following), torch.get_num_threads(),
    )  # fmt: skip
    if failed == 1:
        raise MemoryError("no memory to draw tokens")
    if failed:
        raise ValueError("the target's logits are not numbers")
    begins = accumulate((len(tokens) for tokens, _ in trees), initial=0)
    paths = zip(sequences, begins, accepted, following, strict=False)
    return {b: (path[begin : begin + size].tolist(), token) for b, begin, size, token in paths}


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
