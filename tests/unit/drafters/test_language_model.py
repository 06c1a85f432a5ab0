"""Language models as drafters: the target's first layers, or a model of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from osd.config import LanguageModelSettings
from osd.drafters import DrafterError, from_config, initial
from osd.drafters.language_model.drafter import LanguageModel
from osd.drafters.session import Kept, Runtime
from osd.target.model import load_model
from tests.tiny import make_tiny
from tests.unit.drafters.sequences import at_places, expand_chain, expand_tree

LENGTH = 30
OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "gpt_neox": {"num_key_value_heads": None},
}


def own(kind: str, vocabulary: int = 259, seed: int = 1) -> LanguageModel:
    settings = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        **OWN[kind],
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{key: value for key, value in settings.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return rounded(LanguageModel(model, shared=False))


def rounded(drafter: LanguageModel) -> LanguageModel:
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return drafter


@pytest.fixture(params=["first layers", *OWN])
def drafter(request: pytest.FixtureRequest, target_dir: Path) -> LanguageModel:
    if request.param in OWN:
        return own(request.param)
    return rounded(LanguageModel.first_layers(load_model(target_dir, "float32", "cpu"), 2))


def tokens_of(count: int) -> Tensor:
    return torch.randint(0, 256, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, goal: Tensor) -> None:
    assert float((got - goal).norm() / goal.norm()) < 0.02  # the session computes in bfloat16


def test_serving_and_training_see_the_same_inputs(drafter: LanguageModel) -> None:
    depth, slots, tokens = 3, [2, 0], tokens_of(2)
    session = drafter.session(Runtime(3, LENGTH, depth + 1))
    for row, slot in enumerate(slots):
        session.open(slot, int(tokens[row, 0]))
    fed = [1, 1]
    for ends in ([5, 9], [6, 12], [20, 13]):
        for row, end in enumerate(ends):
            session.commit(slots[row], Kept(tokens[row, fed[row] : end].tolist(), None))
            fed[row] = end
        got = expand_chain(session, slots, torch.stack([tokens[row, end : end + 2] for row, end in enumerate(ends)]))
        with torch.no_grad():
            for d in range(depth):
                batch = at_places(tokens, None, [(row, end + d) for row, end in enumerate(ends)])
                close(got[d], drafter.unroll(batch, depth)[d])


def test_a_tree_gives_what_each_of_its_paths_gives_alone(drafter: LanguageModel) -> None:
    tokens = tokens_of(1)
    parents, drafted = [-1, -1, 0, 0, 1], tokens[0, 20:25].tolist()
    session = drafter.session(Runtime(2, LENGTH, 7))
    session.open(1, int(tokens[0, 0]))
    session.commit(1, Kept(tokens[0, 1:10].tolist(), None))
    tree = expand_tree(session, 1, drafted, parents)
    for node, path in enumerate([[0], [1], [0, 2], [0, 3], [1, 4]]):
        sequence = torch.cat([tokens[:, :10], tokens[:, 20:][:, path], tokens[:, :1]], 1)
        with torch.no_grad():
            close(tree[1 + node], drafter.unroll(at_places(sequence, None, [(0, 10 + len(path))]), 1)[0][0])


def test_right_padding_of_shorter_sequences_changes_nothing(drafter: LanguageModel) -> None:
    tokens = tokens_of(2)
    batch = at_places(tokens, None, [(0, 12), (1, 25)])
    with torch.no_grad():
        before = drafter.unroll(batch, 1)[0]
        batch.lengths = torch.tensor([13, LENGTH])
        batch.token_ids = tokens.clone()
        batch.token_ids[0, 13:] = 0
        torch.testing.assert_close(drafter.unroll(batch, 1)[0], before, rtol=1e-4, atol=1e-4)


def test_a_version_comes_back_from_its_config_and_weights(drafter: LanguageModel, target_dir: Path) -> None:
    again = from_config(json.loads(json.dumps(drafter.config())), target_dir)
    assert again.weights().keys() == drafter.weights().keys()
    again.load_weights({name: value.clone() for name, value in drafter.weights().items()})
    batch = at_places(tokens_of(2), None, [(0, 7), (1, 25)])
    with torch.no_grad():
        a, b = again.unroll(batch, 1)[0], drafter.unroll(batch, 1)[0]
    # The target's embedding is as the target has it; here it was rounded.
    assert float((a - b).norm() / b.norm()) < 0.02 if drafter.shared else torch.equal(a, b)


def test_loading_a_staged_version_changes_a_running_session_to_it(drafter: LanguageModel) -> None:
    torch.manual_seed(9)
    weights = {
        name: (value + torch.randn_like(value) * 0.1).bfloat16().float() for name, value in drafter.weights().items()
    }
    session, tokens, nothing = (
        drafter.session(Runtime(1, LENGTH, 3)),
        tokens_of(1),
        torch.empty(1, 0, dtype=torch.int64),
    )
    staged = session.stage(weights)
    with torch.inference_mode():
        session.load(staged)
    drafter.load_weights(weights)
    fresh = drafter.session(Runtime(1, LENGTH, 3))
    for s in (session, fresh):
        s.open(0, int(tokens[0, 0]))
        s.commit(0, Kept(tokens[0, 1:10].tolist(), None))
    torch.testing.assert_close(expand_chain(session, [0], nothing)[0], expand_chain(fresh, [0], nothing)[0])


def test_a_version_that_does_not_fit_is_refused_by_name(drafter: LanguageModel) -> None:
    session, name = drafter.session(Runtime(1, LENGTH, 3)), sorted(drafter.weights())[0]
    for value, message in ((None, "is missing"), (torch.ones(3, 5), "has shape"), (torch.nan, "not finite")):
        weights = {key: tensor.clone() for key, tensor in drafter.weights().items()}
        if value is None:
            del weights[name]
        elif isinstance(value, float):
            weights[name].view(-1)[0] = value
        else:
            weights[name] = value
        with pytest.raises(DrafterError, match=f"{name}.*{message}"):
            session.stage(weights)


def test_the_targets_own_embedding_and_head_are_neither_stored_nor_trained(target_dir: Path) -> None:
    drafter = initial(LanguageModelSettings(layers=2), target_dir, target_dir)
    assert drafter.needs.taps == ()
    assert drafter.draft_ids is None
    assert not [name for name in drafter.weights() if "embed" in name or "head" in name]
    assert {name.split(".")[2] for name in drafter.weights() if ".layers." in name} == {"0", "1"}
    trained = {name for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    assert not [name for name in trained if "embed" in name or "head" in name]


def test_all_layers_of_the_target_are_the_target(target_dir: Path) -> None:
    drafter = initial(LanguageModelSettings(layers=4), target_dir, target_dir)
    target = AutoModelForCausalLM.from_pretrained(target_dir)
    tokens = tokens_of(1)
    with torch.no_grad():
        goal = target(input_ids=tokens).logits[0, [4, 20]]
        got = drafter.unroll(at_places(tokens, None, [(0, 5), (0, 21)]), 1)[0]
    torch.testing.assert_close(got, goal, rtol=1e-4, atol=1e-4)


def test_more_layers_than_the_target_has_are_refused(target_dir: Path) -> None:
    with pytest.raises(DrafterError, match=r"drafter.layers is 5, but the target has 4 layers"):
        initial(LanguageModelSettings(layers=5), target_dir, target_dir)


def test_a_revision_without_a_source_is_refused(target_dir: Path) -> None:
    with pytest.raises(DrafterError, match=r"^drafter\.revision is of drafter\.source, which is not set$"):
        initial(LanguageModelSettings(revision="v1"), target_dir, target_dir)


def test_a_source_of_the_same_vocabulary_is_drafted_with_as_it_is(target_dir: Path, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "small", seed=8, layers=1)
    drafter = initial(LanguageModelSettings(source=str(source)), target_dir, tmp_path / "home")
    assert isinstance(drafter, LanguageModel)
    assert not drafter.shared
    assert "model.embed_tokens.weight" in drafter.weights()
    assert "lm_head.weight" not in drafter.weights()


@torch.inference_mode()
def test_its_own_tokens_are_read_as_if_the_text_went_on_with_them_and_by_their_own_places_only(
    drafter: LanguageModel,
) -> None:
    depth, tokens = 3, tokens_of(2)
    drafted = tokens.clone()
    for row, place in ((0, 7), (0, 8), (0, 20), (1, 28)):
        drafted[row, place] = (tokens[row, place] + 5) % 256
    batch = at_places(tokens, None, [(row, place) for row in range(2) for place in range(1, LENGTH)])
    found, true = drafter.unroll(batch, depth, drafted), drafter.unroll(batch, depth)
    torch.testing.assert_close(found[0], true[0], rtol=1e-4, atol=1e-4)
    for index, (row, place) in enumerate(zip(batch.sequence.tolist(), batch.place.tolist(), strict=True)):
        text = tokens.clone()
        text[row, place - 1] = drafted[row, place - 1]
        alone = drafter.unroll(at_places(text, None, [(row, place)]), 1)[0][0]
        for step in (1, 2):
            torch.testing.assert_close(found[step][index], alone, rtol=1e-4, atol=1e-4)
