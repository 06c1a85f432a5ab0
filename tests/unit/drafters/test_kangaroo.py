"""Kangaroo: serving and training see the same states, and the law of the output is the target's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from osd.config import ConfigError, KangarooSettings, load_settings
from osd.drafters import DrafterError, from_config, initial
from osd.drafters.kangaroo.drafter import Kangaroo
from osd.drafters.kangaroo.session import KangarooSession
from osd.drafters.session import Kept, Runtime
from osd.runtime.batch import following
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.unit.drafters.sequences import at_places, expand_chain, expand_tree

VOCABULARY, LENGTH, HIDDEN, EXIT = 150, 30, 64, 2
NOTHING = torch.empty(0, dtype=torch.int64)


@pytest.fixture
def kangaroo(target_dir: Path) -> Kangaroo:
    """Random weights that bfloat16 holds exactly, and a draft vocabulary with gaps."""
    drafter = initial(KangarooSettings(vocabulary=VOCABULARY, exit_layer=EXIT), target_dir, target_dir)
    assert isinstance(drafter, Kangaroo)
    torch.manual_seed(3)
    drafter.adapt_vocabulary(torch.rand(259))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.bfloat16().float())
    return drafter


class Reading:
    """A session on a target that reads each text as an engine has it read."""

    def __init__(self, drafter: Kangaroo, target_dir: Path, slots: int = 4, bucketed: bool = False) -> None:
        model, how = load_model(target_dir, "float32", "cpu"), {"slots": slots, "context": LENGTH, "scratch": 8}
        self.target = SlotModel(model, taps=(EXIT - 1,), bucketed=bucketed, **how)
        session = drafter.session(Runtime(**how, target=self.target, bucketed=bucketed))
        assert isinstance(session, KangarooSession)
        self.session = session

    def read(self, slot: int, tokens: list[int]) -> None:
        """Commit all tokens of a text that were not yet: the last of them is not fed to the target."""
        start = self.target.cache.length[slot]
        if not start:
            self.session.open(slot, tokens[0])
        states = self.target.forward(following(slot, start, tokens[start:-1]), NOTHING).hidden
        self.target.cache.length[slot] = len(tokens) - 1
        self.session.commit(slot, Kept(tokens[start + 1 :], states))


@pytest.fixture
def hidden_of(target_dir: Path) -> Callable[[Tensor], Tensor]:
    """The target's states at the exit after each of some tokens [B, L]."""
    target = SlotModel(
        load_model(target_dir, "float32", "cpu"), slots=1, context=2 * LENGTH, scratch=1, taps=(EXIT - 1,)
    )

    def states(tokens: Tensor) -> Tensor:
        found = [target.forward(following(0, 0, row), NOTHING).hidden for row in tokens.tolist()]
        return torch.stack([one for one in found if one is not None])

    return states


def texts(kangaroo: Kangaroo, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return kangaroo.draft_ids[torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)]


def close(got: Tensor, goal: Tensor) -> None:
    """As near as rows that the kernels of some CPUs round to bfloat16."""
    assert float((got - goal).norm() / goal.norm()) < 5e-3
    torch.testing.assert_close(got, goal, rtol=5e-3, atol=1e-2 * float(goal.abs().max()))


@pytest.mark.parametrize("bucketed", [False, True], ids=["kernels", "bucketed"])
def test_serving_and_training_see_the_same_inputs(
    kangaroo: Kangaroo, target_dir: Path, hidden_of: Callable[[Tensor], Tensor], bucketed: bool
) -> None:
    depth, slots, tokens = 4, [2, 0, 3], texts(kangaroo, 3)
    hidden, reading = hidden_of(tokens), Reading(kangaroo, target_dir, bucketed=bucketed)
    for ends in ([5, 9, 2], [6, 13, 4], [20, 20, 20]):  # committed tokens, round by round
        for row, end in enumerate(ends):
            reading.read(slots[row], tokens[row, :end].tolist())
        drafted = torch.stack([tokens[row, end : end + depth - 1] for row, end in enumerate(ends)])
        got = expand_chain(reading.session, slots, drafted)
        with torch.no_grad():
            for d in range(depth):
                batch = at_places(tokens, hidden, [(row, end + d) for row, end in enumerate(ends)])
                close(got[d], kangaroo.unroll(batch, depth)[d])


