"""Medusa: all heads in one call, serving and training alike, and versions that are checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from osd.config import MedusaSettings
from osd.drafters import DrafterError, from_config, initial
from osd.drafters.medusa.drafter import Medusa
from osd.drafters.medusa.session import MedusaSession
from osd.drafters.session import Kept, Runtime
from osd.runtime.batch import following
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from osd.target.model import load_model
from tests.tiny import make_tiny
from tests.unit.drafters.sequences import at_places, expand_chain, expand_tree

VOCABULARY, LENGTH, HIDDEN, HEADS = 150, 30, 64, 4


@pytest.fixture
def medusa(target_dir: Path) -> Medusa:
    """Random weights that bfloat16 holds exactly, and a draft vocabulary with gaps."""
    drafter = initial(MedusaSettings(vocabulary=VOCABULARY, heads=HEADS), target_dir, target_dir)
    assert isinstance(drafter, Medusa)
    torch.manual_seed(3)
    drafter.adapt_vocabulary(torch.rand(259))
    with torch.no_grad():
        for parameter in drafter.trained().values():
            parameter.copy_((torch.randn_like(parameter) * 0.2).bfloat16())
    return drafter


def sequences(medusa: Medusa, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = medusa.draft_ids[torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)]
    return tokens, torch.randn(count, LENGTH, HIDDEN, generator=generator)


def close(got: Tensor, goal: Tensor) -> None:
    """As near as rows that the kernels of some CPUs round to bfloat16."""
    assert float((got.detach() - goal).norm() / goal.norm()) < 5e-3


def drafting(medusa: Medusa, slots: Sequence[int], **runtime: bool) -> MedusaSession:
    """A session with a few rounds behind it, in ``slots``."""
    tokens, hidden = sequences(medusa, len(slots))
    session = medusa.session(Runtime(5, LENGTH, 8, **runtime))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
        session.commit(slot, Kept(tokens[row, 1 : 6 + row].tolist(), hidden[row, : 5 + row]))
    return session


def states_of(target_dir: Path, tokens: list[int], bucketed: bool) -> tuple[Tensor, Tensor]:
    """What the last layer gives after each of ``tokens``, as the engine reads it, and the target's logits."""
    model = load_model(target_dir, "float32", "cpu")
    slots = SlotModel(model, slots=1, context=64, scratch=8, taps=(-1,), bucketed=bucketed)
    forward = slots.forward(following(0, 0, tokens), torch.arange(len(tokens)))
    assert forward.hidden is not None
    return forward.hidden, forward.logits


@pytest.mark.parametrize("bucketed", [False, True])
def test_new_heads_say_what_the_targets_own_head_says_of_the_state_that_it_reads(
    target_dir: Path, bucketed: bool
) -> None:
    drafter = initial(MedusaSettings(vocabulary=100_000), target_dir, target_dir)
    assert isinstance(drafter, Medusa)
    tokens = [5, 9, 200, 31, 7, 8]
    hidden, logits = states_of(target_dir, tokens, bucketed)
    assert drafter.needs.taps == (3,)
    levels = drafter.unroll(at_places(torch.tensor([tokens]), hidden[None], [(0, 5)]), HEADS)
    for head, said in enumerate(levels):
        close(said[0], logits[3 - head])
    session = drafter.session(Runtime(1, LENGTH, 8))
    session.open(0, tokens[0])
    session.commit(0, Kept([*tokens[1:], 9], hidden))
    for level in range(HEADS):
        close(session.chains([0], [HEADS], 0.0).logits[0, level], logits[-1])


