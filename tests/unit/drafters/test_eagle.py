"""EAGLE: serving and training see the same inputs, and a version's weights are checked before they are used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from osd.config import EagleSettings
from osd.drafters import DrafterError, autoregressive, from_config, initial
from osd.drafters.eagle.drafter import Eagle
from osd.drafters.session import Asked, GrownTrees, Kept, Runtime, Session
from osd.engine.request import SamplingParams
from osd.runtime.native import kernels
from osd.speculation.cost_model import CostModel
from osd.speculation.growth.best_first import BestFirst
from osd.speculation.noise import Noise
from osd.speculation.sampling import SamplingBatch
from osd.speculation.tree import DraftBatch, TreeBuilder
from osd.speculation.worth import Bill, PayingTrees, Worth
from tests.tiny import make_tiny
from tests.unit.drafters.sequences import at_places, expand_chain, expand_tree

VOCABULARY, LENGTH, HIDDEN = 150, 30, 64
CPU = torch.device("cpu")


@pytest.fixture
def eagle(target_dir: Path) -> Eagle:
    """Random weights that bfloat16 holds exactly, and a draft vocabulary with gaps."""
    drafter = initial(EagleSettings(vocabulary=VOCABULARY), target_dir, target_dir)
    assert isinstance(drafter, Eagle)
    torch.manual_seed(3)
    drafter.adapt_vocabulary(torch.rand(259))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.bfloat16().float())
    return drafter


native = pytest.mark.skipif(kernels() is None, reason="the kernels were not built")


def sequences(eagle: Eagle, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = eagle.draft_ids[torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)]
    return tokens, torch.randn(count, LENGTH, 3 * HIDDEN, generator=generator)


def close(got: Tensor, goal: Tensor) -> None:
    """As near as rows that the kernels of some CPUs round to bfloat16."""
    assert float((got - goal).norm() / goal.norm()) < 5e-3
    torch.testing.assert_close(got, goal, rtol=5e-3, atol=1e-2 * float(goal.abs().max()))


@pytest.mark.parametrize("native", [True, False])
def test_serving_and_training_see_the_same_inputs(eagle: Eagle, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("osd.runtime.linear.kernels", lambda: None)
        monkeypatch.setattr("osd.runtime.attention.native.kernels", lambda: None)
    depth, slots = 4, [2, 0, 3]
    tokens, hidden = sequences(eagle, 3)
    session = eagle.session(Runtime(4, LENGTH, depth + 1))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
    fed = [0, 0, 0]
    for ends in ([5, 9, 2], [6, 13, 4], [9, 14, 5], [20, 20, 20]):  # committed tokens, round by round
        for row, end in enumerate(ends):
            session.commit(slots[row], Kept(tokens[row, fed[row] + 1 : end].tolist(), hidden[row, fed[row] : end - 1]))
            fed[row] = end - 1
        drafted = torch.stack([tokens[row, end : end + depth - 1] for row, end in enumerate(ends)])
        got = expand_chain(session, slots, drafted)
        with torch.no_grad():
            for d in range(depth):
                batch = at_places(tokens, hidden, [(row, end + d) for row, end in enumerate(ends)])
                close(got[d], eagle.unroll(batch, depth)[d])


def drafting(eagle: Eagle, slots: list[int], int8: bool = False) -> tuple[Session, Tensor]:
    """A session with a few rounds behind it, in ``slots``."""
    tokens, hidden = sequences(eagle, len(slots))
    session = eagle.session(Runtime(5, LENGTH, 17, int8=int8))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
        session.commit(slot, Kept(tokens[row, 1 : 6 + row].tolist(), hidden[row, : 5 + row]))
    return session, tokens


@native
def test_weights_in_8_bits_draft_almost_the_same_and_can_be_swapped(eagle: Eagle) -> None:
    full, _ = drafting(eagle, [3, 0])
    small, _ = drafting(eagle, [3, 0], int8=True)
    assert {layer.packed.dtype for layer in small.linear.values()} == {torch.int8}
    mine, theirs = small.chains([3, 0], [3, 3], 0.0), full.chains([3, 0], [3, 3], 0.0)
    error = float((mine.logits[:, 0] - theirs.logits[:, 0]).norm() / theirs.logits[:, 0].norm())
    assert 0 < error < 0.06
    weights = {name: value * 0 if name == "head.weight" else value for name, value in eagle.weights().items()}
    small.load(small.stage(weights))
    assert {layer.packed.dtype for layer in small.linear.values()} == {torch.int8}
    for slot in (3, 0):
        small.commit(slot, Kept([5], torch.zeros(1, states_width(eagle))))
    assert not small.chains([3, 0], [1, 1], 0.0).logits.any()


def states_width(eagle: Eagle) -> int:
    return len(eagle.needs.taps) * eagle.shape.hidden


@native
def test_chains_drafted_in_one_call_are_those_that_are_drafted_step_by_step(eagle: Eagle) -> None:
    slots, limits, depth = [3, 0, 4, 1], [4, 0, 1, 3], 4
    session, _ = drafting(eagle, slots)
    chains = session.chains(slots, limits, 0.0)
    assert chains is not None
    assert [len(tokens) for tokens in chains.tokens] == limits
    stepwise, _ = drafting(eagle, slots)
    drafted = torch.tensor([tokens + [int(eagle.draft_ids[0])] * (depth - len(tokens)) for tokens in chains.tokens])
    for level, logits in enumerate(expand_chain(stepwise, slots, drafted)[:depth]):
        for row, limit in enumerate(limits):
            if level < limit:
                close(chains.logits[row, level], logits[row])
                assert chains.tokens[row][level] == eagle.draft_ids[logits[row].argmax()]


@native
def test_chains_end_after_the_first_token_of_too_little_probability(eagle: Eagle) -> None:
    slots, limits = [3, 0, 4, 1, 2], [6, 6, 6, 6, 6]
    far = drafting(eagle, slots)[0].chains(slots, limits, 0.0)
    assert far is not None
    best = far.logits.softmax(-1).amax(-1)  # [B, 6]
    floor = float(best[:, :5].median()) + 1e-6
    near = drafting(eagle, slots)[0].chains(slots, limits, floor)
    assert near is not None
    for row, tokens in enumerate(near.tokens):
        below = [level for level in range(6) if best[row, level] < floor]
        assert tokens == far.tokens[row][: below[0] + 1 if below else 6]
    assert {len(tokens) for tokens in near.tokens} != {6}


class Replay:
    """Says again what a session said behind the nodes of trees that it has grown."""

    levels, reach, block = None, None, 1

    def __init__(self, logits: Tensor, support: Tensor) -> None:
        self.logits, self.support = logits, support

    def __call__(self, builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        return self.logits[rows, 1 + nodes]


@native
@pytest.mark.parametrize("usual", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row_costs", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("call_costs", [0.0, 0.05, 0.3])
def test_trees_grown_in_one_call_are_those_that_pay_level_by_level(
    eagle: Eagle, usual: int | None, temperature: float, row_costs: float, call_costs: float
) -> None:
    slots, limits = [3, 0, 4, 1], torch.tensor([16, 0, 2, 5])
    random = torch.Generator().manual_seed(int(1000 * row_costs + 100 * call_costs))
    growth = BestFirst(16)
    growth.table._chances = torch.rand(2, 5, 4, 14, generator=random, dtype=torch.float64).sort(-1).values
    growth.table._firsts = torch.rand(2, 5, generator=random, dtype=torch.float64)
    growth.table._firsts[:, 0] = 1.0  # all roots are asked about
    growth.table._chances_on_host = growth.table._chances.tolist()
    growth.table._firsts_on_host = growth.table._firsts.tolist()
    worth = Worth(4.0, 4, 1 + row_costs * np.arange(40) ** 1.2, usual, CostModel(), 4)
    calls = call_costs * np.arange(24) ** 0.5
    session, _ = drafting(eagle, slots)
    grown: list[tuple[PayingTrees, GrownTrees]] = []

    def call(rows: Sequence[int], depth: int) -> float:
        return float(calls[min(len(rows), 23)]) if depth else 0.0

    def in_one_call(wanted: PayingTrees) -> DraftBatch:
        found = session.grown_trees(slots, wanted, calls)
        assert found is not None
        grown.append((wanted, found))
        return DraftBatch.grown(found.tokens, found.parents, found.sizes, found.estimates, session.support)

    sampling = SamplingBatch.of([SamplingParams(temperature=temperature)] * 4)
    noise = Noise.of_seeds([1] * 4, [0] * 4, CPU)
    nobody = Replay(torch.empty(0), session.support)
    mine = growth.grow_paying(nobody, sampling, noise, limits, Bill(worth, call, in_one_call))
    ((wanted, found),) = grown
    replay = Replay(found.logits, session.support)
    theirs = growth.grow_paying(replay, sampling, noise, limits, Bill(worth, call, lambda wanted: None))
    for name in ("tokens", "parents", "sizes", "columns", "draw"):
        assert getattr(mine, name).equal(getattr(theirs, name)), name
    torch.testing.assert_close(mine.estimates, theirs.estimates, rtol=1e-12, atol=0)
    assert wanted.room == [16, 0, 2, 5]
    assert found.asked[0] == 3
    assert mine.sizes[1] == 0
    assert (mine.sizes <= limits).all()
    # What was said of each node is what it says when it is asked about that node alone.
    stepwise, _ = drafting(eagle, slots)
    row = int(mine.sizes.argmax())
    size = int(mine.sizes[row])
    alone = expand_tree(stepwise, slots[row], mine.tokens[row, :size].tolist(), mine.parents[row, :size].tolist())
    asked = [0, *(1 + node for node in range(size) if (mine.parents[row] == node).any())]
    close(found.logits[row, asked], alone[asked])


@native
def test_what_pays_is_proposed_in_one_call_and_told_what_its_levels_took(
    eagle: Eagle, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, costs, noise = [3, 0], CostModel(), Noise.of_seeds([1] * 2, [0] * 2, CPU)
    # Rounds take so long that what a call took a moment ago decides nothing.
    worth = Worth(2.0, 2, 1e4 * np.array([0.0, *np.linspace(1, 1.05, 40)]), None, costs, 2)
    asked = Asked(slots, [5, 7], [SamplingParams(temperature=0)] * 2, worth=worth, left=[50, 50], missed=[0, 0])
    session, _ = drafting(eagle, slots)
    with monkeypatch.context() as patched:
        patched.setattr(session, "expand", None)
        proposal = session.propose(asked, BestFirst(16), noise)
    stepwise, _ = drafting(eagle, slots)
    monkeypatch.setattr(stepwise, "grown_trees", lambda slots, wanted, calls: None)
    expected = stepwise.propose(asked, BestFirst(16), noise)
    for mine, theirs in zip(proposal.trees, expected.trees, strict=True):
        assert mine.tokens
        assert (mine.tokens, mine.parents) == (theirs.tokens, theirs.parents)
    assert set(costs.table().calls) == {"the first call of eagle", "a further call of eagle"}
    assert costs.by_levels("eagle")


def test_what_no_level_took_by_itself_counts_for_the_first(eagle: Eagle, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, costs, told = [3, 0], CostModel(), list[tuple[Any, ...]]()
    worth = Worth(2.0, 2, 1e4 * np.array([0.0, *np.linspace(1, 1.05, 40)]), None, costs, 2)
    asked = Asked(slots, [5, 7], [SamplingParams(temperature=0)] * 2, worth=worth, left=[50, 50], missed=[9, 4])
    session, _ = drafting(eagle, slots)
    monkeypatch.setattr(session, "grown_trees", lambda slots, wanted, calls: None)
    clock = itertools.count(0.0)  # a second for each look
    monkeypatch.setattr(autoregressive, "mark", lambda device: next(clock))
    monkeypatch.setattr(costs, "observe_levels", lambda *said: told.append(said))
    session.propose(asked, BestFirst(16), Noise.of_seeds([1] * 2, [0] * 2, CPU))
    ((kind, names, counts, seconds, missed),) = told
    assert (kind, names[:2], counts[0], missed) == (
        "eagle", ("the first call of eagle", "a further call of eagle"), 2, 13,
    )  # fmt: skip
    assert len(seconds) == len(counts) > 1
    assert set(seconds[1:]) == {1.0}
    assert sum(seconds) == next(clock) - 1


@native
def test_a_sequence_that_drafts_nothing_keeps_what_it_was_told(eagle: Eagle) -> None:
    slots = [3, 0]
    session, _ = drafting(eagle, slots)
    assert session.chains(slots, [2, 0], 0.0) is not None
    after = session.chains([0], [3], 0.0)
    fresh = drafting(eagle, slots)[0].chains([0], [3], 0.0)
    assert after is not None
    assert fresh is not None
    assert after.tokens == fresh.tokens


def test_hidden_states_that_training_does_not_name_change_nothing(eagle: Eagle) -> None:
    tokens, hidden = sequences(eagle, 1)
    batch = at_places(tokens, hidden, [(0, 12)])
    with torch.no_grad():
        before = eagle.unroll(batch, 3)
        for depth in range(3):
            unseen = hidden.clone()
            unseen[:, 12 - 1 - depth :] = 9.0
            assert torch.allclose(eagle.unroll(at_places(tokens, unseen, [(0, 12)]), 3)[depth], before[depth])
            unseen[:, 12 - 2 - depth] = 9.0
            assert not torch.allclose(eagle.unroll(at_places(tokens, unseen, [(0, 12)]), 3)[depth], before[depth])


def test_a_tree_gives_what_each_of_its_paths_gives_alone(eagle: Eagle) -> None:
    tokens, hidden = sequences(eagle, 1)
    parents, drafted = [-1, -1, 0, 0, 1, 2], tokens[0, 20:26].tolist()
    session = eagle.session(Runtime(2, LENGTH, 7))
    for slot in range(2):
        session.open(slot, int(tokens[0, 0]))
        session.commit(slot, Kept(tokens[0, 1:10].tolist(), hidden[0, :9]))
    tree = expand_tree(session, 1, drafted, parents)
    alone = eagle.session(Runtime(1, LENGTH, 7))
    for node in range(len(drafted)):
        path, above = [], node
        while above >= 0:
            path.insert(0, drafted[above])
            above = parents[above]
        alone.open(0, int(tokens[0, 0]))
        alone.commit(0, Kept(tokens[0, 1:10].tolist(), hidden[0, :9]))
        chain = expand_chain(alone, [0], torch.tensor([path]))
        close(tree[0], chain[0][0])
        close(tree[1 + node], chain[-1][0])


def test_a_version_comes_back_from_its_config_and_weights(eagle: Eagle, target_dir: Path) -> None:
    config = json.loads(json.dumps(eagle.config()))
    again = from_config(config, target_dir)
    again.load_weights({name: value.clone() for name, value in eagle.weights().items()})
    assert again.config() == eagle.config()
    assert again.needs.taps == eagle.needs.taps
    assert again.draft_ids is not None
    assert torch.equal(again.draft_ids, eagle.draft_ids)
    batch = at_places(*sequences(eagle, 2), [(0, 7), (1, 25)])
    with torch.no_grad():
        for mine, theirs in zip(again.unroll(batch, 3), eagle.unroll(batch, 3), strict=True):
            assert torch.equal(mine, theirs)


def test_the_targets_own_tensors_are_not_in_a_version(eagle: Eagle) -> None:
    assert not [name for name, value in eagle.weights().items() if value.shape[:1] == (259,) and name != "t2d"]


def test_loading_a_staged_version_changes_a_running_session_to_it(eagle: Eagle, target_dir: Path) -> None:
    other = from_config(eagle.config(), target_dir)
    torch.manual_seed(11)
    weights = {
        name: value if name in ("t2d", "d2t") else (torch.randn_like(value) * 0.1).bfloat16().float()
        for name, value in eagle.weights().items()
    }
    other.load_weights(weights)
    other.adapt_vocabulary(torch.rand(259))
    tokens, hidden = sequences(eagle, 1)
    session, fresh = eagle.session(Runtime(1, LENGTH, 3)), other.session(Runtime(1, LENGTH, 3))
    for s in (session, fresh):
        s.open(0, int(tokens[0, 0]))
        s.commit(0, Kept(tokens[0, 1:10].tolist(), hidden[0, :9]))
    for _ in range(2):  # a second time, over what the first left behind
        staged = session.stage(other.weights())
        session.load(staged)
    assert torch.equal(session.support, other.draft_ids)
    if kernels() is not None:
        assert session.linear["head"].place is staged["head"], "a swap between two rounds copies nothing"
    chains, goal = session.chains([0], [1], 0.0), fresh.chains([0], [1], 0.0)
    assert (chains is None) == (kernels() is None)
    if chains is not None and goal is not None:
        assert torch.equal(chains.logits, goal.logits)
    session.commit(0, Kept([int(tokens[0, 10])], hidden[0, 9:10]))
    fresh.commit(0, Kept([int(tokens[0, 10])], hidden[0, 9:10]))
    nothing = torch.empty(1, 0, dtype=torch.int64)
    assert torch.equal(expand_chain(session, [0], nothing)[0], expand_chain(fresh, [0], nothing)[0])


Spoil = Callable[[dict[str, Tensor]], object]
SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda w: w.pop("fuse.weight"), "'fuse.weight' is missing"),
    "missing map": (lambda w: w.pop("t2d"), "'t2d' is missing"),
    "unknown": (lambda w: w.update(surprise=torch.ones(2)), "'surprise' is unknown"),
    "shape": (lambda w: w.update({"norm.weight": torch.ones(65)}), r"'norm.weight' has shape \[65\] instead of \[64\]"),
    "scalar map": (lambda w: w.update(d2t=torch.tensor(0)), r"'d2t' has shape \[\]"),
    "kind": (lambda w: w.update(d2t=w["d2t"].float()), "'d2t' is torch.float32 instead of torch.int64"),
    "nan": (lambda w: w["head.weight"].view(-1)[-1:].fill_(float("nan")), "'head.weight' has numbers that are not"),
    "inf": (lambda w: w["tap_norm"].view(-1)[:1].fill_(float("inf")), "'tap_norm' has numbers that are not finite"),
    "maps": (lambda w: w["d2t"][-1:].add_(1), "'d2t' and 't2d' do not describe the same"),
    "out of range": (lambda w: w["d2t"][-1:].add_(1000), "'d2t' and 't2d' do not describe the same"),
    "two ids in one": (lambda w: w["t2d"].logical_not_(), "'d2t' and 't2d' do not describe the same"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_version_that_does_not_fit_is_refused_by_name(eagle: Eagle, name: str) -> None:
    spoil, message = SPOILT[name]
    session, before = eagle.session(Runtime(1, LENGTH, 3)), {k: v.clone() for k, v in eagle.weights().items()}
    weights = {k: v.clone() for k, v in before.items()}
    spoil(weights)
    with pytest.raises(DrafterError, match=message):
        session.stage(weights)
    with pytest.raises(DrafterError, match=message):
        eagle.load_weights(weights)
    assert all(torch.equal(value, before[k]) for k, value in eagle.weights().items())


@pytest.mark.parametrize(("change", "message"), [
    (
        {"kind": "oracle"},
        "drafter kind 'oracle' is not one of eagle, early_exit, falcon, kangaroo, language_model, medusa, "
        "prompt_tokens, recall",
    ),
    ({"surprise": 1}, "does not describe a eagle drafter.*surprise"),
    ({"target_vocabulary": 260}, r"the target's embedding is \[259, 64\]"),
    ({"hidden": 63}, r"the target's embedding is \[259, 64\]"),
    ({"heads": 0}, "heads is 0, but must be a whole number of at least 1"),
    ({"heads": 3}, "heads is 3, but must be a multiple of kv_heads, which is 2"),
    ({"heads": "4"}, "heads is '4', but must be a whole number of at least 1"),
    ({"kv_heads": -2}, "kv_heads is -2, but must be a whole number of at least 1"),
    ({"head_dim": 15}, "head_dim is 15, but must be even"),
    ({"intermediate": 0}, "intermediate is 0, but must be a whole number of at least 1"),
    ({"vocabulary": 0}, "vocabulary is 0, but must be a whole number of at least 1"),
    ({"vocabulary": 10**12}, "vocabulary is 1000000000000, but must be at most 259, the target's"),
])  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(
    eagle: Eagle, target_dir: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        from_config(eagle.config() | change, target_dir)


def test_adapting_the_vocabulary_keeps_the_rows_that_are_there_takes_the_targets_and_keeps_the_maps_consistent(
    eagle: Eagle,
) -> None:
    before = {int(index): row.clone() for index, row in zip(eagle.draft_ids, eagle.head.weight, strict=True)}
    counts = torch.zeros(259)
    counts[torch.arange(109, 259)] = torch.arange(150).float() + 1
    eagle.adapt_vocabulary(counts)
    assert eagle.draft_ids.tolist() == list(range(109, 259))
    assert torch.equal(eagle.t2d.nonzero().squeeze(1), eagle.draft_ids)
    assert 0 < len(before.keys() & set(range(109, 259))) < 150
    for index, row in zip(range(109, 259), eagle.head.weight, strict=True):
        assert torch.equal(row, before.get(index, eagle.target_head[index].float())), index
    eagle.load_weights(eagle.weights())


def test_among_equally_frequent_ids_the_lower_ones_are_drafted(eagle: Eagle) -> None:
    counts = torch.zeros(259)
    counts[200] = 3
    eagle.adapt_vocabulary(counts)
    assert eagle.draft_ids.tolist() == [*range(VOCABULARY - 1), 200]


def test_without_hidden_states_it_cannot_learn(eagle: Eagle) -> None:
    with pytest.raises(DrafterError, match="eagle learns from hidden states, and the trace has none"):
        eagle.unroll(at_places(sequences(eagle, 1)[0], None, [(0, 5)]), 1)


def test_the_first_version_starts_from_the_target(target_dir: Path) -> None:
    drafter = initial(EagleSettings(vocabulary=100_000), target_dir, target_dir)
    assert isinstance(drafter, Eagle)
    assert drafter.needs.taps == (0, 2, 2)
    assert drafter.draft_ids.tolist() == list(range(259))
    assert torch.equal(drafter.head.weight, drafter.target_head.float())
    assert all(bool(torch.isfinite(value).all()) for value in drafter.weights().values())


def test_a_target_of_two_layers_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="needs a target of at least 3 layers, this one has 2"):
        initial(EagleSettings(), make_tiny(tmp_path, layers=2), tmp_path)


@torch.inference_mode()
def test_a_drafters_own_token_is_read_as_if_the_text_went_on_with_it_and_by_its_own_place_only(eagle: Eagle) -> None:
    depth, places = 3, [8, 15, 16, 25]
    tokens, hidden = sequences(eagle, 2)
    drafted = tokens.clone()
    drafted[0, 14] = eagle.draft_ids[5]
    drafted[1, 7] = eagle.draft_ids[9]
    where = [(row, place) for row in range(2) for place in places]
    found = eagle.unroll(at_places(tokens, hidden, where), depth, drafted)
    true = eagle.unroll(at_places(tokens, hidden, where), depth)
    close(found[0], true[0])
    for index, (row, place) in enumerate(where):
        text = tokens.clone()
        text[row, place - 1] = drafted[row, place - 1]
        alone = eagle.unroll(at_places(text, hidden, [(row, place)]), depth)
        close(found[1][index], alone[1][0])
        if bool((drafted[row, place - depth : place - 1] == tokens[row, place - depth : place - 1]).all()):
            close(found[2][index], alone[2][0])