def test_a_tree_gives_what_each_of_its_paths_gives_alone(
    kangaroo: Kangaroo, target_dir: Path, hidden_of: Callable[[Tensor], Tensor]
) -> None:
    tokens, reading = texts(kangaroo, 1), Reading(kangaroo, target_dir)
    parents, drafted = [-1, -1, 0, 0, 1], tokens[0, 20:25].tolist()
    reading.read(1, tokens[0, :10].tolist())
    tree = expand_tree(reading.session, 1, drafted, parents)
    for node, path in enumerate([[0], [1], [0, 2], [0, 3], [1, 4]]):
        text = torch.cat([tokens[:, :10], tokens[:, 20:][:, path], tokens[:, :1]], 1)
        with torch.no_grad():
            goal = kangaroo.unroll(at_places(text, hidden_of(text), [(0, 10 + len(path))]), 1)[0][0]
        close(tree[1 + node], goal)


@torch.inference_mode()
def test_its_own_tokens_are_read_as_if_the_text_went_on_with_them_and_by_their_own_places_only(
    kangaroo: Kangaroo, hidden_of: Callable[[Tensor], Tensor]
) -> None:
    depth, tokens = 3, texts(kangaroo, 2)
    drafted = tokens.clone()
    for row, place in ((0, 7), (0, 8), (0, 20), (1, 28)):
        drafted[row, place] = (tokens[row, place] + 5) % 256
    batch = at_places(tokens, hidden_of(tokens), [(row, place) for row in range(2) for place in range(1, LENGTH)])
    found, true = kangaroo.unroll(batch, depth, drafted), kangaroo.unroll(batch, depth)
    close(found[0], true[0])
    changed = 0
    for index, (row, place) in enumerate(zip(batch.sequence.tolist(), batch.place.tolist(), strict=True)):
        text = tokens.clone()
        text[row, place - 1] = drafted[row, place - 1]
        alone = kangaroo.unroll(at_places(text, hidden_of(text), [(row, place)]), 1)[0][0]
        changed += not torch.allclose(alone, true[0][index], atol=0.1)
        for step in (1, 2):
            close(found[step][index], alone)
    assert changed == 4


@torch.inference_mode()
def test_the_states_that_a_head_judges_are_those_of_the_session(
    kangaroo: Kangaroo, target_dir: Path, hidden_of: Callable[[Tensor], Tensor]
) -> None:
    tokens, reading, ends, depth = texts(kangaroo, 2), Reading(kangaroo, target_dir), [7, 19], 3
    drafted = kangaroo.draft_ids[torch.tensor([[3, 9, 20], [7, 7, 1]])]
    for row, end in enumerate(ends):
        reading.read(row, tokens[row, :end].tolist())
    expand_chain(reading.session, [0, 1], drafted)
    got = reading.session.states  # after the last of the drafted tokens
    places = [(row, end + d) for d in range(depth) for row, end in enumerate(ends)]
    states = kangaroo.drafted_states(at_places(tokens, hidden_of(tokens), places), drafted.T.flatten(), depth)
    close(got, states[depth - 1][-2:])


def test_a_version_comes_back_from_its_config_and_weights(
    kangaroo: Kangaroo, target_dir: Path, hidden_of: Callable[[Tensor], Tensor]
) -> None:
    again = from_config(json.loads(json.dumps(kangaroo.config())), target_dir)
    assert isinstance(again, Kangaroo)
    again.load_weights({name: value.clone() for name, value in kangaroo.weights().items()})
    tokens = texts(kangaroo, 1)
    batch = at_places(tokens, hidden_of(tokens), [(0, 7), (0, 25)])
    assert again.config() == kangaroo.config()
    with torch.no_grad():
        assert torch.equal(again.unroll(batch, 1)[0], kangaroo.unroll(batch, 1)[0])


@torch.inference_mode()
def test_loading_a_staged_version_changes_a_running_session_to_it(kangaroo: Kangaroo, target_dir: Path) -> None:
    torch.manual_seed(9)
    weights = {
        name: (value + torch.randn_like(value) * 0.1).bfloat16().float() if value.is_floating_point() else value
        for name, value in kangaroo.weights().items()
    }
    running = Reading(kangaroo, target_dir)
    running.session.load(running.session.stage(weights))
    kangaroo.load_weights(weights)
    fresh, tokens, found = Reading(kangaroo, target_dir), texts(kangaroo, 1)[0, :10].tolist(), []
    for one in (running, fresh):
        one.read(0, tokens)
        found.append(expand_chain(one.session, [0], torch.empty(1, 0, dtype=torch.int64))[0])
    assert torch.equal(*found)


