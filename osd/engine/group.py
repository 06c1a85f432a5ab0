"""The sequences of a round that draft and are verified alike."""

from __future__ import annotations

from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from osd.drafters.base import Chains, Session
from osd.engine.piece import Piece
from osd.engine.policy import Policy
from osd.runtime.device import sent
from osd.runtime.memory import recycled
from osd.speculation.distributions import Lazy
from osd.speculation.growth import Growth
from osd.speculation.noise import Noise
from osd.speculation.penalties import Penalties, penalised
from osd.speculation.sampling import SamplingBatch, most_probable
from osd.speculation.tree import ROOT, DraftBatch, TreeBuilder
from osd.speculation.verification import Rule, Verdict
from osd.speculation.verification.naive import Naive


class Expansion:
    """A drafter session as a growth policy sees it; keeps the raw logits of every node for the traces."""

    def __init__(self, session: Session, slots: list[int], nodes: int, penalties: Penalties | None) -> None:
        self._session, self._slots, self._nodes, self._penalties = session, slots, nodes, penalties
        self.raw: Tensor | None = None  # [B, 1 + nodes, draft vocabulary], entry 1 + i after node i

    @property
    def support(self) -> Tensor | None:
        """[draft vocabulary] target ids, None for the whole vocabulary."""
        return self._session.support

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        """One forward of the drafter; see ``osd.speculation.growth.Expander``."""
        logits = self._session.expand(self._slots, builder, rows, nodes)
        if self.raw is None:
            self.raw = recycled((len(self._slots), 1 + self._nodes, logits.shape[-1]), logits.dtype, logits.device)
        self.raw[rows, 1 + nodes] = logits
        if self._penalties is None:
            return logits
        return self._penalties.adjust(logits, rows, nodes, builder.tokens, builder.parents, self.support)

    def acceptance(self) -> Tensor:
        """See ``osd.speculation.growth.Expander``."""
        return self._session.acceptance()


