"""Verification that resumes from the rows of a draft: exact output distribution by enumeration.

A real session drafts with the first layers of a target of three tokens. A real rule verifies by the resumed forward.
All outcomes of their randomness are enumerated.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.drafting.draft_vocabulary import VocabularyDrafter
from osd.drafting.early_exit import EarlyExit
from osd.drafting.growth import GROWTHS, Growth
from osd.drafting.kangaroo import Kangaroo
from osd.drafting.session import CommittedTokens, DraftRequest, Exits, Proposal, Runtime, Tree
from osd.engine import exits as exits_of
from osd.engine.packing import SequenceInput, pack
from osd.runtime.batch import consecutive_rows
from osd.runtime.exit_controller import EXIT as LEAVE
from osd.runtime.kv_cache import KVCache
from osd.runtime.model import SlotModel
from osd.runtime.resumption import resume
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.sampling import SamplingParams
from osd.verification.tree import DraftBatch
from tests.unit.engine.steps import few_token_target, randomised
from tests.unit.verification.enumeration import BATCH, ForkingNoise, Law, Toy, check_integrity, law_of

VOCABULARY, PROMPT, EXIT = 3, [2, 0, 1, 1], 2
WANTED = torch.empty(0, dtype=torch.int64)


class ResumedSteps:
    """Step after the same prompt in every slot, drafted and verified from the exits on."""

    def __init__(self, growth: Growth, rule: str, early: bool = False) -> None:
        """Make a target; with ``early`` exits, one of two draft tokens leaves at the first exit and one later."""
        model = randomised(few_token_target(VOCABULARY, 7 if early else 4))
        copied = copy.deepcopy(model)
        drafter: VocabularyDrafter = EarlyExit(copied, 2) if early else Kangaroo.from_target(copied, 2, EXIT)
        drafter.adapt_vocabulary(torch.tensor([1, 0, 1]))
        how: dict[str, Any] = {"slots": BATCH, "context": 16, "scratch": 10}
        self.target = SlotModel(model, taps=drafter.needs.taps, **how)
        self.left: Counter[int] = Counter()  # number of rows by exit layer
        if isinstance(drafter, EarlyExit):
            zero, two = (self.unit(token) for token in drafter.draft_ids.tolist())
            with torch.no_grad():
                drafter.controller[LEAVE] = zero - two
        self.session = drafter.session(Runtime(**how, target=self.target))
        expand = self.session.expand
        self.session.expand = lambda *args: expand(*args).double()  # type: ignore[method-assign]
        self.growth, self.rule = growth, VERIFICATIONS[rule]

    def unit(self, token: int) -> Tensor:
        """Return [16], the direction of the state at the first exit after the prompt and a token."""
        hidden = self.target.forward(consecutive_rows(0, 0, [*PROMPT, token]), WANTED).hidden
        return torch.nn.functional.rms_norm(hidden[-1, :16], (16,))

    def toy(self, length: int) -> Toy:
        """Return the distributions of the target after each history of up to ``length`` tokens."""
        histories: list[list[int]] = [[]]
        for history in histories:
            if len(history) < length:
                histories += ([*history, token] for token in range(VOCABULARY))
        rows = []
        for history in histories:
            text = [*PROMPT, *history]
            rows.append(self.target.forward(consecutive_rows(0, 0, text), torch.tensor([len(text) - 1])).logits[0])
        p = torch.stack(rows).double().softmax(-1)
        return Toy(p, p, VOCABULARY)

    def begin(self, slot: int) -> None:
        cache = self.target.cache
        states = self.target.forward(consecutive_rows(slot, 0, PROMPT[:-1]), WANTED).hidden
        cache.length[slot] = len(PROMPT) - 1
        self.session.open(slot, PROMPT[0])
        self.session.commit(slot, CommittedTokens(PROMPT[1:], states))

    def __call__(self, noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        slots = list(range(batch))
        for slot in slots:
            self.begin(slot)
        request = DraftRequest(slots, [self.growth.max_nodes] * batch, [SamplingParams()] * batch)
        proposal = self.session.propose(request, self.growth, noise)  # type: ignore[arg-type]
        draft = proposal.draft
        check_integrity(draft)
        target_logits = self.verified(slots, proposal)
        width = draft.tokens.shape[1] + 1
        p = torch.full((batch, width, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
        for slot, logits in zip(slots, target_logits, strict=True):
            p[slot, : len(logits)] = logits.double().softmax(-1)
        return draft, self.rule.verify(draft, p, noise)  # type: ignore[arg-type]

    def verified(self, slots: list[int], proposal: Proposal) -> list[Tensor]:
        """Return the target's logits after the root and each node of each tree, resumed from the exits."""
        place, trees = len(PROMPT) - 1, proposal.trees
        feeds = [
            SequenceInput(slot, place, PROMPT[-1:], tree.tokens, tree.parents, True)
            for slot, tree in zip(slots, trees, strict=True)
        ]
        packed = pack(feeds)
        assert proposal.exits
        self.left.update({group.layer: len(group.states) for group in proposal.exits})
        known = [(slot, row, place, tree) for slot, row, tree in zip(slots, packed.first, trees, strict=True)]
        resumed = exits_of.resumed_rows(proposal.exits, known, self.target.cache)
        assert resumed
        logits = resume(self.target, packed.rows, packed.wanted, resumed).logits
        return list(logits.split([1 + len(tree.tokens) for tree in trees]))


