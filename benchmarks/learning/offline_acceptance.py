"""What a drafter would have been worth on recorded text, by the session that serves it.

Greedy output does not depend on the drafter: what it would have drafted at each round, and how much of it the target
would have kept, follows from the recorded tokens and hidden states alone.
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
class Counts:
    """What drafting did on some text.

    ``drafted`` tokens in ``rounds`` rounds, of which ``accepted`` became output; ``tested`` counts those that stood
    where the output went on: the accepted ones, and the first that was not.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tested: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.tested + other.tested,
        )

    @property
    def acceptance(self) -> float:
        """Acceptance rate: accepted / drafted, 0 when nothing was drafted."""
        return acceptance_rate(self.accepted, self.drafted)

    @property
    def agreement(self) -> float:
        """Accepted / tested, 0 when nothing was tested."""
        return acceptance_rate(self.accepted, self.tested)

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length: 1 + accepted / rounds, 1 when nothing was drafted."""
        return mean_acceptance_length(self.accepted, self.rounds)


def total(counts: Sequence[Counts]) -> Counts:
    """The counts of all texts together."""
    return sum(counts, Counts())


@dataclass(frozen=True)
class Drafted:
    """What drafting did on one text.

    ``drafted`` and ``verdict`` [C] say for each completion token what was drafted there, -1 for nothing, and what
    became of it; ``kind`` is the drafter's.
    """

    kind: str
    counts: Counts
    drafted: np.ndarray
    verdict: np.ndarray

    def mark(self, trace: Trace) -> Trace:
        """The record as the service would have captured it with this drafter at work."""
        source = np.where(self.verdict != NOT_DRAFTED, 0, -1).astype(np.int8)
        arrays = {"drafted": self.drafted, "verdict": self.verdict.astype(np.int8), "source": source}
        fields = {name: Array.of(values) for name, values in arrays.items()}
        return msgspec.structs.replace(trace, sources=(self.kind,), **fields)


class OfflineAcceptance:
    """Drafts along recorded text with a drafter's session, round by round, ungoverned, as the engine does.

    The hidden states are those of the record, in bfloat16; an engine drafts from what they were rounded from. A drafter
    that runs layers of the target gets a target which reads the text in those layers, and one that rides in its forward
    one which reads the text with what rides behind the kept node.

    Args:
        drafter: of the kind that is measured; ``measure`` takes the weights of any like it.
        tokenizer: the target's.
        policy: grows the drafts.
        context: tokens of the longest text.
        tokens: a request's ``max_tokens`` when the text was recorded; the last one of them is never drafted.
        target: with ``SLOTS`` free slots of this context, where the drafter runs layers of it or rides in its forward.
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
    def measure(self, weights: dict[str, Tensor], traces: Sequence[Trace]) -> list[Drafted]:
        """Draft along each text with a drafter of these weights.

        Raises:
            osd.drafting.DrafterError: the weights are not those of this kind of drafter.
        """
        self._session.load(self._session.stage(weights))
        found: dict[int, Drafted] = {}
        waiting = iter(enumerate(traces))
        running: list[_Text] = []
        free = list(range(SLOTS))
        while True:
            while free and (following := next(waiting, None)):
                running.append(self._open(free.pop(), *following))
            if not running:
                return [found[index] for index in range(len(traces))]
            drafting = [text for text in running if text.limit]
            if drafting:
                self._round(drafting)
            for text in [text for text in running if not text.limit]:
                self._session.close(text.sequence.slot)
                free.append(text.sequence.slot)
                running.remove(text)
                found[text.index] = Drafted(self._kind, text.counts, text.drafted, text.verdict)

    def _open(self, slot: int, index: int, trace: Trace) -> _Text:
        prompt, completion = trace.prompt_ids.numpy().tolist(), trace.completion_ids.numpy().tolist()
        request = Request(trace.request_id, tuple(prompt), self._tokens, SamplingParams(temperature=0))
        sequence = SequenceState(request, self._policy, lambda update: None, self._tokenizer, trace.domain, frozenset())
        sequence.slot = slot
        hidden = None
        if self._reads_hidden and trace.hidden is not None:
            hidden = torch.from_numpy(trace.hidden.numpy().copy()).view(torch.bfloat16)
        text = _Text(index, sequence, [*prompt, *completion], hidden)
        self._session.open(slot, prompt[0])
        # The first token of an answer comes from the prompt's own forward.
        self._commit([_Step(text, 0, 1 + len(prompt))])
        return text

    def _commit(self, steps: Sequence[_Step], embedded: Tensor | None = None) -> None:
        """Make each text as long as its step says, and tell the session the tokens that are new."""
        said = self._read(steps, embedded)
        for step, rows in zip(steps, said, strict=True):
            text = step.text
            text.sequence.tokens = text.tokens[: step.size]
            hidden = None if text.hidden is None else text.hidden[step.first : step.size - 1]
            self._session.commit(
                text.sequence.slot, CommittedTokens(text.tokens[step.first + 1 : step.size], hidden, rows)
            )

    def _read(self, steps: Sequence[_Step], embedded: Tensor | None) -> list[TargetRows | None]:
        """Have the target read what is new, where there is one, and return what it said to the drafter's own rows."""
        target, nothing = self._target, [None] * len(steps)
        if target is None:
            return [*nothing]
        builder = RowBuilder()
        wanted: list[int] = []
        answers: list[dict[int, int]] = []  # by its number in the tree, which of the logits a rider has
        for step in steps:
            slot, riders = step.text.sequence.slot, step.riders()
            builder.tokens(slot, step.first, step.text.tokens[step.first : step.size - 1])
            answers.append({rider: len(wanted) + number for number, rider in enumerate(riders)})
            if riders:
                ids = [target.vocabulary - 1 - step.tree.rider_tokens[rider] for rider in riders]
                parents = [riders.get(step.tree.rider_parents[rider] - len(step.tree.tokens), ROOT) for rider in riders]
                row = builder.draft(slot, step.size - 1, ids, parents)
                wanted += range(row, len(builder))
            target.cache.length[slot] = step.size - 1
        rows = replace(builder.build(), embedded=embedded)
        forward = target.forward(rows, torch.tensor(wanted, dtype=torch.int64), self._layers)
        if not self._rides or embedded is None:
            return [*nothing]
        return [
            TargetRows(step.tree, step.path, forward.logits[step.rows(mine)], None)
            for step, mine in zip(steps, answers, strict=True)
        ]

    def _round(self, texts: list[_Text]) -> None:
        growth = self._policy.growth
        asked = DraftRequest(
            [text.sequence.slot for text in texts],
            [min(text.limit, growth.max_nodes) for text in texts],
            [text.sequence.request.sampling for text in texts],
        )
        index = torch.arange(len(texts))
        proposal = self._session.propose(asked, growth, Noise(index, index, index))
        steps: list[_Step] = []
        for text, tree in zip(texts, proposal.trees, strict=True):
            before, sequence = len(text.sequence.tokens), text.sequence
            path = text.test(tree.tokens, tree.parents)
            sequence.limit = self._policy.growth.next_limit(sequence.limit, len(tree.tokens), len(path))
            steps.append(_Step(text, before - 1, min(before + len(path) + 1, len(text.tokens)), tree, path))
        self._commit(steps, proposal.embedded)