class Group:
    """Pieces that end, of sequences with one drafter and policy; either all of them decode greedily or none does."""

    def __init__(self, policy: Policy, pieces: list[Piece], device: torch.device) -> None:
        self.growth: Growth = policy.growth
        self.rule: Rule = policy.rule
        self._walk = policy.walk
        self.pieces = pieces
        self.draft: DraftBatch | None = None
        self.late: Chains | None = None  # what the host has not read yet: pieces have as many nodes as there may be
        self.raw: Tensor | None = None
        self.support: Tensor | None = None
        self._device = device
        settings = self._settings = [piece.sequence.request.sampling for piece in pieces]
        self._greedy = all(one.temperature == 0 for one in settings)
        self._penalties: Penalties | None = None
        if any(map(penalised, settings)):
            prompts = [piece.sequence.request.prompt_ids for piece in pieces]
            outputs = [piece.sequence.tokens[len(prompt) :] for piece, prompt in zip(pieces, prompts, strict=True)]
            self._penalties = Penalties(settings, prompts, outputs, device)

    @cached_property
    def _sampling(self) -> SamplingBatch:  # made when asked for: what is greedy seldom asks
        return SamplingBatch.of(self._settings, self._device)

    @cached_property
    def _noise(self) -> Noise:
        return _noise(self.pieces, [piece.sequence.step for piece in self.pieces], self._device)

    @torch.inference_mode()
    def grow(self, session: Session) -> None:
        """Draft up to each piece's limit."""
        limits = [min(piece.limit, self.growth.max_nodes) for piece in self.pieces]
        if not any(limits):
            return
        slots = [piece.sequence.slot for piece in self.pieces]
        self.support = session.support
        if self._chained(session, slots, limits):
            return
        expansion = Expansion(session, slots, max(limits), self._penalties)
        draft = self.growth.grow(expansion, self._sampling, self._noise, torch.tensor(limits, device=self._device))
        trees = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.sizes.tolist(), strict=True)
        for piece, (tokens, parents, size) in zip(self.pieces, trees, strict=True):
            piece.drafted, piece.parents = tokens[:size], parents[:size]
        self.draft, self.raw = draft, expansion.raw

    def _chained(self, session: Session, slots: list[int], limits: list[int]) -> bool:
        """Draft greedy chains in one call, where that is possible."""
        floor = self.growth.stops_below
        if floor is None or self._penalties is not None or not self._greedy:
            return False
        chains = session.chains(slots, limits, floor)
        if chains is None:
            return False
        self.raw = chains.logits
        if chains.settled:
            self._draw(chains.tokens)
        else:
            self.late = chains
            self._draw([[0] * limit for limit in limits])
        return True

    def _draw(self, chains: list[list[int]]) -> None:
        for piece, tokens in zip(self.pieces, chains, strict=True):
            piece.drafted, piece.parents = tokens, list(range(ROOT, len(tokens) - 1))

    @torch.inference_mode()
    def asked(self, logits: Tensor) -> Tensor | None:
        """[n] int64 what ``verify`` has to read from the device, None where it asks for itself."""
        if not self._greedy:
            return None
        best = most_probable(self._penalised(logits))
        return best if self.late is None else torch.cat([best, self.late.sizes, self.late.drafted.flatten()])

    @torch.inference_mode()
    def verify(self, logits: Tensor, told: list[int]) -> None:
        """Decide what each piece keeps, by the target's ``logits`` and what was read of ``asked``."""
        if self._greedy:
            self._follow(told)
        else:
            self._test(logits)

    def _follow(self, told: list[int]) -> None:
        """Keep the path of most probable tokens: what every rule does when p has all its mass on one token."""
        numbers = iter(told)
        best = [list(islice(numbers, 1 + len(piece.drafted))) for piece in self.pieces]
        if self.late is not None:
            batch, levels = self.late.drafted.shape
            sizes = list(islice(numbers, batch))
            self._draw([list(islice(numbers, levels))[:size] for size in sizes])
        for piece, mine in zip(self.pieces, best, strict=True):
            piece.path, piece.token = self._walk(piece.drafted, piece.parents, mine[: 1 + len(piece.drafted)])

    def _test(self, logits: Tensor) -> None:
        draft = self.draft or DraftBatch.empty(len(self.pieces), self._device)
        width = draft.tokens.shape[1] + 1
        owners, places = [], []
        for b, piece in enumerate(self.pieces):
            size = len(piece.drafted)
            places.append([len(owners) + min(i, size) for i in range(width)])
            owners += [b] * (1 + size)
        mine, owned = self._penalised(logits), torch.tensor(owners, device=self._device)

        def p_of(members: list[int]) -> Lazy:
            chosen = torch.tensor([places[b] for b in members], device=self._device)
            return Lazy(mine, owned, chosen, self._sampling)

        everybody = list(range(len(self.pieces)))
        repeatable = [piece.sequence.request.sampling.repeatable for piece in self.pieces]
        if not any(repeatable):
            _keep(self.pieces, self.rule.verify(draft, p_of(everybody), self._noise))
            return
        steady, others = ([b for b in everybody if repeatable[b] is wanted] for wanted in (True, False))
        self._test_repeatable(draft, p_of(steady), steady)
        if others:
            rows = torch.tensor(others, device=self._device)
            verdict = self.rule.verify(draft.select(rows), p_of(others), self._noise.rows(rows))
            _keep([self.pieces[b] for b in others], verdict)

    def _test_repeatable(self, draft: DraftBatch, p: Lazy, members: list[int]) -> None:
        """Draw from p by the places of the tokens: no text may depend on what was drafted or where rounds ended.

        The draft is only looked up, which is lossless for any draft.
        """
        pieces, rows = [self.pieces[b] for b in members], torch.tensor(members, device=self._device)
        first = torch.tensor([len(piece.sequence.tokens) for piece in pieces], device=self._device)
        noise = _noise(pieces, [0] * len(pieces), self._device)
        _keep(pieces, Naive().verify(draft.select(rows), p, noise, first))

    def _penalised(self, logits: Tensor) -> Tensor:
        """The group's rows of the logits, one piece below the other, with bias and penalties."""
        rows = [piece.logits_row + i for piece in self.pieces for i in range(1 + len(piece.drafted))]
        neighbours = rows[-1] - rows[0] == len(rows) - 1  # they ascend
        mine = logits[rows[0] : rows[-1] + 1] if neighbours else logits[sent(rows, self._device)]
        if self._penalties is None:
            return mine
        after = [(b, node) for b, piece in enumerate(self.pieces) for node in range(ROOT, len(piece.drafted))]
        owners, nodes = torch.tensor(after, device=self._device).T
        draft = self.draft or DraftBatch.empty(len(self.pieces), self._device)
        return self._penalties.adjust(mine, owners, nodes, draft.tokens, draft.parents)


def _noise(pieces: list[Piece], steps: list[int], device: torch.device) -> Noise:
    seeds = torch.tensor([piece.sequence.request.sampling.seed for piece in pieces], device=device)
    # The seed alone keys a request, so that the same seed gives the same text again under any request id.
    return Noise(seeds, torch.zeros_like(seeds), torch.tensor(steps, device=device))


def _keep(pieces: list[Piece], verdict: Verdict) -> None:
    paths, accepted, tokens = verdict.path.tolist(), verdict.accepted.tolist(), verdict.token.tolist()
    for b, piece in enumerate(pieces):
        piece.path, piece.token = paths[b][: accepted[b]], tokens[b]
