"""Prompt tokens of a draft model: several tokens per call, and their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from osd.config import LanguageModelSettings, TrainerSettings
from osd.drafting import DrafterError, initial
from osd.drafting.formats import ExportOrigin, FormatError, write
from osd.drafting.growth import Stop
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.prompt_tokens.drafter import PromptTokens
from osd.drafting.session import CommittedTokens, Runtime
from osd.learning.batch import DistillBatch
from osd.learning.distiller import Distiller
from osd.learning.objective import DistillationObjective
from osd.runtime.model import SlotModel
from osd.target.model import load_model
from tests.unit.drafting.other_tokens import make_pair, random_model, rounded
from tests.unit.drafting.sequences import (
    assert_close,
    at_places,
    expand_chain,
    loss_at_cuts,
    random_tokens,
    trace_batch,
)

LENGTH, AHEAD = 30, 2


def with_prompts(drafter: LanguageModel, tokens: int = AHEAD) -> LanguageModel:
    torch.manual_seed(6)
    made = rounded(LanguageModel(drafter.model, drafter.shared, drafter.translation, tokens))
    with torch.no_grad():
        made.lookahead.prompts.normal_(0, 0.3)
        made.lookahead.prompts.copy_(made.lookahead.prompts.bfloat16().float())
    return made


def first_layers(target_dir: Path) -> LanguageModel:
    return rounded(LanguageModel.first_layers(load_model(target_dir, "float32", "cpu"), 2))


@pytest.fixture(params=["first layers", "gpt_neox"])
def drafter(request: pytest.FixtureRequest, target_dir: Path) -> LanguageModel:
    return with_prompts(first_layers(target_dir) if request.param == "first layers" else random_model(request.param))


def test_prompt_tokens_reduce_calls_of_a_chain(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = [0], SlotModel.forward

    def counted(self: SlotModel, *arguments: Any) -> Any:
        calls[0] += 1
        return forward(self, *arguments)

    monkeypatch.setattr(SlotModel, "forward", counted)
    plain = first_layers(target_dir)
    for drafter, expected in ((plain, 6), (with_prompts(plain, 2), 2), (with_prompts(plain, 5), 1)):
        session, calls[0] = drafter.session(Runtime(1, LENGTH, 7)), 0
        session.open(0, 1)
        session.commit(0, CommittedTokens([2, 3]))
        logits = expand_chain(session, [0], random_tokens(1)[:, :5])
        assert (len(logits), calls[0]) == (6, expected)
    chains = with_prompts(plain, 2).session(Runtime(2, LENGTH, 7))
    for slot in (0, 1):
        chains.open(slot, 1)
    calls[0] = 0
    drafted = chains.chains([0, 1], [3, 0], Stop(0.5))
    assert [len(tokens) for tokens in drafted.draft.token_lists()] == [3, 0]
    assert calls[0] == 1
    assert chains.chains([0, 1], [4, 4], Stop(0.5)) is None


def test_loss_adds_prompt_tokens_at_cuts(target_dir: Path) -> None:
    plain, batch = first_layers(target_dir), trace_batch(completion=12)
    drafter, objective = with_prompts(plain), DistillationObjective.of(TrainerSettings(), 0)
    goal = plain.loss(batch, objective).value + loss_at_cuts(drafter.unroll(batch, 1 + AHEAD)[1:], batch, objective)
    assert drafter.loss(batch, objective).value.item() == pytest.approx(goal.item(), rel=1e-4)


def gradients(drafter: LanguageModel, batch: DistillBatch) -> dict[str, Tensor]:
    drafter.zero_grad()
    drafter.loss(batch, DistillationObjective.of(TrainerSettings(samples="student"), 0)).value.backward()
    return {name: weight.grad.clone() for name, weight in drafter.named_parameters() if weight.grad is not None}


def test_prompt_token_loss_has_no_gradient_for_the_model(drafter: LanguageModel) -> None:
    batch = trace_batch()
    whole, plain = gradients(drafter, batch), LanguageModel(drafter.model, drafter.shared)
    alone = gradients(plain, batch)
    assert whole.keys() - alone.keys() == {"lookahead.prompts"}
    for name, gradient in alone.items():
        torch.testing.assert_close(whole[name], gradient)
    assert (whole["lookahead.prompts"].norm(dim=1) > 0).all()


def test_prompt_tokens_learn_faster_and_resume(target_dir: Path) -> None:
    drafter, batch = with_prompts(first_layers(target_dir)), trace_batch()
    settings = TrainerSettings(learning_rate=1e-3, update_tokens=1)
    before = {name: weight.detach().clone() for name, weight in drafter.trained().items()}
    distiller = Distiller(drafter, settings)
    distiller.step(batch)
    moved = {name: float((weight - before[name]).detach().abs().max()) for name, weight in drafter.trained().items()}
    assert moved.pop("lookahead.prompts") == pytest.approx(1e-2, rel=0.1)
    assert max(moved.values()) == pytest.approx(1e-3, rel=0.1)
    tensors, counters = distiller.state_dict()
    saved = {name: value.clone() for name, value in tensors.items()}
    losses = [distiller.step(trace_batch(seed)).loss for seed in (5, 6)]
    again = Distiller(with_prompts(first_layers(target_dir)), settings)
    again.load_state_dict(saved, counters)
    assert [again.step(trace_batch(seed)).loss for seed in (5, 6)] == losses


def test_translated_model_has_prompt_tokens(tmp_path: Path) -> None:
    target_dir, source = make_pair(tmp_path)
    drafter = initial(LanguageModelSettings(source=str(source), prompt_tokens=2), target_dir, target_dir)
    rounded(drafter)
    tokens = random_tokens(1)
    session = drafter.session(Runtime(1, LENGTH, 6))
    session.open(0, int(tokens[0, 0]))
    session.commit(0, CommittedTokens(tokens[0, 1:12].tolist()))
    shared = session.support
    drafted = shared[torch.tensor([[3, 50, 20, 7]])]
    text = torch.cat([tokens[:, :12], drafted, tokens[:, :2]], 1)
    got = expand_chain(session, [0], drafted)
    with torch.no_grad():
        for d in range(5):
            goal = drafter.unroll(at_places(text, None, [(0, 12 + d)]), 5)[d][0]
            assert_close(got[d][0], goal, 0.03)  # the session computes in bfloat16


def test_long_text_leaves_positions_for_prompt_tokens() -> None:
    plain = random_model("gpt_neox")
    plain.model.config.max_position_embeddings = 16
    session = with_prompts(plain).session(Runtime(1, LENGTH, 4))
    assert session.model.context == 16 - 4 - AHEAD
    session.open(0, 1)
    session.commit(0, CommittedTokens([2] * 20))
    expand_chain(session, [0], random_tokens(1)[:, :2])
    assert session.model.cache.length[0] <= session.model.context


def test_export_with_prompt_tokens_is_refused(target_dir: Path, tmp_path: Path) -> None:
    origin = ExportOrigin("general", 1, str(target_dir), target_dir, 3)
    with pytest.raises(FormatError, match=r"^transformers does not support prompt tokens, and this drafter has 2$"):
        write(with_prompts(first_layers(target_dir)), "transformers", origin, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_model_with_scaled_embeddings_is_refused() -> None:
    model: nn.Module = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16,
        )
    )  # fmt: skip
    with pytest.raises(DrafterError, match="the model cannot read prompt tokens: Gemma3"):
        LanguageModel(model, shared=False, prompt_tokens=2)
    with pytest.raises(DrafterError, match="the model cannot read prompt tokens: Gemma3"):
        PromptTokens.from_target(model, 3)
