"""Chains of one CUDA graph against chains that are drafted step by step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from osd.config import EagleSettings, LanguageModelSettings
from osd.drafting import from_config, initial
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.eagle.session import EagleSession
from osd.drafting.graph_chains import ChainDraws, ChainGraph, NewTokens
from osd.drafting.growth import Stop
from osd.drafting.growth.chain import Chain, Confidence
from osd.drafting.language_model.drafter import LanguageModel
from osd.drafting.language_model.session import LanguageModelSession
from osd.drafting.session import CommittedTokens, DraftRequest, Runtime
from osd.engine.request import SamplingParams as Sampling
from osd.runtime.batch import GridShape
from osd.runtime.cuda_graph import GraphRecorder
from osd.verification.noise import Noise
from osd.verification.sampling import SamplingBatch
from tests.device import forbid_device_waits
from tests.unit.verification.enumeration import check_integrity

VOCABULARY, LENGTH, HIDDEN, SCRATCH = 150, 40, 64, 7
DRAFTERS = ["eagle", "language_model"]


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Eagle | LanguageModel:
    """Random weights, and float32 wherever it is used."""
    monkeypatch.setattr("osd.drafting.autoregressive.fused_dtype", lambda device: torch.float32)
    monkeypatch.setattr("osd.drafting.language_model.session._DTYPE", torch.float32)
    settings = {"eagle": EagleSettings(vocabulary=VOCABULARY), "language_model": LanguageModelSettings(layers=2)}
    drafter = initial(settings[request.param], target_dir, target_dir)
    torch.manual_seed(3)
    drafter.adapt_vocabulary(torch.rand(259))
    with torch.no_grad():
        for parameter in (parameter for parameter in drafter.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return drafter


def opened(drafter: Eagle | LanguageModel, device: torch.device | None = None) -> EagleSession | LanguageModelSession:
    return drafter.session(Runtime(5, LENGTH, SCRATCH, device or torch.device("cpu"), bucketed=True))


def begin(session: EagleSession | LanguageModelSession, slots: list[int], committed: int = 3) -> None:
    """Start sequences with at least ``committed`` tokens."""
    generator = torch.Generator().manual_seed(1)
    for row, slot in enumerate(slots):
        tokens = torch.randint(0, VOCABULARY, (committed + row + 1,), generator=generator).tolist()
        session.open(slot, tokens[0])
        states = torch.randn(committed + row, 3 * HIDDEN, generator=generator)
        session.commit(slot, CommittedTokens(tokens[1:], states.to(session.device)))


def drafting(
    drafter: Eagle | LanguageModel, slots: list[int], committed: int = 3
) -> EagleSession | LanguageModelSession:
    """Return a bucketed session with committed tokens."""
    session = opened(drafter)
    begin(session, slots, committed)
    return session


def test_swap_keeps_addresses_and_changes_drafts(drafter: Eagle | LanguageModel, target_dir: Path) -> None:
    slots, limits = [2, 0], [4, 4]
    session = drafting(drafter, slots)
    before = session.chains(slots, limits, Stop())
    addresses = [value.data_ptr() for value in held(session)]
    torch.manual_seed(9)
    weights = {
        name: value + torch.randn_like(value) * 0.2 if value.is_floating_point() else value
        for name, value in drafter.weights().items()
    }
    staged = session.stage(weights)
    with torch.inference_mode():
        session.load(staged)
    begin(session, slots)
    made = GraphRecorder.made
    after = session.chains(slots, limits, Stop())
    assert GraphRecorder.made == made
    assert [value.data_ptr() for value in held(session)] == addresses
    other = from_config(drafter.config(), target_dir)
    other.load_weights(weights)
    goal = drafting(other, slots).chains(slots, limits, Stop())
    assert after.draft.token_lists() == goal.draft.token_lists()
    torch.testing.assert_close(after.logits, goal.logits, rtol=1e-5, atol=1e-5 * float(goal.logits.abs().max()))
    assert not torch.allclose(after.logits, before.logits, rtol=0.1, atol=0.1)


def held(session: EagleSession | LanguageModelSession) -> list[Tensor]:
    """Return all tensors that a recording reads by their addresses."""
    if isinstance(session, LanguageModelSession):
        weights = [*session.model.model.state_dict().values()]
    else:
        weights = [layer.place for layer in session.linear.values()] + list(session.vector.values())
    return [session.cache.keys, session.cache.values, *weights]


def test_drafts_of_equal_size_share_a_recording(drafter: Eagle | LanguageModel) -> None:
    session = drafting(drafter, [0, 1, 2], 5)
    first = session.chains([0], [3], Stop())
    tokens, logits = first.draft.token_lists(), first.logits.clone()
    made = GraphRecorder.made
    second = session.chains([1], [3], Stop())
    assert second.draft.token_lists() != tokens
    assert first.draft.token_lists() == tokens
    assert torch.equal(first.logits, logits)
    assert GraphRecorder.made == made
    assert session.chains([2], [4], Stop()) is not None
    assert GraphRecorder.made > made


SAMPLED = [
    Sampling(0.7), Sampling(1.0, top_p=0.8), Sampling(1.4, top_k=5), Sampling(0.9, min_p=0.1), Sampling(1.0)
]  # fmt: skip


@pytest.mark.parametrize(
    "chosen", [[], SAMPLED[:4], SAMPLED[:1], SAMPLED[4:]], ids=["greedy", "all", "a temperature", "plain"]
)
def test_recording_runs_on_meta_tensors(drafter: Eagle | LanguageModel, chosen: list[Sampling]) -> None:
    """Meta tensors have no values to read and cannot be combined with tensors of other devices."""
    meta, drawing = torch.device("meta"), None
    session = opened(drafter, meta)
    if chosen:
        numbers = torch.empty(len(chosen), 3, dtype=torch.float64, device=meta)
        drawing = ChainDraws(SamplingBatch.of(chosen, meta), numbers)
    room, shape = None if drawing is None else drawing.room(4), GridShape(8, 8, 4, 4, 47, 0)
    draft = ChainGraph(session.graph_step, session.cache, session.support, shape, 4, 3, room)
    states = torch.zeros(4, 3 * HIDDEN, device=meta) if drafter.needs.taps else None
    draft.fill(NewTokens([(slot, 0, 1) for slot in range(4)], [1, 2, 3, 4], states), [3, 3, 3, 3], 0.0, drawing)
    with torch.inference_mode():
        tokens, sizes, logits, *drawn = draft.run()
    width = 259 if session.support is None else VOCABULARY
    assert (tokens.shape, sizes.shape, logits.shape) == ((4, 3), (4,), (4, 3, width))
    assert len(drawn) == (2 if chosen else 0)


@pytest.mark.parametrize("growth", [Chain(5), Confidence(0.02, 5)], ids=["chain", "confidence"])
def test_graph_chains_draw_like_stepwise_growth(drafter: Eagle | LanguageModel, growth: Chain) -> None:
    slots, limits = [3, 0, 4, 1], [5, 2, 4, 0]
    request = DraftRequest(slots, limits, SAMPLED[:4])
    drafts: list[Any] = []
    for bucketed in (True, False):
        session: Any = drafter.session(Runtime(5, LENGTH, SCRATCH, bucketed=bucketed))
        begin(session, slots)
        for turn in range(3):  # later drafts replay the recording of the first
            noise = Noise.of_seeds([7, 8, 9, 10], [turn] * 4, torch.device("cpu"))
            begin(session, slots)
            drafts.append(session.propose(request, growth, noise))
    for padded, plain in zip(drafts[:3], drafts[3:], strict=True):
        assert padded.pending
        assert not plain.pending
        check_integrity(padded.draft)
        assert padded.drafted() == [tree.tokens for tree in plain.trees]
        for row, tree in enumerate(plain.trees):
            for node in range(len(tree.tokens)):
                at = torch.tensor([row]), torch.tensor([node])
                torch.testing.assert_close(padded.draft.q_at(*at), plain.draft.q_at(*at), rtol=1e-4, atol=1e-6)
    lengths = {len(tree.tokens) for plain in drafts[3:] for tree in plain.trees}
    assert len(lengths) > 2
    assert drafts[0].drafted() != drafts[1].drafted()


def test_long_prompt_is_read_in_two_parts() -> None:
    new = NewTokens([(4, 3, 2), (0, 0, 0), (1, 9, 3)], [10, 11, 20, 21, 22], torch.arange(5.0)[:, None])
    early, late = new.split()
    assert (early.places, early.tokens) == ([(4, 3, 1), (0, 0, 0), (1, 9, 2)], [10, 20, 21])
    assert (late.places, late.tokens) == ([(4, 4, 1), (0, 0, 0), (1, 11, 1)], [11, 22])
    assert (early.states.flatten().tolist(), late.states.flatten().tolist()) == ([0, 2, 3], [1, 4])
    assert late.last.tolist() == [0, 0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_draft_does_not_wait_and_equals_the_cpu(drafter: Eagle | LanguageModel) -> None:
    slots, limits = [3, 0], [4, 4]
    goal = drafting(drafter, slots).chains(slots, limits, Stop())
    session = opened(drafter, torch.device("cuda"))
    for times in range(2):
        begin(session, slots)
        with forbid_device_waits() if times else nullcontext():
            chains = session.chains(slots, limits, Stop())
        assert chains.draft.token_lists() == goal.draft.token_lists()