def test_the_first_version_starts_from_the_target(target_dir: Path) -> None:
    drafter = initial(KangarooSettings(vocabulary=100_000), target_dir, target_dir)
    assert isinstance(drafter, Kangaroo)
    target = load_model(target_dir, "float32", "cpu").state_dict()
    assert (drafter.shape.exit_layer, drafter.needs.taps, drafter.needs.layers) == (1, (0,), range(1))
    assert drafter.draft_ids.tolist() == list(range(259))
    assert torch.equal(drafter.head.weight, drafter.target_head.float())
    assert torch.equal(drafter.q_proj.weight, target["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(drafter.norm.weight, target["model.norm.weight"])
    assert drafter.trained().keys() == {
        "state_norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "norm.weight",
    }  # fmt: skip


def test_adapting_the_vocabulary_takes_the_targets_rows(kangaroo: Kangaroo) -> None:
    counts = torch.zeros(259)
    counts[torch.arange(109, 259)] = torch.arange(150).float() + 1
    kangaroo.adapt_vocabulary(counts)
    assert kangaroo.draft_ids.tolist() == list(range(109, 259))
    assert torch.equal(kangaroo.head.weight, kangaroo.target_head[109:].float())


@pytest.mark.parametrize("exit_layer", [4, 9])
def test_an_exit_that_leaves_no_layer_to_verify_with_is_refused(target_dir: Path, exit_layer: int) -> None:
    message = f"^drafter.exit_layer is {exit_layer}, but must be from 1 to 3: the target has 4 layers$"
    with pytest.raises(DrafterError, match=message):
        initial(KangarooSettings(exit_layer=exit_layer), target_dir, target_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exit_layer": 4}, "exit_layer is 4, but must be from 1 to 3: the target has 4 layers"),
        ({"target_vocabulary": 260}, r"the target's head is \[259, 64\], the drafter is for another target"),
        ({"surprise": 1}, "does not describe a kangaroo drafter.*surprise"),
        ({"hidden": 63}, r"the target's head is \[259, 64\], the drafter is for another target"),
        ({"heads": 0}, "heads is 0, but must be a whole number of at least 1"),
        ({"kv_heads": 3}, "heads is 4, but must be a multiple of kv_heads, which is 3"),
        ({"head_dim": 15}, "head_dim is 15, but must be even"),
        ({"vocabulary": 260}, "vocabulary is 260, but must be at most 259, the target's"),
    ],
)
def test_a_config_of_another_target_is_refused(
    kangaroo: Kangaroo, target_dir: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        from_config(kangaroo.config() | change, target_dir)


Spoil = Callable[[dict[str, Tensor]], object]
SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing": (lambda w: w.pop("o_proj.weight"), "'o_proj.weight' is missing"),
    "unknown": (lambda w: w.update(surprise=torch.ones(2)), "'surprise' is unknown"),
    "shape": (lambda w: w.update({"norm.weight": torch.ones(65)}), r"'norm.weight' has shape \[65\] instead of \[64\]"),
    "nan": (lambda w: w["head.weight"].view(-1)[-1:].fill_(float("nan")), "'head.weight' has numbers that are not"),
    "maps": (lambda w: w["d2t"][-1:].add_(1), "'d2t' and 't2d' do not describe the same"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_version_that_does_not_fit_is_refused_by_name(kangaroo: Kangaroo, target_dir: Path, name: str) -> None:
    spoil, message = SPOILT[name]
    weights = {k: v.clone() for k, v in kangaroo.weights().items()}
    spoil(weights)
    for refuse in (Reading(kangaroo, target_dir).session.stage, kangaroo.load_weights):
        with pytest.raises(DrafterError, match=message):
            refuse(weights)


def test_without_hidden_states_it_cannot_learn_and_without_a_target_it_cannot_draft(kangaroo: Kangaroo) -> None:
    with pytest.raises(DrafterError, match="kangaroo learns from hidden states, and the trace has none"):
        kangaroo.unroll(at_places(texts(kangaroo, 1), None, [(0, 5)]), 1)
    with pytest.raises(DrafterError, match="a kangaroo drafter runs layers of its target, and has none here"):
        kangaroo.session(Runtime(1, LENGTH, 3))


def test_settings_name_it_alone_and_beside_recall() -> None:
    alone = load_settings(overrides=["drafter.kind=kangaroo", "drafter.exit_layer=3"], environ={})
    assert alone.drafter == KangarooSettings(exit_layer=3)
    beside = load_settings(overrides=["drafter.trained.kind=kangaroo", "drafter.trained.exit_layer=3"], environ={})
    assert beside.drafter.distilled == alone.drafter
    with pytest.raises(ConfigError, match=r"drafter\.exit_layer \(--set\) must be at least 1, not 0"):
        load_settings(overrides=["drafter.kind=kangaroo", "drafter.exit_layer=0"], environ={})
    with pytest.raises(ConfigError, match=r"drafter\.layers .* is not read by kind kangaroo"):
        load_settings(overrides=["drafter.kind=kangaroo", "drafter.layers=2"], environ={})
