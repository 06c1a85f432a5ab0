"""Prompt tokens of a draft model: one call says several tokens, serving and training see the same, and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from osd.config import ConfigError, LanguageModelSettings, TrainerSettings, load_settings
from osd.drafters import DrafterError, from_config, initial
from osd.drafters.formats import FormatError, Origin, write
from osd.drafters.language_model.drafter import LanguageModel
from osd.drafters.session import Kept, Runtime
from osd.learning.batch import DistillBatch, collate
from osd.learning.distiller import Distiller
from osd.learning.objective import Objective
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.unit.drafters.other_tokens import make_pair
from tests.unit.drafters.sequences import at_places, expand_chain, expand_tree
from tests.unit.drafters.test_language_model import own, rounded
from tests.unit.learning.toys import make_trace

LENGTH, AHEAD = 30, 2


def with_prompts(drafter: LanguageModel, tokens: int = AHEAD) -> LanguageModel:
    torch.manual_seed(6)
    made = rounded(LanguageModel(drafter.model, drafter.shared, drafter.translation, tokens))
    assert made.lookahead is not None
    with torch.no_grad():
        made.lookahead.prompts.normal_(0, 0.3)
        made.lookahead.prompts.copy_(made.lookahead.prompts.bfloat16().float())
    return made


def first_layers(target_dir: Path) -> LanguageModel:
    return rounded(LanguageModel.first_layers(load_model(target_dir, "float32", "cpu"), 2))


@pytest.fixture(params=["first layers", "gpt_neox"])
def drafter(request: pytest.FixtureRequest, target_dir: Path) -> LanguageModel:
    return with_prompts(first_layers(target_dir) if request.param == "first layers" else own(request.param))


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, goal: Tensor) -> None:
    assert float((got - goal).norm() / goal.norm()) < 0.03  # the session computes in bfloat16


@pytest.mark.parametrize("bucketed", [False, True], ids=["kernels", "bucketed"])
def test_serving_and_training_see_the_same(drafter: LanguageModel, bucketed: bool) -> None:
    """Five tokens deep: what two calls say, of which the second reads drafted tokens."""
    depth, slots, tokens = 5, [2, 0], tokens_of(2)
    session = drafter.session(Runtime(3, LENGTH, depth + 1, bucketed=bucketed))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
    fed = [1, 1]
    for ends in ([5, 9], [6, 12], [20, 13]):
        for row, end in enumerate(ends):
            session.commit(slots[row], Kept(tokens[row, fed[row] : end].tolist(), None))
            fed[row] = end
        drafted = torch.stack([tokens[row, end : end + depth - 1] for row, end in enumerate(ends)])
        got = expand_chain(session, slots, drafted)
        with torch.no_grad():
            for d in range(depth):
                batch = at_places(tokens, None, [(row, end + d) for row, end in enumerate(ends)])
                close(got[d], drafter.unroll(batch, depth)[d])


def test_a_tree_gives_what_each_of_its_paths_gives_alone(drafter: LanguageModel) -> None:
    """Nodes 5 to 7 are four deep, so that a second call reads paths that share a beginning, each once."""
    tokens = tokens_of(1)
    parents, drafted = [-1, -1, 0, 0, 1, 2, 2, 4, 5, 6], tokens[0, 15:25].tolist()
    session = drafter.session(Runtime(2, LENGTH, 11))
    session.open(1, int(tokens[0, 0]))
    session.commit(1, Kept(tokens[0, 1:10].tolist(), None))
    tree = expand_tree(session, 1, drafted, parents)
    for path in [0], [0, 3], [1, 4], [0, 2, 5], [1, 4, 7], [0, 2, 5, 8], [0, 2, 6, 9]:
        sequence = torch.cat([tokens[:, :10], tokens[:, 15:][:, path], tokens[:, :1]], 1)
        with torch.no_grad():
            batch = at_places(sequence, None, [(0, 10 + len(path))])
            close(tree[1 + path[-1]], drafter.unroll(batch, 1 + len(path))[len(path)][0])


def test_a_chain_costs_one_call_where_it_cost_one_for_each_token(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = [0], SlotModel.forward

    def counted(self: SlotModel, *given: Any) -> Any:
        calls[0] += 1
        return forward(self, *given)

    monkeypatch.setattr(SlotModel, "forward", counted)
    plain = first_layers(target_dir)
    for one, expected in ((plain, 6), (with_prompts(plain, 2), 2), (with_prompts(plain, 5), 1)):
        session, calls[0] = one.session(Runtime(1, LENGTH, 7)), 0
        session.open(0, 1)
        session.commit(0, Kept([2, 3]))
        said = expand_chain(session, [0], tokens_of(1)[:, :5])
        assert (len(said), calls[0]) == (6, expected)
    chains = with_prompts(plain, 2).session(Runtime(2, LENGTH, 7))
    for slot in (0, 1):
        chains.open(slot, 1)
    calls[0] = 0
    drafted = chains.chains([0, 1], [3, 0], 0.5)
    assert drafted is not None
    assert [len(tokens) for tokens in drafted.tokens] == [3, 0]
    assert calls[0] == 1
    assert chains.chains([0, 1], [4, 4], 0.5) is None


@torch.inference_mode()
def test_its_own_tokens_are_read_where_a_second_call_reads_them(drafter: LanguageModel) -> None:
    depth, tokens = 6, tokens_of(1)
    drafted = tokens.clone()
    drafted[0, 11] = (tokens[0, 11] + 5) % 256
    batch = at_places(tokens, None, [(0, 12), (0, 13), (0, 14), (0, 15)])
    found, true = drafter.unroll(batch, depth, drafted), drafter.unroll(batch, depth)
    other = drafter.unroll(at_places(drafted, None, [(0, 12), (0, 13), (0, 14), (0, 15)]), depth)
    for step in range(depth):
        # A second call, from step 3 on, read place 11 last where it is as many places before as the step is into it.
        for index in range(4):
            goal = other if step >= 3 and step % 3 == index else true
            torch.testing.assert_close(found[step][index], goal[step][index], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[3][0], true[3][0], atol=1e-3)


def test_the_states_that_a_head_judges_are_those_of_the_session(drafter: LanguageModel) -> None:
    """Five tokens deep, each state where the token was drawn from."""
    tokens, depth = tokens_of(1), 5
    session = drafter.session(Runtime(1, LENGTH, depth + 1, states=True))
    session.open(0, int(tokens[0, 0]))
    session.commit(0, Kept(tokens[0, 1:10].tolist()))
    kept: list[Tensor] = []

    class Noting:
        support = session.support

        def expand(self, *asked: Any) -> Tensor:
            logits = session.expand(*asked)
            kept.append(session.states[0])
            return logits

    expand_chain(Noting(), [0], tokens[:, 10 : 10 + depth])  # type: ignore[arg-type]
    assert not kept[0].any()
    with torch.no_grad():
        for d in range(depth):
            batch = at_places(tokens, None, [(0, 10 + d)])
            close(kept[1 + d], drafter.drafted_states(batch, tokens[0, 10 + d : 11 + d], depth)[d][0])


def batch_of(seed: int = 1, completion: int = 40) -> DistillBatch:
    return collate([make_trace(f"{n}", prompt=3 + n, completion=completion, seed=seed + n) for n in range(2)])


def test_the_loss_is_the_models_own_and_what_each_prompt_token_says_behind_the_cuts(target_dir: Path) -> None:
    plain, batch = first_layers(target_dir), batch_of(completion=12)
    drafter, objective = with_prompts(plain), Objective.of(TrainerSettings(), 0)
    goal = plain.loss(batch, objective).value
    for level, logits in enumerate(drafter.unroll(batch, 1 + AHEAD)[1:]):
        there = torch.tensor([
            bool(((batch.sequence == s) & (batch.place == p - level)).any())
            for s, p in zip(batch.sequence.tolist(), batch.place.tolist(), strict=True)
        ]) & (batch.place - level >= 2)  # fmt: skip
        goal = goal + 0.8**level / AHEAD * objective.loss(batch.select(there), [logits[there]], None).value
    assert drafter.loss(batch, objective).value.item() == pytest.approx(goal.item(), rel=1e-4)


def gradients(drafter: LanguageModel, batch: DistillBatch) -> dict[str, Tensor]:
    drafter.zero_grad()
    drafter.loss(batch, Objective.of(TrainerSettings(samples="student"), 0)).value.backward()
    return {name: weight.grad.clone() for name, weight in drafter.named_parameters() if weight.grad is not None}


def test_prompt_tokens_learn_from_the_model_as_it_stands_and_move_nothing_of_it(drafter: LanguageModel) -> None:
    batch = batch_of()
    mine, plain = gradients(drafter, batch), LanguageModel(drafter.model, drafter.shared)
    alone = gradients(plain, batch)
    assert mine.keys() - alone.keys() == {"lookahead.prompts"}
    for name, gradient in alone.items():
        torch.testing.assert_close(mine[name], gradient)
    assert (mine["lookahead.prompts"].norm(dim=1) > 0).all()


def test_they_learn_faster_than_the_model_and_go_on_from_a_checkpoint(target_dir: Path) -> None:
    drafter, batch = with_prompts(first_layers(target_dir)), batch_of()
    settings = TrainerSettings(learning_rate=1e-3, update_tokens=1)
    before = {name: weight.detach().clone() for name, weight in drafter.trained().items()}
    distiller = Distiller(drafter, settings)
    distiller.step(batch)
    moved = {name: float((weight - before[name]).detach().abs().max()) for name, weight in drafter.trained().items()}
    assert moved.pop("lookahead.prompts") == pytest.approx(1e-2, rel=0.1)
    assert max(moved.values()) == pytest.approx(1e-3, rel=0.1)
    tensors, counters = distiller.state_dict()
    saved = {name: value.clone() for name, value in tensors.items()}
    losses = [distiller.step(batch_of(seed)).loss for seed in (5, 6)]
    again = Distiller(with_prompts(first_layers(target_dir)), settings)
    again.load_state_dict(saved, counters)
    assert [again.step(batch_of(seed)).loss for seed in (5, 6)] == losses


def test_a_version_comes_back_from_its_config_and_weights(drafter: LanguageModel, target_dir: Path) -> None:
    again = from_config(json.loads(json.dumps(drafter.config())), target_dir)
    again.load_weights({name: value.clone() for name, value in drafter.weights().items()})
    assert again.config() == drafter.config()
    assert drafter.config()["prompt_tokens"] == AHEAD
    batch = at_places(tokens_of(2), None, [(0, 7), (1, 25)])
    with torch.no_grad():
        for mine, theirs in zip(again.unroll(batch, 3), drafter.unroll(batch, 3), strict=True):
            close(mine, theirs)
    plain = LanguageModel(drafter.model, drafter.shared)
    assert "prompt_tokens" not in plain.config()
    with pytest.raises(DrafterError, match=r"'lookahead\.prompts' is unknown"):
        plain.load_weights(drafter.weights())


def test_loading_a_staged_version_changes_a_running_session_to_it(drafter: LanguageModel) -> None:
    torch.manual_seed(9)
    weights = {
        name: (value + torch.randn_like(value) * 0.1).bfloat16().float() if value.is_floating_point() else value
        for name, value in drafter.weights().items()
    }
    session, tokens = drafter.session(Runtime(1, LENGTH, 5)), tokens_of(1)
    staged = session.stage(weights)
    with torch.inference_mode():
        session.load(staged)
    drafter.load_weights(weights)
    fresh = drafter.session(Runtime(1, LENGTH, 5))
    for s in (session, fresh):
        s.open(0, int(tokens[0, 0]))
        s.commit(0, Kept(tokens[0, 1:10].tolist(), None))
    found = (expand_chain(s, [0], tokens[:, 10:14]) for s in (session, fresh))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    del weights["lookahead.prompts"]
    with pytest.raises(DrafterError, match=r"'lookahead\.prompts' is missing"):
        session.stage(weights)


def test_a_draft_model_of_other_tokens_looks_ahead_too(tmp_path: Path) -> None:
    target_dir, source = make_pair(tmp_path)
    drafter = initial(LanguageModelSettings(source=str(source), prompt_tokens=2), target_dir, target_dir)
    assert isinstance(drafter, LanguageModel)
    rounded(drafter)
    tokens = tokens_of(1)
    session = drafter.session(Runtime(1, LENGTH, 6))
    session.open(0, int(tokens[0, 0]))
    session.commit(0, Kept(tokens[0, 1:12].tolist()))
    shared = session.support
    assert shared is not None
    drafted = shared[torch.tensor([[3, 50, 20, 7]])]
    text = torch.cat([tokens[:, :12], drafted, tokens[:, :2]], 1)
    got = expand_chain(session, [0], drafted)
    with torch.no_grad():
        for d in range(5):
            close(got[d][0], drafter.unroll(at_places(text, None, [(0, 12 + d)]), 5)[d][0])


def test_a_text_as_long_as_the_models_positions_leaves_room_for_its_prompt_tokens() -> None:
    plain = own("gpt_neox")
    plain.model.config.max_position_embeddings = 16
    session = with_prompts(plain).session(Runtime(1, LENGTH, 4))
    assert session.model.context == 16 - 4 - AHEAD
    session.open(0, 1)
    session.commit(0, Kept([2] * 20))
    expand_chain(session, [0], tokens_of(1)[:, :2])
    assert session.model.cache.length[0] <= session.model.context


def test_it_is_exported_in_no_format(target_dir: Path, tmp_path: Path) -> None:
    origin = Origin("general", 1, str(target_dir), target_dir, 3)
    with pytest.raises(FormatError, match=r"^transformers has no place for prompt tokens, and this drafter has 2$"):
        write(with_prompts(first_layers(target_dir)), "transformers", origin, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_say_how_many_there_are() -> None:
    beside = load_settings(None, ["drafter.trained.kind=language_model", "drafter.trained.prompt_tokens=3"], {})
    assert beside.drafter.distilled.prompt_tokens == 3
    with pytest.raises(ConfigError, match=r"drafter\.prompt_tokens \(--set\) must be at most 8, not 9"):
        load_settings(None, ["drafter.kind=language_model", "drafter.prompt_tokens=9"], {})


def test_a_model_that_scales_what_it_looks_up_is_refused() -> None:
    model: nn.Module = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16,
        )
    )  # fmt: skip
    with pytest.raises(DrafterError, match="no prompt token can stand beside the draft model's words: Gemma3"):
        LanguageModel(model, shared=False, prompt_tokens=2)
