"""Verification that goes on from a draft's own rows: the law of the output is the target's, by exact enumeration.

The real session drafts from a target of three tokens through its first layers, the real rule verifies by what the
resumed forward says, and every outcome of their randomness is followed.
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
from osd.drafting.session import DraftRequest, Exits, Kept, Proposal, Runtime, Tree
from osd.engine import exits as exits_of
from osd.engine.packing import Feed, pack
from osd.runtime.batch import following
from osd.runtime.exit_controller import EXIT as LEAVE
from osd.runtime.kv_cache import KVCache
from osd.runtime.model import SlotModel
from osd.runtime.resumption import resume
from osd.verification import VERIFICATIONS, Verdict
from osd.verification.sampling import SamplingParams
from osd.verification.tree import DraftBatch
from tests.unit.engine.rounds import drawn, few_words
from tests.unit.verification.enumeration import BATCH, ForkingNoise, Law, Toy, check_integrity, law_of

VOCABULARY, PROMPT, EXIT = 3, [2, 0, 1, 1], 2
WANTED = torch.empty(0, dtype=torch.int64)


class Rounds:
    """One round after the same prompt in every slot: drafted, verified from the exits on, and forgotten."""

    def __init__(self, growth: Growth, rule: str, early: bool = False) -> None:
        """With ``early`` exits, of which there are two, one token leaves behind the first and the other does not."""
        model = drawn(few_words(VOCABULARY, 7 if early else 4))
        own = copy.deepcopy(model)
        drafter: VocabularyDrafter = EarlyExit(own, 2) if early else Kangaroo.from_target(own, 2, EXIT)
        drafter.adapt_vocabulary(torch.tensor([1, 0, 1]))
        how: dict[str, Any] = {"slots": BATCH, "context": 16, "scratch": 10}
        self.target = SlotModel(model, taps=drafter.needs.taps, **how)
        self.left: Counter[int] = Counter()  # how many rows left behind each layer
        if isinstance(drafter, EarlyExit):
            zero, two = (self.unit(token) for token in drafter.draft_ids.tolist())
            with torch.no_grad():
                drafter.controller[LEAVE] = zero - two
        self.session = drafter.session(Runtime(**how, target=self.target))
        expand = self.session.expand
        self.session.expand = lambda *asked: expand(*asked).double()  # type: ignore[method-assign]
        self.growth, self.rule = growth, VERIFICATIONS[rule]

    def unit(self, token: int) -> Tensor:
        """[16] the direction of the state at the first exit after the prompt and a token."""
        hidden = self.target.forward(following(0, 0, [*PROMPT, token]), WANTED).hidden
        return torch.nn.functional.rms_norm(hidden[-1, :16], (16,))

    def toy(self, length: int) -> Toy:
        """What the target says after each history of up to ``length`` tokens, read one at a time."""
        histories: list[list[int]] = [[]]
        for history in histories:
            if len(history) < length:
                histories += ([*history, token] for token in range(VOCABULARY))
        rows = []
        for history in histories:
            text = [*PROMPT, *history]
            rows.append(self.target.forward(following(0, 0, text), torch.tensor([len(text) - 1])).logits[0])
        p = torch.stack(rows).double().softmax(-1)
        return Toy(p, p, VOCABULARY)

    def begin(self, slot: int) -> None:
        cache = self.target.cache
        states = self.target.forward(following(slot, 0, PROMPT[:-1]), WANTED).hidden
        cache.length[slot] = len(PROMPT) - 1
        self.session.open(slot, PROMPT[0])
        self.session.commit(slot, Kept(PROMPT[1:], states))

    def __call__(self, noise: ForkingNoise, batch: int) -> tuple[DraftBatch, Verdict]:
        slots = list(range(batch))
        for slot in slots:
            self.begin(slot)
        asked = DraftRequest(slots, [self.growth.max_nodes] * batch, [SamplingParams()] * batch)
        proposal = self.session.propose(asked, self.growth, noise)  # type: ignore[arg-type]
        draft = proposal.draft
        check_integrity(draft)
        said = self.verified(slots, proposal)
        width = draft.tokens.shape[1] + 1
        p = torch.full((batch, width, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
        for slot, logits in zip(slots, said, strict=True):
            p[slot, : len(logits)] = logits.double().softmax(-1)
        return draft, self.rule.verify(draft, p, noise)  # type: ignore[arg-type]

    def verified(self, slots: list[int], proposal: Proposal) -> list[Tensor]:
        """What the target says after the root and each node of each tree, going on from the exits."""
        place, trees = len(PROMPT) - 1, proposal.trees
        feeds = [
            Feed(slot, place, PROMPT[-1:], tree.tokens, tree.parents, True)
            for slot, tree in zip(slots, trees, strict=True)
        ]
        packed = pack(feeds)
        assert proposal.exits
        self.left.update({one.layer: len(one.states) for one in proposal.exits})
        known = [(slot, row, place, tree) for slot, row, tree in zip(slots, packed.first, trees, strict=True)]
        begun = exits_of.begun_rows(proposal.exits, known, self.target.cache)
        assert begun
        logits = resume(self.target, packed.rows, packed.wanted, begun).logits
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


def law(name: str, early: bool = False) -> tuple[Law, Rounds]:
    growth, rule, length = WAYS[name]
    rounds = Rounds(growth, rule, early)
    found = law_of(rounds, rounds.toy(length - 1), length)
    print(f"{name}: {found}, {rounds.left}")
    return found, rounds


@pytest.mark.parametrize("name", WAYS)
def test_every_way_of_drawing_keeps_the_law(name: str) -> None:
    found, _ = law(name)
    assert found.error < 1e-9
    assert found.accepted > 0.1


@pytest.mark.parametrize("name", ["drawn tree", "siblings with replacement"])
def test_rows_that_leave_behind_different_layers_keep_the_law(name: str) -> None:
    found, rounds = law(name, early=True)
    assert found.error < 1e-9
    assert found.accepted > 0.1
    assert min(rounds.left[3], rounds.left[6]) > 0


@pytest.mark.parametrize("name", ["confidence", "drawn tree"])
def test_going_on_from_the_row_of_another_node_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(exits: Sequence[Exits], *rest: Any) -> Any:
        changed = []
        for left in exits:
            paths = [dict(zip(one, [*one.values()][1:] + [*one.values()][:1], strict=True)) for one in left.paths]
            changed.append(replace(left, paths=paths))
        return whole(changed, *rest)

    whole = exits_of.begun_rows
    monkeypatch.setattr(exits_of, "begun_rows", shifted)
    assert law(name)[0].error > 1e-3


@pytest.mark.parametrize("moves", [True, False], ids=["moved", "left behind"])
def test_rows_that_stand_elsewhere_in_the_tree_are_found_by_their_tokens(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Rounds(GROWTHS["chain"](3), "chain")
    drafted = Tree.chain([2, 0, 2], "kangaroo")
    builder = DraftBatch.chosen([(drafted.tokens, drafted.parents)])
    rounds.begin(0)
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for node in (-1, 0, 1):
        rounds.session.expand([0], builder, zero, node * one)  # type: ignore[attr-defined]
    exits = rounds.session.take_exits([0])  # type: ignore[attr-defined]
    tree = Tree([1, 2, 1, 0, 2], [-1, -1, 0, 1, 3], [""] * 5)
    goal = rounds.target.forward(following(1, 0, PROMPT[:-1]), WANTED)
    rounds.target.cache.length[1] = 3
    packed = pack([Feed(1, 3, PROMPT[-1:], tree.tokens, tree.parents, True)])
    goal = rounds.target.forward(packed.rows, packed.wanted)
    if not moves:
        monkeypatch.setattr(KVCache, "move", lambda *args: None)
    found = rounds.verified([0], Proposal([tree], exits=exits))
    assert torch.allclose(found[0], goal.logits, atol=1e-6) is moves


def test_rows_of_different_exits_that_change_places_keep_their_keys_in_the_layers_that_they_ran() -> None:
    cache = KVCache(5, 1, 1, 8, 2, torch.float32, torch.device("cpu"))
    cache.keys.copy_(torch.arange(8.0)[:, None].expand_as(cache.keys))  # each key says where it was computed
    deep = Exits(4, [{(): 0, (7,): 1}], [0, 1], torch.tensor([[0.0], [1.0]]), None)
    shallow = Exits(2, [{(8,): 0}], [2], torch.tensor([[2.0]]), None)
    begun = exits_of.begun_rows([deep, shallow], [(0, 10, 3, Tree([8, 7], [-1, -1], ["", ""]))], cache)
    assert [(one.layer, list(one.rows), one.states.flatten().tolist()) for one in begun] == [
        (2, [11], [2.0]),
        (4, [10, 12], [0.0, 1.0]),
    ]
    held = cache.keys[:, 0, 0, 3:6, 0].tolist()  # of the last committed token and both nodes
    assert held == [[3, 5, 4], [3, 5, 4], [3, 4, 4], [3, 4, 4], [3, 4, 5]]
