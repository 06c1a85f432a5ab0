"""Logit bias, penalties on tokens that were used before, ends held back and masks, along each draft path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from osd.verification.sampling import SamplingParams


class Constraint(Protocol):
    """What one sequence may say, as a function of the tokens that it goes on with."""

    @property
    def vocabulary(self) -> int:
        """Tokens that a mask tells about."""
        ...

    def allowed(self, path: tuple[int, ...]) -> np.ndarray | None:
        """[vocabulary] bool, which tokens may come after a path of a draft; None where the path itself may not."""
        ...


def forbid(
    logits: Tensor,
    rows: Sequence[int],
    constraints: Sequence[Constraint | None],
    paths: Sequence[Sequence[int]],
    support: Tensor | None,
) -> None:
    """Take from some ``rows`` of logits [R, V], in place, what their constraints do not allow after their paths.

    Paths have the last token first, then -1. With ``support`` [V] the columns are these tokens. A row of which nothing
    would be left stays whole: behind a token that p excludes, or where a drafter knows none of those allowed. Whatever
    is drawn there is rejected, because p is 0 for it or for what stands above it.
    """
    columns = None if support is None else support.cpu().numpy()
    for row, constraint, path in zip(rows, constraints, paths, strict=True):
        if constraint is None:
            continue
        mask = constraint.allowed(tuple(token for token in reversed(path) if token >= 0))
        if mask is None:
            continue
        forbidden = ~(mask if columns is None else mask[columns])
        if forbidden.all():
            continue
        if logits.device.type == "cpu":
            # NumPy does it in one thread: a row is too little for several.
            logits[row].numpy()[forbidden] = -math.inf
        else:
            logits[row].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -math.inf)


def penalised(settings: SamplingParams) -> bool:
    """Whether a request changes logits at all: without any such request no ``Penalties`` are needed."""
    return bool(
        settings.presence_penalty
        or settings.frequency_penalty
        or settings.repetition_penalty != 1
        or settings.logit_bias
    )


@dataclass(frozen=True)
class Withheld:
    """Token ids that must not be among the next ``early`` tokens of a sequence."""

    ids: frozenset[int]
    early: int


class Penalties:
    """The bias and penalties of B sequences in one round, what is withheld from them, and what they may say at all.

    The logits after a node of a draft are those that plain decoding would have there: the tokens on the path to the
    node count as output beside what is committed. Target and drafter are treated alike, so q stays close to p.

    The order is vLLM's: bias, repetition, frequency and presence penalty, then what ``SamplingBatch`` does. What is
    withheld or not allowed by a constraint has no probability whatever the others say; where a constraint allows
    nothing but what is withheld, it stands. The repetition penalty is that of Keskar et al., "CTRL", 2019 (arXiv
    1909.05858); the other two are OpenAI's.
    """

    def __init__(
        self,
        settings: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        withheld: Sequence[Withheld | None],
        device: torch.device | str = "cpu",
        constraints: Sequence[Constraint | None] = (),
    ) -> None:
        """Count what each of the B sequences has used: its prompt's token ids, and what was generated and committed."""
        self.constraints = held = constraints or [None] * len(settings)
        chosen = [index for index, s in enumerate(settings) if penalised(s) or withheld[index] or held[index]]
        self._place = torch.full((len(settings),), -1, device=device)  # [B] among the S sequences chosen
        self._place[chosen] = torch.arange(len(chosen), device=device)
        ids, facts, rates = [], [], []
        for index in chosen:
            s = settings[index]
            # Only the repetition penalty asks for the prompt.
            prompt, output = prompts[index] if s.repetition_penalty != 1 else (), outputs[index]
            found = _facts(s.logit_bias, prompt, output if penalised(s) else ())
            ids.append(found[0])
            facts.append(found[1])
            rates.append((s.repetition_penalty, s.frequency_penalty, s.presence_penalty))
        self._ids = pad_sequence(ids, batch_first=True, padding_value=-1).to(device)  # [S, L]
        self._facts = pad_sequence(facts, batch_first=True).to(device)  # [S, L, 3]
        self._rates = torch.tensor(rates, dtype=torch.float64, device=device)  # [S, 3]
        ends = [torch.tensor(sorted(one.ids) if (one := withheld[index]) else []).long() for index in chosen]
        self._ends = pad_sequence(ends, batch_first=True, padding_value=-1).to(device)  # [S, E]
        early = [one.early if (one := withheld[index]) else 0 for index in chosen]
        self._early = torch.tensor(early, device=device)  # [S]
        self._constraints = [held[index] for index in chosen]
        self._rated = any(penalised(settings[index]) for index in chosen)

    def adjust(
        self,
        logits: Tensor,
        rows: Tensor,
        nodes: Tensor,
        tokens: Tensor,
        parents: Tensor,
        support: Tensor | None = None,
    ) -> Tensor:
        """The logits with bias and penalties; other sequences' rows stay as they are.

        ``logits`` are [R, V] of the target or [R, Vd] of a drafter whose tokens are ``support`` [Vd]; they are not
        written to. ``rows`` [R] are their sequences, and ``nodes`` [R] the nodes that they follow, or ROOT, of draft
        trees with target ids ``tokens`` and ``parents`` [B, N].
        """
        mine = self._place[rows]
        at = (mine >= 0).nonzero().squeeze(-1)
        if not len(at):
            return logits
        mine, path = mine[at], path_tokens(tokens, parents, rows[at], nodes[at])
        changed = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        if self._rated:
            self._penalise(changed, at, mine, path, support)
        if any(self._constraints):
            constraints = [self._constraints[one] for one in mine.tolist()]
            forbid(changed, at.tolist(), constraints, path.tolist(), support)
        self._withhold(changed, at, mine, (path >= 0).sum(1), support)
        return changed

    def _penalise(self, changed: Tensor, at: Tensor, mine: Tensor, path: Tensor, support: Tensor | None) -> None:
        """Change rows ``at`` [A] of sequences ``mine`` [A], after the tokens of ``path`` [A, longest]."""
        committed, facts = self._ids[mine], self._facts[mine]
        drafted = path >= 0
        same = (path[:, :, None] == committed[:, None, :]) & drafted[:, :, None]
        again = (path[:, :, None] == path[:, None, :]).tril(-1).any(-1)
        # A token of the path that is committed too, or twice on the path, has one entry only.
        valid = torch.cat([committed >= 0, drafted & ~same.any(-1) & ~again], 1)
        ids = torch.cat([committed, path], 1)  # [A, L + longest path]
        on_path = (ids[:, :, None] == path[:, None, :]).sum(-1)
        columns = ids
        if support is not None:
            valid, columns = _columns(support, ids, valid)
        counts, prompt, bias = torch.cat([facts, facts.new_zeros(*path.shape, 3)], 1).unbind(-1)
        counts = counts + on_path
        repetition, frequency, presence = self._rates[mine][:, :, None].unbind(1)
        place = at[:, None] * changed.shape[-1] + columns.masked_fill(~valid, 0)
        before = changed.take(place).double()
        scores = before + bias
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where((counts > 0) | (prompt > 0), repeated, scores)
        scores = scores - frequency * counts - presence * (counts > 0)
        change = (scores - before).masked_fill(~valid | before.isneginf(), 0.0).to(changed.dtype)
        changed.put_(place, change, accumulate=True)

    def _withhold(self, changed: Tensor, at: Tensor, mine: Tensor, depths: Tensor, support: Tensor | None) -> None:
        """Take the ends from rows ``at`` [A] of sequences ``mine`` [A] that are too early, ``depths`` [A] along."""
        ends = self._ends[mine]
        ending = (ends >= 0) & (depths < self._early[mine])[:, None]
        if support is not None:
            ending, ends = _columns(support, ends, ending)
        rows, which = ending.nonzero(as_tuple=True)
        bound = [row for row in set(rows.tolist()) if self._constraints[int(mine[row])]]
        allowed = {row: changed[at[row]].clone() for row in bound}
        changed[at[rows], ends[rows, which]] = -math.inf
        for row, whole in allowed.items():
            if bool(changed[at[row]].isneginf().all()):
                changed[at[row]] = whole