@pytest.mark.parametrize("runtime", [{}, {"bucketed": True}])
@pytest.mark.parametrize("native", [True, False])
def test_serving_and_training_see_the_same_inputs(
    medusa: Medusa, native: bool, runtime: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("osd.runtime.linear.kernels", lambda: None)
    slots = [2, 0, 3]
    tokens, hidden = sequences(medusa, 3)
    session = medusa.session(Runtime(4, LENGTH, HEADS + 1, **runtime))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
    fed = [0, 0, 0]
    for ends in ([5, 9, 2], [6, 13, 4], [20, 20, 20]):  # committed tokens, round by round
        for row, end in enumerate(ends):
            session.commit(slots[row], Kept(tokens[row, fed[row] + 1 : end].tolist(), hidden[row, fed[row] : end - 1]))
            fed[row] = end - 1
        drafted = torch.stack([tokens[row, end : end + HEADS - 1] for row, end in enumerate(ends)])
        got = expand_chain(session, slots, drafted)
        with torch.no_grad():
            for d in range(HEADS):
                batch = at_places(tokens, hidden, [(row, end + d) for row, end in enumerate(ends)])
                close(got[d], medusa.unroll(batch, HEADS)[d])


def test_a_proposal_is_one_call_however_deep_it_is(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    say = MedusaSession._say

    def counted(self: MedusaSession, slots: Sequence[int], levels: int) -> tuple[Tensor, Tensor]:
        calls.append(len(slots))
        return say(self, slots, levels)

    monkeypatch.setattr(MedusaSession, "_say", counted)
    expand_chain(drafting(medusa, [3, 0]), [3, 0], medusa.draft_ids[torch.ones(2, HEADS - 1, dtype=torch.int64)])
    assert calls == [2]


def test_what_follows_a_node_depends_on_its_depth_alone(medusa: Medusa) -> None:
    parents, tokens = [-1, -1, 0, 0, 1, 2], sequences(medusa, 1)[0][0, 20:26].tolist()
    found = expand_tree(drafting(medusa, [3, 0]), 0, tokens, parents)
    chain = expand_chain(drafting(medusa, [3, 0]), [0], medusa.draft_ids[torch.zeros(1, 3, dtype=torch.int64)])
    for node, depth in enumerate([0, 1, 1, 2, 2, 2, 3]):
        assert torch.equal(found[node], chain[depth][0])
    assert not torch.allclose(chain[0], chain[1])


def test_greedy_chains_are_the_best_token_of_each_head_as_far_as_limits_go(medusa: Medusa) -> None:
    slots, limits = [3, 0, 4, 1], [4, 0, 1, 3]
    chains = drafting(medusa, slots).chains(slots, limits, 0.0)
    assert [len(tokens) for tokens in chains.tokens] == limits
    steps = expand_chain(drafting(medusa, slots), slots, medusa.draft_ids[torch.zeros(4, 3, dtype=torch.int64)])
    for row, tokens in enumerate(chains.tokens):
        for level, token in enumerate(tokens):
            assert torch.equal(chains.logits[row, level], steps[level][row])
            assert token == medusa.draft_ids[steps[level][row].argmax()]


def test_chains_end_after_the_first_token_of_too_little_probability(medusa: Medusa) -> None:
    slots, limits = [3, 0, 4, 1, 2], [HEADS] * 5
    far = drafting(medusa, slots).chains(slots, limits, 0.0)
    best = far.logits.softmax(-1).amax(-1)  # [B, HEADS]
    floor = float(best[:, :-1].median()) + 1e-6
    near = drafting(medusa, slots).chains(slots, limits, floor)
    for row, tokens in enumerate(near.tokens):
        below = [level for level in range(HEADS) if best[row, level] < floor]
        assert tokens == far.tokens[row][: below[0] + 1 if below else HEADS]
    assert {len(tokens) for tokens in near.tokens} != {HEADS}


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
def test_weights_in_8_bits_draft_almost_the_same(medusa: Medusa) -> None:
    mine, theirs = (drafting(medusa, [3, 0], int8=int8).chains([3, 0], [3, 3], 0.0).logits for int8 in (True, False))
    assert 0 < float((mine - theirs).norm() / theirs.norm()) < 0.06


def test_a_state_is_what_the_block_that_drafted_the_token_gives(medusa: Medusa) -> None:
    tokens, hidden = sequences(medusa, 1)
    session = drafting(medusa, [0])
    expand_chain(session, [0], tokens[:, 6:9])
    batch = at_places(tokens, hidden, [(0, 8)])  # the third token of the draft after six
    with torch.no_grad():
        states = medusa.drafted_states(batch, tokens[0, 8:9], 3)
    close(session.states[0], states[2][0])
    assert not torch.allclose(states[2], states[1])


def test_a_version_comes_back_from_its_config_and_weights(medusa: Medusa, target_dir: Path) -> None:
    again = from_config(json.loads(json.dumps(medusa.config())), target_dir)
    again.load_weights({name: value.clone() for name, value in medusa.weights().items()})
    assert again.config() == medusa.config()
    assert torch.equal(again.draft_ids, medusa.draft_ids)
    batch = at_places(*sequences(medusa, 2), [(0, 7), (1, 25)])
    with torch.no_grad():
        for mine, theirs in zip(again.unroll(batch, 3), medusa.unroll(batch, 3), strict=True):
            assert torch.equal(mine, theirs)


def test_a_version_holds_blocks_and_maps_and_nothing_of_the_targets(medusa: Medusa) -> None:
    shapes = {name: list(value.shape) for name, value in medusa.weights().items()}
    blocks = {"weight": [HEADS, HIDDEN, HIDDEN], "bias": [HEADS, HIDDEN]}
    assert shapes == blocks | {"t2d": [259], "d2t": [VOCABULARY]}


@pytest.mark.parametrize("bucketed", [False, True])
def test_loading_a_staged_version_changes_a_running_session_to_it(
    medusa: Medusa, target_dir: Path, bucketed: bool
) -> None:
    other = from_config(medusa.config(), target_dir)
    torch.manual_seed(11)
    for parameter in other.trained().values():
        parameter.data.normal_(0, 0.1)
    other.adapt_vocabulary(torch.rand(259))
    session, goal = drafting(medusa, [0], bucketed=bucketed), drafting(other, [0], bucketed=bucketed)
    for version in (other, medusa, other):  # over what the others left behind
        session.load(session.stage(version.weights()))
    assert torch.equal(session.support, other.draft_ids)
    mine, theirs = (one.chains([0], [HEADS], 0.0) for one in (session, goal))
    assert torch.equal(mine.logits, theirs.logits)
    assert mine.tokens == theirs.tokens
    assert mine.settled is not bucketed


Spoil = Callable[[dict[str, Tensor]], object]
SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda w: w.pop("bias"), "'bias' is missing"),
    "another kind's": (lambda w: w.update({"fuse.weight": torch.ones(2)}), "'fuse.weight' is unknown"),
    "another shape": (lambda w: w.update(bias=torch.ones(5, 64)), r"'bias' has shape \[5, 64\] instead of \[4, 64\]"),
    "nan": (lambda w: w["weight"].view(-1)[-1:].fill_(float("nan")), "'weight' has numbers that are not"),
    "maps": (lambda w: w["d2t"][-1:].add_(1000), "'d2t' and 't2d' do not describe the same"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_version_that_does_not_fit_is_refused_by_name(medusa: Medusa, name: str) -> None:
    spoil, message = SPOILT[name]
    session, before = medusa.session(Runtime(1, LENGTH, 3)), {k: v.clone() for k, v in medusa.weights().items()}
    weights = {k: v.clone() for k, v in before.items()}
    spoil(weights)
    for take in (session.stage, medusa.load_weights):
        with pytest.raises(DrafterError, match=message):
            take(weights)
    assert all(torch.equal(value, before[k]) for k, value in medusa.weights().items())


def test_a_config_of_another_target_is_refused(medusa: Medusa, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is for another target: its layers is 4, not 2"):
        from_config(medusa.config(), make_tiny(tmp_path, layers=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "does not describe a medusa drafter: surprise is unknown"),
        ({"heads": 0}, "heads is 0, but must be a whole number of at least 1"),
        ({"heads": 2.5}, "heads is 2.5, but must be a whole number of at least 1"),
        ({"hidden": 63}, "is for another target: its hidden is 63, not 64"),
        ({"vocabulary": 0}, "vocabulary is 0, but must be a whole number of at least 1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    medusa: Medusa, target_dir: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        from_config(medusa.config() | change, target_dir)


def test_without_hidden_states_it_cannot_learn(medusa: Medusa) -> None:
    with pytest.raises(DrafterError, match="medusa learns from hidden states, and the trace has none"):
        medusa.unroll(at_places(sequences(medusa, 1)[0], None, [(0, 5)]), 1)


def test_hidden_states_that_training_does_not_name_change_nothing(medusa: Medusa) -> None:
    tokens, hidden = sequences(medusa, 1)
    with torch.no_grad():
        before = medusa.unroll(at_places(tokens, hidden, [(0, 12)]), HEADS)
        for depth in range(HEADS):
            other = torch.full_like(hidden, 9.0)
            other[:, 12 - 2 - depth] = hidden[:, 12 - 2 - depth]
            assert torch.equal(medusa.unroll(at_places(tokens, other, [(0, 12)]), HEADS)[depth], before[depth])
