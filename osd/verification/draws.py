"""Batch of draft trees to verify, and the C kernel that verifies trees by draws from the target's logits on a CPU.

The kernel compares chosen children with a token drawn from the target, as the rule ``naive`` does. It verifies a last
child that was drawn from a sparse distribution as the rule ``greedy_multidraft`` does.
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
"""Least logarithm of a probability relative to the largest; smaller probabilities are 0 in float32."""

AcceptedPath = tuple[list[int], int]
"""The accepted nodes of a draft, and the token after them."""


class DrawnChildren(NamedTuple):
    """Drawn last children and the distributions that they were drawn from, without the children chosen before them.

    There is an entry for the root of each sequence and then for each of its nodes, sequence by sequence.

    Attributes:
        child: number of the drawn child within its sequence, -1 for none.
        ids: ``KEPT`` tokens per entry.
        q: their probabilities, 0 where there is no token.
    """

    child: array[Any]
    ids: array[Any]
    q: array[Any]


@dataclass(frozen=True)
class VerificationBatch:
    """Draft trees of B sequences, either all greedy or all sampled, with their verification rule.

    Attributes:
        trees: tokens and parents of the nodes of each sequence.
        settings: sampling settings of each sequence.
        steps: number of the decoding step within each request.
        lengths: tokens of each text before this step.
        rule: for sampled drafts.
        walk: for greedy drafts.
        draft: the same trees with their q; None if the host chose the tokens.
        drawn_children: of all sequences, if ``verify.uses_drawn_children`` allows draws of last children.
        pending: whether only the device knows the tokens and sizes of ``draft``. These drafts are chains, and ``trees``
            have the maximum number of nodes.
    """

    trees: Sequence[tuple[list[int], list[int]]]
    settings: Sequence[SamplingParams]
    steps: Sequence[int]
    lengths: Sequence[int]
    rule: Rule
    walk: Walk = follow
    draft: DraftBatch | None = None
    drawn_children: DrawnChildren | None = None
    pending: bool = False

    @property
    def rows(self) -> list[int]:
        """Number of rows of p per sequence: 1 for the root and 1 for each node."""
        return [1 + len(tokens) for tokens, _ in self.trees]

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Step and first index of each sequence's draws.

        The draws of a repeatable request are keyed by the positions of its tokens only, so that the ends of decoding
        steps do not change the output.
        """
        sequences = zip(self.settings, self.steps, self.lengths, strict=True)
        return [(0, length) if settings.repeatable else (step, 0) for settings, step, length in sequences]


class _Drafted(ctypes.Structure):
    _fields_ = [("child", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("q", ctypes.c_void_p)]


def is_softmax(settings: SamplingParams) -> bool:
    """Return whether the distributions are softmaxes at a temperature above 0, with no limit except min-p."""
    return settings.temperature > 0 and settings.top_k == 0 and settings.top_p >= 1


def follow_draws(logits: Tensor, drafts: VerificationBatch, sequences: Sequence[int]) -> dict[int, AcceptedPath]:
    """Return the accepted paths of some sequences: the paths that ``NaiveRule`` accepts, except at drawn last children.

    Args:
        logits: [R, vocabulary] float32 on a CPU, contiguous, after the roots and nodes of all drafts.
        drafts: of all sequences.
        sequences: indices of sequences whose settings satisfy ``is_softmax``.

    Raises:
        ValueError: the logits are not numbers.
        MemoryError: the allocation of their sums failed.
    """
    if not sequences:
        return {}
    library = kernels()
    assert library is not None  # noqa: S101  callers check readable(logits)
    trees, settings, keys = [drafts.trees[b] for b in sequences], [drafts.settings[b] for b in sequences], drafts.keys
    first, drawings = list(accumulate(drafts.rows, initial=0)), array("q")
    for b in sequences:
        drawings.extend((first[b], len(drafts.trees[b][0]), drafts.settings[b].seed, *keys[b]))
    tokens = array("q", [token for tokens, _ in trees for token in tokens])
    parents = array("q", [parent for _, parents in trees for parent in parents])
    scales = array("f", [1 / sampling.temperature for sampling in settings])
    least = torch.tensor([sampling.min_p for sampling in settings]).log().clamp(min=_LEAST)
    count = len(trees)
    path, accepted, following = array("q", [0] * len(tokens)), array("q", [0] * count), array("q", [0] * count)
    last = None if drafts.drawn_children is None else ctypes.byref(_Drafted(*map(_at, drafts.drawn_children)))
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
