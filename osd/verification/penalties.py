"""Logit bias, penalties on used tokens, withheld end tokens and constraints, along each draft path."""

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


class TokenConstraint(Protocol):
    """Constraint on the tokens of a sequence, such as a grammar, as a function of its next tokens."""

    @property
    def vocabulary(self) -> int:
        """Length of the masks."""
        ...

    def allowed(self, path: tuple[int, ...]) -> np.ndarray | None:
        """Return [vocabulary] bool, the tokens allowed after a path of a draft; None if the path is not allowed."""
        ...


def forbid(
    logits: Tensor,
    rows: Sequence[int],
    constraints: Sequence[TokenConstraint | None],
    paths: Sequence[Sequence[int]],
    support: Tensor | None,
) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    A row without an allowed token is not changed. Such a row follows a token that is not allowed itself, or belongs to
    a drafter that knows no allowed token. A token drawn from it is rejected, because p is 0 for the token or for a node
    before it.

    Args:
        logits: [R, V].
        rows: indices of rows of ``logits``.
        constraints: of these rows.
        paths: of these rows, the newest token first, filled up with -1.
        support: [V], the token ids of the columns; None if columns are token ids.
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
            # NumPy uses a single thread, which is faster for so few numbers.
            logits[row].numpy()[forbidden] = -math.inf
        else:
            logits[row].masked_fill_(torch.from_numpy(forbidden).to(logits.device), -math.inf)


def changes_logits(settings: SamplingParams) -> bool:
    """Return whether settings have a bias or penalties, and so need ``Penalties``."""
    return bool(
        settings.presence_penalty
        or settings.frequency_penalty
        or settings.repetition_penalty != 1
        or settings.logit_bias
    )


@dataclass(frozen=True)
class WithheldTokens:
    """Token ids, such as end tokens, that are forbidden among the next ``early`` tokens of a sequence."""

    ids: frozenset[int]
    early: int