@dataclass
class _Text:
    """A text under way: ``sequence`` is what an engine would have of ``tokens`` so far."""

    index: int
    sequence: SequenceState
    tokens: list[int]
    hidden: Tensor | None
    counts: Counts = Counts()

    def __post_init__(self) -> None:
        """Nothing is drafted yet."""
        completion = len(self.tokens) - len(self.sequence.request.prompt_ids)
        self.drafted = np.full(completion, -1, np.int32)
        self.verdict = np.full(completion, NOT_DRAFTED, np.int8)

    @property
    def limit(self) -> int:
        """Nodes of the next draft at most, 0 when the text is over."""
        over = len(self.sequence.tokens) == len(self.tokens)
        return 0 if over else min(self.sequence.limit, self.sequence.remaining - 1)

    def test(self, tokens: list[int], parents: list[int]) -> list[int]:
        """Count what the text keeps of a draft; returns the nodes."""
        at, end = len(self.sequence.tokens), len(self.tokens)
        depths = [0]
        for parent in parents:
            depths.append(depths[1 + parent] + 1)
        best = [self.tokens[at + depth] if at + depth < end else -1 for depth in depths]  # -1 past the end
        path, _ = follow(tokens, parents, best)
        last = path[-1] if path else ROOT
        tested = [*path, *(node for node, parent in enumerate(parents) if parent == last)][: len(path) + 1]
        tested = tested[: end - at]
        place = at - len(self.sequence.request.prompt_ids)
        for depth, node in enumerate(tested):
            self.drafted[place + depth] = tokens[node]
            self.verdict[place + depth] = ACCEPTED if depth < len(path) else REJECTED
        self.counts += Counts(int(bool(tokens)), len(tokens), len(path), len(tested))
        return path


@dataclass(frozen=True)
class _Step:
    """A ``text`` becomes ``size`` tokens long; those after ``first`` are new, by the ``path`` of a ``tree``."""

    text: _Text
    first: int
    size: int
    tree: Tree = NO_DRAFT
    path: Sequence[int] = ()

    def riders(self) -> dict[int, int]:
        """The riders of the tree behind the node that was kept, each with its place among them."""
        last, nodes = self.path[-1] if self.path else ROOT, len(self.tree.tokens)
        found: dict[int, int] = {}
        for rider, parent in enumerate(self.tree.rider_parents):
            if parent == last or parent - nodes in found:
                found[rider] = len(found)
        return found

    def rows(self, answers: dict[int, int]) -> list[int]:
        """Which logits each entry of ``TargetRows`` has, given those of the riders; any where nobody reads them."""
        before, riders = 1 + len(self.tree.tokens), len(self.tree.rider_tokens)
        some = next(iter(answers.values()), -1)
        return [answers.get(rider, some) for rider in range(-before, riders)] if answers else []


def longest(traces: Sequence[Trace]) -> int:
    """Tokens of the longest text."""
    return max(length(trace) for trace in traces)
