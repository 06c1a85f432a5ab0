"""Drafts of many sequences verified in one call, where a CPU has the target's logits.

Candidates that were chosen are looked up in what is drawn from the target, as ``naive`` does; a last child that was
drawn from a distribution of few tokens is verified as ``greedy_multidraft`` does.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from osd.runtime.native import kernels
from osd.verification.sampling import SamplingParams

_LEAST = -87.0
"""The logarithm of a probability, in those of the largest, below which float32 has none."""


class Drawing(NamedTuple):
    """A draft that is looked up in what is drawn from the target, whose logits after its root are those of ``row``.

    Those after its nodes follow. The token at depth d is drawn by the number ``first`` + d of ``Purpose.BONUS`` in the
    round ``step`` of the ``seed``.
    """

    row: int
    tokens: Sequence[int]
    parents: Sequence[int]
    settings: SamplingParams
    seed: int
    step: int
    first: int


class LastDrawn(NamedTuple):
    """What last children were drawn from, off the children chosen before them: an entry a root and an entry a node.

    Those of one sequence stand behind those of the one before. ``child`` is the number of the node that was drawn, -1
    where none was; ``ids`` are ``KEPT`` tokens an entry and ``q`` their probabilities, 0 where there are none.
    """

    child: array[Any]
    ids: array[Any]
    q: array[Any]


class _Drafted(ctypes.Structure):
    _fields_ = [("child", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("q", ctypes.c_void_p)]


def softmaxes(settings: SamplingParams) -> bool:
    """Whether these settings make softmaxes at a temperature, of which min-p at most takes something."""
    return settings.temperature > 0 and settings.top_k == 0 and settings.top_p >= 1


def readable(logits: Tensor) -> bool:
    """Whether ``follow_draws`` can read these logits."""
    return (
        logits.device.type == "cpu"
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and kernels() is not None
    )


def follow_draws(
    logits: Tensor, drawings: Sequence[Drawing], drawn: LastDrawn | None = None
) -> list[tuple[list[int], int]]:
    """The nodes of each draft that are kept, and the token after them: without ``drawn`` what ``Naive`` says of them.

    Args:
        logits: [R, vocabulary] float32 on a CPU, contiguous.
        drawings: with settings that make softmaxes.
        drawn: of the drafts in this order.

    Raises:
        ValueError: the logits are not numbers.
        MemoryError: there is no room for their sums.
    """
    library = kernels()
    assert library is not None  # noqa: S101  else they are not readable
    count, nodes = len(drawings), sum(len(one.tokens) for one in drawings)
    keys = array("q", (key for one in drawings for key in (one.row, len(one.tokens), one.seed, one.step, one.first)))
    tokens = array("q", [token for one in drawings for token in one.tokens])
    parents = array("q", [parent for one in drawings for parent in one.parents])
    scales = array("f", [1 / one.settings.temperature for one in drawings])
    least = torch.tensor([one.settings.min_p for one in drawings]).log().clamp(min=_LEAST)
    path, accepted, following = array("q", [0] * nodes), array("q", [0] * count), array("q", [0] * count)
    last = None if drawn is None else ctypes.byref(_Drafted(*map(_at, drawn)))
    failed = library.osd_follow_draws(
        logits.data_ptr(), logits.shape[1], count, _at(keys), last, _at(tokens), _at(parents), _at(scales),
        least.data_ptr(), _at(path), _at(accepted), _at(following), torch.get_num_threads(),
    )  # fmt: skip
    if failed == 1:
        raise MemoryError("no memory to draw tokens")
    if failed:
        raise ValueError("the target's logits are not numbers")
    found, at = [], 0
    for one, size, token in zip(drawings, accepted, following, strict=True):
        found.append((path[at : at + size].tolist(), token))
        at += len(one.tokens)
    return found


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