class Penalties:
    """Bias, penalties, withheld tokens and constraints of B sequences in a decoding step.

    The logits after a draft node are the logits of plain decoding after its path: the tokens of the path count as
    output. The logits of target and drafter are changed in the same way, so that q stays close to p.

    The order is vLLM's: bias, then repetition, frequency and presence penalty, then the steps of ``SamplingBatch``.
    Withheld and forbidden tokens have probability 0. If a constraint allows only withheld tokens, they are not
    withheld. The repetition penalty is from Keskar et al., "CTRL", 2019 (arXiv 1909.05858), the other two from OpenAI.
    """

    def __init__(
        self,
        settings: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        withheld: Sequence[WithheldTokens | None],
        device: torch.device | str = "cpu",
        constraints: Sequence[TokenConstraint | None] = (),
    ) -> None:
        """Count the used tokens of each of the B sequences.

        Args:
            settings: sampling settings.
            prompts: token ids of the prompts.
            outputs: committed token ids after the prompts.
            withheld: withheld tokens, None for none.
            device: of the results.
            constraints: of the sequences, None for none; empty if no sequence has a constraint.
        """
        self.constraints = constraints = constraints or [None] * len(settings)
        chosen = [i for i, s in enumerate(settings) if changes_logits(s) or withheld[i] or constraints[i]]
        # [B] index among the S sequences that need a change, -1 for the other sequences.
        self._place = torch.full((len(settings),), -1, device=device)
        self._place[chosen] = torch.arange(len(chosen), device=device)
        self._constraints = [constraints[index] for index in chosen]
        self._rated = any(changes_logits(settings[index]) for index in chosen)
        if self._rated:
            ids, facts, rates = [], [], []
            for index in chosen:
                s = settings[index]
                # Only the repetition penalty depends on the prompt.
                prompt, output = prompts[index] if s.repetition_penalty != 1 else (), outputs[index]
                token_ids, token_facts = _facts(s.logit_bias, prompt, output if changes_logits(s) else ())
                ids.append(token_ids)
                facts.append(token_facts)
                rates.append((s.repetition_penalty, s.frequency_penalty, s.presence_penalty))
            self._ids = pad_sequence(ids, batch_first=True, padding_value=-1).to(device)  # [S, L]
            self._facts = pad_sequence(facts, batch_first=True).to(device)  # [S, L, 3]
            self._rates = torch.tensor(rates, dtype=torch.float64, device=device)  # [S, 3]
        held_back = [withheld[index] for index in chosen]
        self._withholds = any(held_back)
        if self._withholds:
            ends = [torch.tensor(sorted(tokens.ids) if tokens else []).long() for tokens in held_back]
            self._ends = pad_sequence(ends, batch_first=True, padding_value=-1).to(device)  # [S, E]
            self._early = torch.tensor([tokens.early if tokens else 0 for tokens in held_back], device=device)  # [S]

    def adjust(
        self,
        logits: Tensor,
        rows: Tensor,
        nodes: Tensor,
        tokens: Tensor,
        parents: Tensor,
        support: Tensor | None = None,
    ) -> Tensor:
        """Return the logits with bias, penalties and masks; rows of sequences without any are not changed.

        Args:
            logits: [R, V] of the target, or [R, Vd] of a drafter; not written to.
            rows: [R], the sequence of each row.
            nodes: [R], the draft node before each row, or ``ROOT``.
            tokens: [B, N], target ids of the nodes.
            parents: [B, N], parents of the nodes.
            support: [Vd], token ids of a drafter's columns; None if columns are token ids.
        """
        owners = self._place[rows]
        at = (owners >= 0).nonzero().squeeze(-1)
        if not len(at):
            return logits
        owners, path = owners[at], path_tokens(tokens, parents, rows[at], nodes[at])
        changed = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        if self._rated:
            self._penalise(changed, at, owners, path, support)
        if any(self._constraints):
            constraints = [self._constraints[owner] for owner in owners.tolist()]
            forbid(changed, at.tolist(), constraints, path.tolist(), support)
        if self._withholds:
            self._withhold(changed, at, owners, (path >= 0).sum(1), support)
        return changed

    def _penalise(self, changed: Tensor, at: Tensor, owners: Tensor, path: Tensor, support: Tensor | None) -> None:
        """Apply bias and penalties to rows ``at`` [A] of sequences ``owners`` [A] after ``path`` [A, longest]."""
        committed, facts = self._ids[owners], self._facts[owners]
        drafted = path >= 0
        same = (path[:, :, None] == committed[:, None, :]) & drafted[:, :, None]
        again = (path[:, :, None] == path[:, None, :]).tril(-1).any(-1)
        # A token has a single entry, even if it is both committed and on the path, or twice on the path.
        valid = torch.cat([committed >= 0, drafted & ~same.any(-1) & ~again], 1)
        ids = torch.cat([committed, path], 1)  # [A, L + longest path]
        on_path = (ids[:, :, None] == path[:, None, :]).sum(-1)
        columns = ids
        if support is not None:
            valid, columns = _columns(support, ids, valid)
        counts, prompt, bias = torch.cat([facts, facts.new_zeros(*path.shape, 3)], 1).unbind(-1)
        counts = counts + on_path
        repetition, frequency, presence = self._rates[owners][:, :, None].unbind(1)
        place = at[:, None] * changed.shape[-1] + columns.masked_fill(~valid, 0)
        before = changed.take(place).double()
        scores = before + bias
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where((counts > 0) | (prompt > 0), repeated, scores)
        scores = scores - frequency * counts - presence * (counts > 0)
        change = (scores - before).masked_fill(~valid | before.isneginf(), 0.0).to(changed.dtype)
        changed.put_(place, change, accumulate=True)

    def _withhold(self, changed: Tensor, at: Tensor, owners: Tensor, depths: Tensor, support: Tensor | None) -> None:
        """Forbid withheld tokens in rows ``at`` [A] of sequences ``owners`` [A]; ``depths`` [A] are path lengths."""
        ends = self._ends[owners]
        ending = (ends >= 0) & (depths < self._early[owners])[:, None]
        if support is not None:
            ending, ends = _columns(support, ends, ending)
        rows, which = ending.nonzero(as_tuple=True)
        bound = [row for row in set(rows.tolist()) if self._constraints[int(owners[row])]]
        allowed = {row: changed[at[row]].clone() for row in bound}
        changed[at[rows], ends[rows, which]] = -math.inf
        for row, whole in allowed.items():
            if bool(changed[at[row]].isneginf().all()):
                changed[at[row]] = whole


def _columns(support: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the ``valid`` ids that are in a drafter's ``support``, and the columns of the ids."""
    known, order = support.sort()
    place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    return valid & (known[place] == ids), order[place]


def _facts(bias: tuple[tuple[int, float], ...], prompt: Sequence[int], output: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the token ids [L] that occur, and [L, 3]: count in the output, 1 if in the prompt, bias."""
    used, seen = torch.tensor(output, dtype=torch.int64), torch.tensor(prompt, dtype=torch.int64)
    biased = torch.tensor([token for token, _ in bias], dtype=torch.int64)
    ids = torch.cat([used, seen, biased]).unique()
    facts = torch.zeros(len(ids), 3, dtype=torch.float64)
    facts[:, 0] = torch.bincount(torch.searchsorted(ids, used), minlength=len(ids))
    facts[torch.searchsorted(ids, seen), 1] = 1.0
    facts[torch.searchsorted(ids, biased), 2] = torch.tensor([value for _, value in bias], dtype=torch.float64)
    return ids, facts


def path_tokens(tokens: Tensor, parents: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
    """Return the tokens on the paths to some nodes, [R, longest], the newest first, then -1.

    Args:
        tokens: [B, N], of all nodes.
        parents: [B, N], ``ROOT`` for the root.
        rows: [R], the tree of each node.
        nodes: [R], or ``ROOT``.
    """
    path = []
    while bool((nodes >= 0).any()):
        above = nodes.clamp(min=0)
        path.append(tokens[rows, above].masked_fill(nodes < 0, -1))
        nodes = torch.where(nodes < 0, nodes, parents[rows, above])
    return torch.stack(path, 1) if path else tokens.new_empty(len(rows), 0)
