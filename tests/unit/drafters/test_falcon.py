"""Falcon: k tokens of a call, serving and training alike, glances that fade, and versions that are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.config import ConfigError, FalconSettings, TrainerSettings, load_settings
from osd.drafters import DrafterError, from_config, initial
from osd.drafters.falcon.drafter import Falcon
from osd.drafters.falcon.glancing import glance_ratio, glances
from osd.drafters.falcon.recurrence import recur, scan
from osd.drafters.falcon.session import FalconSession
from osd.drafters.session import Kept, Runtime
from osd.learning.batch import collate
from osd.learning.distiller import Distiller
from osd.learning.objective import Objective
from tests.tiny import make_tiny
from tests.unit.drafters.sequences import at_places, expand_chain, expand_tree
from tests.unit.learning.toys import make_trace

VOCABULARY, LENGTH, HIDDEN, DEPTH = 150, 30, 64, 5
BLOCKS = (2, 3, 4)


@pytest.fixture(scope="module")
def make(target_dir: Path) -> Callable[[int], Falcon]:
    """Random weights that bfloat16 holds exactly, and a draft vocabulary with gaps."""

    def made(block: int) -> Falcon:
        torch.manual_seed(3)
        drafter = initial(FalconSettings(vocabulary=VOCABULARY, block=block), target_dir, target_dir)
        assert isinstance(drafter, Falcon)
        drafter.adapt_vocabulary(torch.rand(259))
        with torch.no_grad():
            for parameter in drafter.trained().values():
                parameter.copy_((parameter + torch.randn_like(parameter) * 0.05).bfloat16())
        return drafter

    return made


@pytest.fixture
def falcon(make: Callable[[int], Falcon]) -> Falcon:
    return make(2)


def sequences(falcon: Falcon, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = falcon.draft_ids[torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)]
    return tokens, torch.randn(count, LENGTH, HIDDEN, generator=generator)


def close(got: Tensor, goal: Tensor) -> None:
    # Kernels that multiply bfloat16 round what they multiply.
    assert float((got.detach() - goal).norm() / goal.norm()) < 1e-2


def drafting(falcon: Falcon, slots: Sequence[int], reads: Falcon | None = None, **runtime: bool) -> FalconSession:
    """A session with a few rounds behind it, in ``slots``, of tokens that ``reads`` may draft, or the drafter."""
    tokens, hidden = sequences(reads or falcon, len(slots))
    session = falcon.session(Runtime(5, LENGTH, 16, **runtime))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
        session.commit(slot, Kept(tokens[row, 1 : 6 + row].tolist(), hidden[row, : 5 + row]))
    return session


@pytest.mark.parametrize("bucketed", [False, True], ids=["kernels", "bucketed"])
@pytest.mark.parametrize("block", BLOCKS)
@torch.no_grad()
def test_serving_and_training_see_the_same_inputs(make: Callable[[int], Falcon], block: int, bucketed: bool) -> None:
    falcon, slots = make(block), [2, 0, 3]
    tokens, hidden = sequences(falcon, 3)
    session = falcon.session(Runtime(4, LENGTH, DEPTH + 1, bucketed=bucketed))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
    fed = [0, 0, 0]
    for ends in ([5, 9, 2], [6, 13, 4], [20, 20, 20]):  # committed tokens, round by round
        for row, end in enumerate(ends):
            session.commit(slots[row], Kept(tokens[row, fed[row] + 1 : end].tolist(), hidden[row, fed[row] : end - 1]))
            fed[row] = end - 1
        drafted = torch.stack([tokens[row, end : end + DEPTH - 1] for row, end in enumerate(ends)])
        got = expand_chain(session, slots, drafted)
        for d in range(DEPTH):
            batch = at_places(tokens, hidden, [(row, end + d) for row, end in enumerate(ends)])
            close(got[d], falcon.unroll(batch, DEPTH)[d])


@pytest.mark.parametrize("block", BLOCKS)
def test_a_tree_gives_what_each_of_its_paths_gives_alone(make: Callable[[int], Falcon], block: int) -> None:
    falcon = make(block)
    parents = [-1, -1, 0, 0, 1, 2, 2, 5, 7, 4]
    drafted = sequences(falcon, 1)[0][0, 20:30].tolist()
    tree = expand_tree(drafting(falcon, [3, 0]), 0, drafted, parents)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = expand_chain(drafting(falcon, [3, 0]), [0], torch.tensor([[drafted[one] for one in path]]))
        close(tree[1 + node], alone[-1][0])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each call of the drafter's layer, how many rows were asked about."""
    calls: list[int] = []
    step = FalconSession._step

    def counting(self: FalconSession, x: Tensor, rows: Any, wanted: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(wanted))
        return step(self, x, rows, wanted)

    monkeypatch.setattr(FalconSession, "_step", counting)
    return calls


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8])
def test_a_draft_of_n_tokens_is_n_by_k_calls(
    make: Callable[[int], Falcon], block: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    falcon, calls = make(block), counted(monkeypatch)
    drafted = falcon.draft_ids[torch.ones(2, tokens - 1, dtype=torch.int64)]
    expand_chain(drafting(falcon, [3, 0]), [3, 0], drafted)
    assert calls == [2 * block] * -(-tokens // block)


@pytest.mark.parametrize("block", BLOCKS)
def test_what_follows_a_token_in_a_block_does_not_depend_on_it(make: Callable[[int], Falcon], block: int) -> None:
    falcon = make(block)
    one, other = (
        expand_chain(drafting(falcon, [0]), [0], falcon.draft_ids[torch.full((1, block), column)]) for column in (3, 90)
    )
    for level in range(block):
        assert torch.equal(one[level], other[level])
    assert not torch.allclose(one[block], other[block])
    assert not torch.allclose(one[0], one[1])


@torch.no_grad()
def test_drafted_tokens_that_training_names_are_read_behind_their_block_and_by_no_other_draft(falcon: Falcon) -> None:
    tokens, hidden = sequences(falcon, 1)
    drafted = tokens.clone()
    drafted[0, 11] = (tokens[0, 11] + 5) % 256
    places = [(0, place) for place in range(3, LENGTH)]
    true, own = (falcon.unroll(at_places(tokens, hidden, places), 4, one) for one in (None, drafted))
    changed = [[place for (_, place), a, b in zip(places, x, y, strict=True) if not torch.allclose(a, b, atol=1e-4)]
               for x, y in zip(true, own, strict=True)]  # fmt: skip
    # A draft of a third token reads the two before its place, and one of a fourth those two and three places before it.
    assert changed == [[], [], [12, 13], [13, 14]]


@torch.no_grad()
def test_states_are_the_features_that_tokens_were_drawn_from(falcon: Falcon) -> None:
    tokens, hidden = sequences(falcon, 1)
    session = drafting(falcon, [0])
    for depth in (1, 2, 3):
        session = drafting(falcon, [0])
        expand_chain(session, [0], tokens[:, 6 : 6 + depth])
        batch = at_places(tokens, hidden, [(0, 5 + depth)])
        states = falcon.drafted_states(batch, tokens[0, 5 + depth : 6 + depth], 3)
        close(session.states[0], states[depth - 1][0])
        close(falcon.said(falcon.final_norm(states[depth - 1])), falcon.unroll(batch, 3)[depth - 1])


def test_the_recurrent_part_is_what_one_step_after_the_other_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    kept, added = (torch.rand(3, 13, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    state = before = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    for place, found in enumerate(scan(kept, added, before).unbind(1)):
        state = kept[:, place] * state + added[:, place]
        torch.testing.assert_close(found, state)
    layers = [torch.nn.Linear(6, 8).double(), torch.nn.Linear(4, 8).double()]
    x, before = torch.rand(2, 9, 6, dtype=torch.float64), torch.zeros(2, 2, 4, dtype=torch.float64)
    whole = recur(x, before, layers)
    early = recur(x[:, :5], before, layers)
    torch.testing.assert_close(whole[:, 5:], recur(x[:, 5:], early[:, -1], layers))


def trace_batch(completion: int = 16) -> Any:
    traces = [make_trace(str(seed), prompt=6, completion=completion, seed=seed, width=HIDDEN) for seed in range(2)]
    return collate(traces)


def test_glances_are_shown_at_the_beginning_of_blocks_as_many_as_errors_ask_for() -> None:
    wrong, usable = torch.ones(3, 20, 4, dtype=torch.bool), torch.ones(3, 20, dtype=torch.bool)
    usable[1] = False
    shown = glances(wrong, usable, 0.25, 7)
    assert not shown[1].any()
    assert set(shown.flatten().tolist()) == {0, 1, 2, 3}  # one is always left to be learnt
    assert 160 * 0.25 - 3 < int(shown.sum()) <= 160 * 0.25
    assert torch.equal(shown, glances(wrong, usable, 0.25, 7))
    assert not torch.equal(shown, glances(wrong, usable, 0.25, 8))
    assert not glances(~wrong, usable, 0.25, 7).any()


def test_the_share_of_glances_falls_to_nothing() -> None:
    ratios = [glance_ratio(step) for step in (0, 250, 500, 1000, 5000)]
    assert ratios == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0])


@torch.no_grad()
def test_what_is_shown_is_token_and_feature_of_the_answer_and_nothing_else(falcon: Falcon) -> None:
    """The first pair of a block becomes the one that its first token is in; other blocks stay as they are."""
    tokens, hidden = sequences(falcon, 1)
    places = [(0, place) for place in range(8, 20)]
    text = falcon._text(at_places(tokens, hidden, places), 2)
    shown = torch.zeros_like(text.anchors)
    shown[0, 4] = 1
    plain, glancing = (falcon._blocks(text, 1, None, one)[0] for one in (None, shown))
    same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(plain[0], glancing[0], strict=True)]
    assert same == [column != 4 for column in range(len(same))]
    anchor = int(text.anchors[0, 4])
    for change in ("token", "feature", "later"):
        other_tokens, other_hidden = tokens.clone(), hidden.clone()
        if change == "token":
            other_tokens[0, anchor + 1] = tokens[0, anchor + 1] ^ 3
        elif change == "feature":
            other_hidden[0, anchor] += 1
        else:
            other_tokens[0, anchor + 2 :] = 7
            other_hidden[0, anchor + 1 :] += 1
        other = falcon._blocks(falcon._text(at_places(other_tokens, other_hidden, places), 2), 1, None, shown)
        assert torch.allclose(other[0][0, 4], glancing[0, 4], atol=1e-5) == (change == "later")


def test_answers_that_were_shown_are_not_learnt(falcon: Falcon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each first token is shown, only second ones are left, and nothing after such a block."""
    monkeypatch.setattr("osd.drafters.falcon.drafter.glances", lambda wrong, usable, ratio, step: usable.long())
    batch, asked = trace_batch(), []
    falcon.set_vocabulary(torch.arange(VOCABULARY))
    objective = Objective.of(TrainerSettings(), 0)
    found = Objective.mean

    def mean(self: Objective, batch: Any, depth: int, values: Tensor, left_out: Tensor | None = None) -> Tensor:
        asked.append((depth, left_out))
        return found(self, batch, depth, values, left_out)

    monkeypatch.setattr(Objective, "mean", mean)
    falcon.loss(batch, objective)
    off = dict(asked)
    inner = (batch.place > 8) & (batch.place < 17)  # what whole blocks are there for
    assert off[0][inner].all()
    assert not off[1].any()
    assert off[2][inner].all()


def test_training_goes_on_from_a_version_where_it_stopped(make: Callable[[int], Falcon], target_dir: Path) -> None:
    batch, settings = trace_batch(), TrainerSettings()
    one = make(2)
    one.set_vocabulary(torch.arange(VOCABULARY))
    for step in range(3):
        one.loss(batch, Objective.of(settings, step))
    again = from_config(one.config(), target_dir)
    again.load_weights({name: value.clone() for name, value in one.weights().items()})
    assert isinstance(again, Falcon)
    assert int(again.steps) == 3
    mine, theirs = (drafter.loss(batch, Objective.of(settings, 3)).value for drafter in (one, again))
    assert torch.equal(mine, theirs)
    again.steps.zero_()
    assert not torch.equal(theirs, again.loss(batch, Objective.of(settings, 3)).value)


def test_it_learns_a_small_target(target_dir: Path) -> None:
    """The target says tokens in a fixed order, and its states are what its head reads these from."""
    torch.manual_seed(5)
    drafter = initial(FalconSettings(vocabulary=16), target_dir, target_dir)
    assert isinstance(drafter, Falcon)
    order, length = [3, 9, 4, 1, 12, 7], 24
    logits = torch.full((16, 16), -4.0)
    for at, token in enumerate(order):
        logits[token, order[(at + 1) % len(order)]] = 4.0
    traces = [
        make_trace(str(seed), prompt=6, completion=length, seed=seed, width=HIDDEN, logits=logits.numpy(), top_k=16)
        for seed in range(3)
    ]
    batch = collate(traces)
    following = torch.arange(259)
    following[order] = torch.tensor(order[1:] + order[:1])
    batch.hidden = drafter.target_head.float()[following[batch.token_ids]]
    distiller = Distiller(drafter, TrainerSettings(learning_rate=1e-2, update_tokens=32))
    before = agreement(drafter, batch)
    for _ in range(12):
        distiller.step(batch)
    after = agreement(drafter, batch)
    assert max(before) < 0.5
    assert min(after) > 0.85, after


@torch.no_grad()
def agreement(drafter: Falcon, batch: Any, depth: int = 4) -> list[float]:
    """How often the most probable token is the target's, at each depth."""
    best = batch.target_ids.gather(1, batch.target_logp.argmax(-1, keepdim=True)).squeeze(-1)
    return [float((drafter.draft_ids[one.argmax(-1)] == best).float().mean()) for one in drafter.unroll(batch, depth)]


def test_a_version_comes_back_from_its_config_and_weights(falcon: Falcon, target_dir: Path) -> None:
    again = from_config(json.loads(json.dumps(falcon.config())), target_dir)
    again.load_weights({name: value.clone() for name, value in falcon.weights().items()})
    assert again.config() == falcon.config()
    batch = at_places(*sequences(falcon, 2), [(0, 7), (1, 25)])
    with torch.no_grad():
        for mine, theirs in zip(again.unroll(batch, 3), falcon.unroll(batch, 3), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bucketed", [False, True])
def test_loading_a_staged_version_changes_a_running_session_to_it(
    falcon: Falcon, target_dir: Path, bucketed: bool
) -> None:
    other = from_config(falcon.config(), target_dir)
    torch.manual_seed(11)
    for parameter in other.trained().values():
        parameter.data.normal_(0, 0.1)
    other.adapt_vocabulary(torch.rand(259))
    session, goal = (drafting(one, [0], falcon, bucketed=bucketed) for one in (falcon, other))
    for version in (other, falcon, other):  # over what the others left behind
        session.load(session.stage(version.weights()))
    assert torch.equal(session.support, other.draft_ids)
    nothing = torch.empty(1, 0, dtype=torch.int64)
    mine, theirs = (expand_chain(one, [0], nothing)[0] for one in (session, goal))
    assert torch.equal(mine, theirs)


@torch.no_grad()
def test_the_first_version_starts_from_the_target(target_dir: Path) -> None:
    drafter = initial(FalconSettings(vocabulary=100_000), target_dir, target_dir)
    assert isinstance(drafter, Falcon)
    assert drafter.needs.taps == (3,)
    assert drafter.draft_ids.tolist() == list(range(259))
    tokens, hidden = sequences(drafter, 1)
    hidden = hidden * 7
    text = drafter._text(at_places(tokens, hidden, [(0, 9)]), 2)
    read = text.states[0, :, -1]
    assert float(torch.cosine_similarity(read[1:], hidden[0, 1:-1]).mean()) > 0.8


Spoil = Callable[[dict[str, Tensor]], object]
SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda w: w.pop("o_proj.weight"), "'o_proj.weight' is missing"),
    "another kind's": (lambda w: w.update({"fuse.weight": torch.ones(2)}), "'fuse.weight' is unknown"),
    "shape": (lambda w: w.update({"mlp_norm.weight": torch.ones(65)}), r"'mlp_norm.weight' has shape \[65\] instead"),
    "nan": (lambda w: w["q_proj.weight"].view(-1)[-1:].fill_(float("nan")), "'q_proj.weight' has numbers that are not"),
    "maps": (lambda w: w["d2t"][-1:].add_(1000), "'d2t' and 't2d' do not describe the same"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_version_that_does_not_fit_is_refused_by_name(falcon: Falcon, name: str) -> None:
    spoil, message = SPOILT[name]
    session, before = falcon.session(Runtime(1, LENGTH, 3)), {k: v.clone() for k, v in falcon.weights().items()}
    weights = {k: v.clone() for k, v in before.items()}
    spoil(weights)
    for take in (session.stage, falcon.load_weights):
        with pytest.raises(DrafterError, match=message):
            take(weights)
    assert all(torch.equal(value, before[k]) for k, value in falcon.weights().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "is for another target: its layers is 3, not 4"),
        ({"surprise": 1}, "does not describe a falcon drafter: surprise is unknown"),
        ({"heads": 3}, "is for another target: its heads is 3, not 4"),
        ({"hidden": 63}, "is for another target: its hidden is 63, not 64"),
        ({"block": 0}, "block is 0, but must be a whole number of at least 1"),
        ({"vocabulary": -1}, "vocabulary is -1, but must be a whole number of at least 1"),
    ],
)
def test_a_config_of_something_else_is_refused(
    falcon: Falcon, target_dir: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        from_config(falcon.config() | change, target_dir)


def test_a_version_of_another_target_is_refused(falcon: Falcon, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is for another target: its layers is 4, not 2"):
        from_config(falcon.config(), make_tiny(tmp_path, layers=2))


def test_without_hidden_states_it_cannot_learn(falcon: Falcon) -> None:
    with pytest.raises(DrafterError, match="falcon learns from hidden states, and the trace has none"):
        falcon.unroll(at_places(sequences(falcon, 1)[0], None, [(0, 5)]), 1)


def test_settings_name_it_alone_and_beside_recall() -> None:
    alone = load_settings(overrides=["drafter.kind=falcon", "drafter.block=3"], environ={})
    assert alone.drafter == FalconSettings(block=3)
    beside = load_settings(overrides=["drafter.trained.kind=falcon", "drafter.trained.block=3"], environ={})
    assert beside.drafter.distilled == alone.drafter
    for block, limit in ((1, "at least 2, not 1"), (5, "at most 4, not 5")):
        with pytest.raises(ConfigError, match=rf"drafter\.block \(--set\) must be {limit}"):
            load_settings(overrides=["drafter.kind=falcon", f"drafter.block={block}"], environ={})
    with pytest.raises(ConfigError, match=r"drafter\.layers .* is not read by kind falcon"):
        load_settings(overrides=["drafter.kind=falcon", "drafter.layers=2"], environ={})