WAYS = {
    "chain": (GROWTHS["chain"](2), "chain", 3),
    "confidence": (GROWTHS["confidence"](eta=0.5, depth=3), "chain", 3),
    "block": (GROWTHS["confidence"](eta=0.5, depth=2), "block", 3),
    "drawn tree": (GROWTHS["dynamic_tree"](budget=3), "siblings", 3),
    "siblings with replacement": (
        GROWTHS["static_tree"](acceptance=[0.6, 0.3], budget=3, depth=2, draw="iid"),
        "siblings",
        3,
    ),
    "top k": (GROWTHS["top_k_tree"](budget=4, top_k=2, depth=2), "naive", 3),
    "best first": (GROWTHS["best_first"](budget=4), "naive", 3),
}


def enumerated(name: str, early: bool = False) -> tuple[Law, ResumedSteps]:
    growth, rule, length = WAYS[name]
    steps = ResumedSteps(growth, rule, early)
    result = law_of(steps, steps.toy(length - 1), length)
    print(f"{name}: {result}, {steps.left}")
    return result, steps


@pytest.mark.parametrize("name", WAYS)
def test_resumed_verification_keeps_the_output_distribution(name: str) -> None:
    result, _ = enumerated(name)
    assert result.error < 1e-9
    assert result.accepted > 0.1


@pytest.mark.parametrize("name", ["drawn tree", "siblings with replacement"])
def test_rows_with_different_exits_keep_the_distribution(name: str) -> None:
    result, steps = enumerated(name, early=True)
    assert result.error < 1e-9
    assert result.accepted > 0.1
    assert min(steps.left[3], steps.left[6]) > 0


@pytest.mark.parametrize("name", ["confidence", "drawn tree"])
def test_resuming_from_the_wrong_row_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(exits: Sequence[Exits], *rest: Any) -> Any:
        changed = []
        for left in exits:
            paths = [dict(zip(path, [*path.values()][1:] + [*path.values()][:1], strict=True)) for path in left.paths]
            changed.append(replace(left, paths=paths))
        return whole(changed, *rest)

    whole = exits_of.resumed_rows
    monkeypatch.setattr(exits_of, "resumed_rows", shifted)
    assert enumerated(name)[0].error > 1e-3


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "left behind"])
def test_resumed_rows_are_matched_by_their_path(moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ResumedSteps(GROWTHS["chain"](3), "chain")
    drafted = Tree.chain([2, 0, 2], "kangaroo")
    builder = DraftBatch.chosen([(drafted.tokens, drafted.parents)])
    steps.begin(0)
    single, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for node in (-1, 0, 1):
        steps.session.expand([0], builder, zero, node * single)  # type: ignore[attr-defined]
    exits = steps.session.take_exits([0])  # type: ignore[attr-defined]
    tree = Tree([1, 2, 1, 0, 2], [-1, -1, 0, 1, 3], [""] * 5)
    goal = steps.target.forward(consecutive_rows(1, 0, PROMPT[:-1]), WANTED)
    steps.target.cache.length[1] = 3
    packed = pack([SequenceInput(1, 3, PROMPT[-1:], tree.tokens, tree.parents, True)])
    goal = steps.target.forward(packed.rows, packed.wanted)
    if not moves:
        monkeypatch.setattr(KVCache, "move", lambda *args: None)
    logits = steps.verified([0], Proposal([tree], exits=exits))
    assert torch.allclose(logits[0], goal.logits, atol=1e-6) is moves


def test_moved_rows_keep_their_keys_in_the_layers_they_ran() -> None:
    cache = KVCache(5, 1, 1, 8, 2, torch.float32, torch.device("cpu"))
    cache.keys.copy_(torch.arange(8.0)[:, None].expand_as(cache.keys))  # each key has the number of its place
    deep = Exits(4, [{(): 0, (7,): 1}], [0, 1], torch.tensor([[0.0], [1.0]]), None)
    shallow = Exits(2, [{(8,): 0}], [2], torch.tensor([[2.0]]), None)
    resumed = exits_of.resumed_rows([deep, shallow], [(0, 10, 3, Tree([8, 7], [-1, -1], ["", ""]))], cache)
    assert [(group.layer, list(group.rows), group.states.flatten().tolist()) for group in resumed] == [
        (2, [11], [2.0]),
        (4, [10, 12], [0.0, 1.0]),
    ]
    held = cache.keys[:, 0, 0, 3:6, 0].tolist()  # keys of the last committed token and both nodes
    assert held == [[3, 5, 4], [3, 5, 4], [3, 4, 4], [3, 4, 4], [3, 4, 5]]
