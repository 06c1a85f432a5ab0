"""Verification of the draft trees of a decoding step: one entry, which picks the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from osd.runtime.device import sent
from osd.runtime.native import kernels, readable
from osd.verification.base import Rule, Verdict, Walk, follow
from osd.verification.descent import Naive
from osd.verification.distributions import Probabilities
from osd.verification.draws import Accepted, Drafts, follow_draws, softmaxes
from osd.verification.noise import Noise, Purpose
from osd.verification.sampling import SamplingBatch, SamplingParams, most_probable
from osd.verification.tree import DraftBatch


@dataclass(frozen=True)
class Undecided:
    """Result of a verification that may still be on the device.

    ``known`` paths need no reading. The sequences ``compared`` follow ``walk`` through ``tokens``, one token for each
    of their rows. ``verdicts`` decide about their sequences.
    """

    drafts: Drafts
    known: dict[int, Accepted] = field(default_factory=dict)
    compared: Sequence[int] = ()
    tokens: Tensor | None = None
    walk: Walk = follow
    verdicts: Sequence[tuple[Sequence[int], Verdict]] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The int64 tensors that ``decide`` reads."""
        tokens = [] if self.tokens is None else [self.tokens]
        verdicts = [part for _, v in self.verdicts for part in (v.path, v.accepted, v.token)]
        draft = self.drafts.draft if self.drafts.pending else None
        return [*tokens, *verdicts, *(() if draft is None else (draft.tokens, draft.sizes))]

    def decide(self, read: Sequence[Any]) -> list[tuple[list[int], list[int], int]]:
        """The tokens of each draft, its accepted nodes and the token that follows them.

        ``read`` holds the values of ``tensors`` as nested lists.
        """
        numbers, trees, paths = iter(read), self.drafts.trees, dict(self.known)
        if self.drafts.pending:
            chains = zip(*read[-2:], trees, strict=True)
            trees = [(tokens[:size], parents[:size]) for tokens, size, (_, parents) in chains]
        if self.tokens is not None:
            after, rows = iter(next(numbers)), self.drafts.rows
            for b in self.compared:
                tokens, parents = trees[b]
                paths[b] = self.walk(tokens, parents, list(islice(after, rows[b]))[: 1 + len(tokens)])
        for sequences, _ in self.verdicts:
            for b, path, accepted, token in zip(sequences, *islice(numbers, 3), strict=True):
                paths[b] = path[:accepted], token
        return [(tokens, *paths[b]) for b, (tokens, _) in enumerate(trees)]


def verify(drafts: Drafts, logits: Callable[[], Tensor], best: Tensor | None = None) -> Undecided:
    """Decide which drafted tokens the target keeps, without waiting for a device.

    - Greedy drafts are compared with the most probable tokens.
    - Drafts of repeatable requests and of the rule ``naive`` are compared with tokens drawn from p, which is lossless
      for every draft: by the C kernel where it reads the logits and the settings make softmaxes, else in PyTorch.
    - The rule verifies all other drafts.

    A CPU computes p no further than the accepted path; another device computes all rows.

    Args:
        drafts: of B sequences.
        logits: returns the target's logits [R, V] with penalties: of each sequence after the root and after each node.
        best: the most probable tokens [R] where they are known, for greedy drafts.
    """
    every, known = range(len(drafts.trees)), {}
    if drafts.settings[0].temperature == 0:
        best = most_probable(logits()) if best is None else best
        return Undecided(drafts, compared=every, tokens=best, walk=drafts.walk)
    scores = logits()
    on_host = scores.device.type == "cpu" and not drafts.pending
    compared = [b for b in every if isinstance(drafts.rule, Naive) or drafts.settings[b].repeatable]
    judged = sorted({*every}.difference(compared))
    if on_host and readable(scores):
        known = follow_draws(scores, drafts, [b for b in compared if softmaxes(drafts.settings[b])])
        compared = [b for b in compared if b not in known]
    if len(known) == len(every):
        return Undecided(drafts, known)
    target = _Target(drafts, scores)
    tokens = target.draw(compared) if compared and not on_host else None
    parts = [(Naive(), compared if on_host else ()), (drafts.rule, judged)]
    verdicts = [(sequences, target.judge(rule, sequences)) for rule, sequences in parts if sequences]
    return Undecided(drafts, known, compared, tokens, verdicts=verdicts)


def follows_last_drawn(rule: Rule, settings: Sequence[SamplingParams], device: torch.device) -> bool:
    """Whether ``verify`` makes use of ``Drafts.last_drawn``: the C kernel then verifies the drafts of all sequences."""
    kernel = device.type == "cpu" and kernels() is not None
    return kernel and isinstance(rule, Naive) and all(softmaxes(one) and not one.repeatable for one in settings)


class _Target:
    """Distributions of the target after the nodes of some drafts, and the noise of their verification."""

    def __init__(self, drafts: Drafts, logits: Tensor) -> None:
        rows, self.device, self.drafts = drafts.rows, logits.device, drafts
        steps, self.first = zip(*drafts.keys, strict=True)
        self.noise = Noise.of_seeds([settings.seed for settings in drafts.settings], steps, self.device)
        begins, widest = accumulate(rows, initial=0), range(max(rows))
        places = [first + min(i, count - 1) for first, count in zip(begins, rows, strict=False) for i in widest]
        owners = sent([b for b, count in enumerate(rows) for _ in range(count)], self.device)
        sampling = SamplingBatch.of(drafts.settings, self.device)
        self.p = Probabilities(logits, owners, sent(places, self.device).view(len(rows), -1), sampling)

    def judge(self, rule: Rule, sequences: Sequence[int]) -> Verdict:
        """The verdict of a rule on the drafts of some sequences; ``naive`` draws by their keys."""
        draft = self.drafts.draft or DraftBatch.chosen(self.drafts.trees, self.device)
        chosen = sent(sequences, self.device)
        given = draft.select(chosen), self.p.select(chosen), self.noise.rows(chosen)
        if isinstance(rule, Naive):
            return rule.verify(*given, sent([self.first[b] for b in sequences], self.device))
        return rule.verify(*given)

    def draw(self, sequences: Sequence[int]) -> Tensor:
        """[n] a token from p after the root and after each node of some sequences, as ``Naive`` draws it."""
        owners: list[int] = []
        entries: list[int] = []
        index: list[int] = []
        for b in sequences:
            depths = [self.first[b]]
            for parent in self.drafts.trees[b][1]:
                depths.append(1 + depths[1 + parent])
            owners += [b] * len(depths)
            entries += range(len(depths))
            index += depths
        rows, nodes, depth = (sent(part, self.device) for part in (owners, entries, index))
        return self.noise.rows(rows).pick(self.p[rows, nodes], Purpose.BONUS, depth)
