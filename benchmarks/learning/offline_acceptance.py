"""Acceptance of a drafter along recorded text, measured with its serving session.

Greedy output does not depend on the drafter. Its drafts at each step, and the number of accepted tokens, follow from
the recorded tokens and hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array, Trace
from osd.drafting.session import CommittedTokens, DraftRequest, Runtime, TargetRows, Tree
from osd.drafting.trainable import Trainable
from osd.engine.draft_group import NO_DRAFT
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.engine.sequence import SequenceState
from osd.learning.batch import length
from osd.metrics import acceptance_rate, mean_acceptance_length
from osd.runtime.batch import RowBuilder
from osd.runtime.model import SlotModel
from osd.verification.base import follow
from osd.verification.noise import Noise
from osd.verification.tree import ROOT

SLOTS = 16


@dataclass(frozen=True)
class DraftCounts:
    """Draft counts on a text."""

    rounds: int = 0  # decoding steps with a draft
    drafted: int = 0  # draft tokens
    accepted: int = 0  # draft tokens that became output
    tested: int = 0  # accepted tokens, and the first rejected token of each step

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.tested + other.tested,
        )

    @property
    def acceptance(self) -> float:
        """Acceptance rate: accepted / drafted, 0 without drafts."""
        return acceptance_rate(self.accepted, self.drafted)

    @property
    def agreement(self) -> float:
        """Accepted / tested, 0 without tested tokens."""
        return acceptance_rate(self.accepted, self.tested)

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length: 1 + accepted / rounds, 1 without drafts."""
        return mean_acceptance_length(self.accepted, self.rounds)


def sum_counts(counts: Sequence[DraftCounts]) -> DraftCounts:
    """Return the sum of the counts."""
    return sum(counts, DraftCounts())


@dataclass(frozen=True)
class TextDrafts:
    """Drafts along one text."""

    kind: str  # kind of the drafter
    counts: DraftCounts  # counts of the text
    drafted: np.ndarray  # [C], draft token at the position of each completion token, -1 for none
    verdict: np.ndarray  # [C], verdict at each completion token

    def mark(self, trace: Trace) -> Trace:
        """Return the record as a service with this drafter would have captured it."""
        source = np.where(self.verdict != NOT_DRAFTED, 0, -1).astype(np.int8)
        arrays = {"drafted": self.drafted, "verdict": self.verdict.astype(np.int8), "source": source}
        fields = {name: Array.of(values) for name, values in arrays.items()}
        return msgspec.structs.replace(trace, sources=(self.kind,), **fields)


class OfflineAcceptance:
    """Drafting along recorded text with a drafter's session, step by step and without a governor, as in the engine.

    The hidden states are the recorded ones in bfloat16; the engine drafts from the unrounded states. A drafter that
    runs layers of the target, or adds rows to its forward, needs ``target``, which reads the text again; it has
    ``SLOTS`` free slots of ``context`` tokens, the length of the longest text. ``tokens`` is ``max_tokens`` of the
    recorded requests; their last token is never drafted.
    """

    def __init__(
        self,
        drafter: Trainable,
        tokenizer: PreTrainedTokenizerBase,
        policy: Policy,
        context: int,
        tokens: int,
        target: SlotModel | None = None,
    ) -> None:
        self._tokenizer, self._policy, self._tokens = tokenizer, policy, tokens
        self._session = drafter.session(Runtime.serving(SLOTS, context, policy.growth.max_nodes + 1, target=target))
        self._target, self._layers, self._rides = target, drafter.needs.layers, bool(drafter.needs.riders)
        self._kind, self._reads_hidden = drafter.kind, bool(drafter.needs.taps)

    @torch.inference_mode()
    def measure(self, weights: dict[str, Tensor], traces: Sequence[Trace]) -> list[TextDrafts]:
        """Draft along each text with these weights.

        Raises:
            osd.drafting.DrafterError: the weights do not fit this kind of drafter.
        """
        self._session.load(self._session.stage(weights))
        drafts: dict[int, TextDrafts] = {}
        waiting = iter(enumerate(traces))
        running: list[_RunningText] = []
        free = list(range(SLOTS))
        while True:
            while free and (item := next(waiting, None)):
                running.append(self._open(free.pop(), *item))
            if not running:
                return [drafts[index] for index in range(len(traces))]
            drafting = [text for text in running if text.limit]
            if drafting:
                self._draft_step(drafting)
            for text in [text for text in running if not text.limit]:
                self._session.close(text.sequence.slot)
                free.append(text.sequence.slot)
                running.remove(text)
                drafts[text.index] = TextDrafts(self._kind, text.counts, text.drafted, text.verdict)

    def _open(self, slot: int, index: int, trace: Trace) -> _RunningText:
        prompt, completion = trace.prompt_ids.numpy().tolist(), trace.completion_ids.numpy().tolist()
        request = Request(trace.request_id, tuple(prompt), self._tokens, SamplingParams(temperature=0))
        sequence = SequenceState(request, self._policy, lambda update: None, self._tokenizer, trace.domain, frozenset())
        sequence.slot = slot
        hidden = None
        if self._reads_hidden and trace.hidden is not None:
            hidden = torch.from_numpy(trace.hidden.numpy().copy()).view(torch.bfloat16)
        text = _RunningText(index, sequence, [*prompt, *completion], hidden)
        self._session.open(slot, prompt[0])
        # The first token of an answer comes from the prompt's own forward.
        self._commit([_TextStep(text, 0, 1 + len(prompt))])
        return text

    def _commit(self, steps: Sequence[_TextStep], embedded: Tensor | None = None) -> None:
        """Extend each text to the size of its step, and commit its new tokens to the session."""
        target_rows = self._read(steps, embedded)
        for step, rows in zip(steps, target_rows, strict=True):
            text = step.text
            text.sequence.tokens = text.tokens[: step.size]
            hidden = None if text.hidden is None else text.hidden[step.first : step.size - 1]
            self._session.commit(
                text.sequence.slot, CommittedTokens(text.tokens[step.first + 1 : step.size], hidden, rows)
            )

    def _read(self, steps: Sequence[_TextStep], embedded: Tensor | None) -> list[TargetRows | None]:
        """Let the target read the new tokens, if there is a target, and return its output for the drafter's rows."""
        target, nothing = self._target, [None] * len(steps)
        if target is None:
            return [*nothing]
        builder = RowBuilder()
        selected: list[int] = []
        answers: list[dict[int, int]] = []  # index of a rider's logits, by its number in the tree
        for step in steps:
            slot, riders = step.text.sequence.slot, step.riders()
            builder.tokens(slot, step.first, step.text.tokens[step.first : step.size - 1])
            answers.append({rider: len(selected) + number for number, rider in enumerate(riders)})
            if riders:
                ids = [target.vocabulary - 1 - step.tree.rider_tokens[rider] for rider in riders]
                parents = [riders.get(step.tree.rider_parents[rider] - len(step.tree.tokens), ROOT) for rider in riders]
                row = builder.draft(slot, step.size - 1, ids, parents)
                selected += range(row, len(builder))
            target.cache.length[slot] = step.size - 1
        rows = replace(builder.build(), embedded=embedded)
        forward = target.forward(rows, torch.tensor(selected, dtype=torch.int64), self._layers)
        if not self._rides or embedded is None:
            return [*nothing]
        return [
            TargetRows(step.tree, step.path, forward.logits[step.rows(answer)], None)
            for step, answer in zip(steps, answers, strict=True)
        ]

    def _draft_step(self, texts: list[_RunningText]) -> None:
        growth = self._policy.growth
        request = DraftRequest(
            [text.sequence.slot for text in texts],
            [min(text.limit, growth.max_nodes) for text in texts],
            [text.sequence.request.sampling for text in texts],
        )
        index = torch.arange(len(texts))
        proposal = self._session.propose(request, growth, Noise(index, index, index))
        steps: list[_TextStep] = []
        for text, tree in zip(texts, proposal.trees, strict=True):
            before, sequence = len(text.sequence.tokens), text.sequence
            path = text.test(tree.tokens, tree.parents)
            sequence.limit = self._policy.growth.next_limit(sequence.limit, len(tree.tokens), len(path))
            steps.append(_TextStep(text, before - 1, min(before + len(path) + 1, len(text.tokens)), tree, path))
        self._commit(steps, proposal.embedded)