def _columns(support: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Which of the ``valid`` ids a drafter knows whose tokens are ``support``, and their columns."""
    known, order = support.sort()
    place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    return valid & (known[place] == ids), order[place]


def _facts(bias: tuple[tuple[int, float], ...], prompt: Sequence[int], output: Sequence[int]) -> tuple[Tensor, Tensor]:
    """[L] the token ids that something is known about, and [L, 3]: counts in the output, 1 if in the prompt, bias."""
    used, seen = torch.tensor(output, dtype=torch.int64), torch.tensor(prompt, dtype=torch.int64)
    biased = torch.tensor([token for token, _ in bias], dtype=torch.int64)
    ids = torch.cat([used, seen, biased]).unique()
    facts = torch.zeros(len(ids), 3, dtype=torch.float64)
    facts[:, 0] = torch.bincount(torch.searchsorted(ids, used), minlength=len(ids))
    facts[torch.searchsorted(ids, seen), 1] = 1.0
    facts[torch.searchsorted(ids, biased), 2] = torch.tensor([value for _, value in bias], dtype=torch.float64)
    return ids, facts


def path_tokens(tokens: Tensor, parents: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
    """[R, longest] the tokens on the paths to ``nodes`` [R] of trees ``rows`` [R], the last one first, then -1.

    ``tokens`` and ``parents`` are [B, N], with ROOT above a root's child.
    """
    found = []
    while bool((nodes >= 0).any()):
        above = nodes.clamp(min=0)
        found.append(tokens[rows, above].masked_fill(nodes < 0, -1))
        nodes = torch.where(nodes < 0, nodes, parents[rows, above])
    return torch.stack(found, 1) if found else tokens.new_empty(len(rows), 0)