@dataclass
class _RunningText:
    """Text in progress; ``sequence`` is the engine's sequence of ``tokens`` so far."""

    index: int
    sequence: SequenceState
    tokens: list[int]
    hidden: Tensor | None
    counts: DraftCounts = DraftCounts()

    def __post_init__(self) -> None:
        completion = len(self.tokens) - len(self.sequence.request.prompt_ids)
        self.drafted = np.full(completion, -1, np.int32)
        self.verdict = np.full(completion, NOT_DRAFTED, np.int8)

    @property
    def limit(self) -> int:
        """Largest number of nodes of the next draft, 0 at the end of the text."""
        is_over = len(self.sequence.tokens) == len(self.tokens)
        return 0 if is_over else min(self.sequence.limit, self.sequence.remaining - 1)

    def test(self, tokens: list[int], parents: list[int]) -> list[int]:
        """Count the accepted and tested nodes of a draft, and return the accepted path."""
        position, end = len(self.sequence.tokens), len(self.tokens)
        depths = [0]
        for parent in parents:
            depths.append(depths[1 + parent] + 1)
        best = [self.tokens[position + depth] if position + depth < end else -1 for depth in depths]  # -1 past the end
        path, _ = follow(tokens, parents, best)
        last = path[-1] if path else ROOT
        tested = [*path, *(node for node, parent in enumerate(parents) if parent == last)][: len(path) + 1]
        tested = tested[: end - position]
        offset = position - len(self.sequence.request.prompt_ids)
        for depth, node in enumerate(tested):
            self.drafted[offset + depth] = tokens[node]
            self.verdict[offset + depth] = ACCEPTED if depth < len(path) else REJECTED
        self.counts += DraftCounts(int(bool(tokens)), len(tokens), len(path), len(tested))
        return path


@dataclass(frozen=True)
class _TextStep:
    """Extension of a ``text`` to ``size`` tokens by the ``path`` of a ``tree``; tokens after ``first`` are new."""

    text: _RunningText
    first: int
    size: int
    tree: Tree = NO_DRAFT
    path: Sequence[int] = ()

    def riders(self) -> dict[int, int]:
        """Return the riders of the tree after the last accepted node, with their order."""
        last, nodes = self.path[-1] if self.path else ROOT, len(self.tree.tokens)
        order: dict[int, int] = {}
        for rider, parent in enumerate(self.tree.rider_parents):
            if parent == last or parent - nodes in order:
                order[rider] = len(order)
        return order

    def rows(self, answers: dict[int, int]) -> list[int]:
        """Return the index of the logits for each entry of ``TargetRows``; entries that are not read get any index."""
        nodes, riders = 1 + len(self.tree.tokens), len(self.tree.rider_tokens)
        any_index = next(iter(answers.values()), -1)
        return [answers.get(rider, any_index) for rider in range(-nodes, riders)] if answers else []


def longest(traces: Sequence[Trace]) -> int:
    """Return the number of tokens of the longest text."""
    return max(length(trace) for trace in traces)
