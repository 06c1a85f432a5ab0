"""Acceptance heads in sessions, and swaps between versions with and without a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from osd.config import EagleSettings, LanguageModelSettings
from osd.drafting import Trainable, from_config, initial, trainable
from osd.drafting.acceptance_head import without_head
from osd.drafting.eagle.session import EagleSession
from osd.drafting.growth.chain import AcceptanceHeadChain
from osd.drafting.session import CommittedTokens, DraftRequest, Runtime, Session
from osd.runtime.native import kernels
from osd.verification.noise import Noise
from osd.verification.sampling import GREEDY
from osd.verification.tree import TreeBuilder
from tests.unit.drafting.sequences import expand_chain

LENGTH, TAPPED = 30, 3 * 64


@pytest.fixture(params=["eagle", "language_model"])
def drafter(request: pytest.FixtureRequest, target_dir: Path) -> Trainable:
    return make(request.param, target_dir)


def make(kind: str, target_dir: Path) -> Trainable:
    torch.manual_seed(4)
    settings = {"eagle": EagleSettings(vocabulary=259), "language_model": LanguageModelSettings(layers=2)}
    drafter = trainable(initial(settings[kind], target_dir, target_dir)).add_head()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
            parameter.copy_(parameter.bfloat16().float())
    return drafter


def without_head_of(drafter: Trainable, target_dir: Path) -> Trainable:
    return trainable(from_config(without_head(drafter.config()), target_dir))


class RecordingSession:
    """Session that records the predictions of its head after each call."""

    def __init__(self, session: Session) -> None:
        self.session, self.support = session, session.support
        self.acceptances: list[Tensor] = []

    def expand(self, slots: list[int], builder: TreeBuilder, rows: Tensor, nodes: Tensor) -> Tensor:
        logits = self.session.expand(slots, builder, rows, nodes)
        self.acceptances.append(self.session.acceptance())
        return logits


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (2, LENGTH), generator=generator), torch.randn(2, LENGTH, TAPPED, generator=generator)


def acceptance_of(session: Session, drafted: Tensor, ends: list[int]) -> list[Tensor]:
    """Return the head's predictions for the root and each token of ``drafted`` [2, depth] after ``ends`` tokens."""
    tokens, hidden = sequences()
    for row, end in enumerate(ends):
        session.open(row, int(tokens[row, 0]))
        session.commit(row, CommittedTokens(tokens[row, 1:end].tolist(), hidden[row, : end - 1]))
    recording = RecordingSession(session)
    expand_chain(recording, [0, 1], drafted)
    return recording.acceptances


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
def test_head_ends_native_chains_like_stepwise_chains(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, depth, ends = make("eagle", target_dir), 6, [7, 19]
    tokens, hidden = sequences()

    def drafted(most: float, limits: list[int]) -> list[list[int]]:
        session = drafter.session(Runtime(2, LENGTH, depth + 1))
        for row, end in enumerate(ends):
            session.open(row, int(tokens[row, 0]))
            session.commit(row, CommittedTokens(tokens[row, 1:end].tolist(), hidden[row, : end - 1]))
        request, noise = DraftRequest([0, 1], limits, [GREEDY] * 2), Noise.of_seeds([0, 1], [0, 0], torch.device("cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(EagleSession, "expand", None)
            proposal = session.propose(request, AcceptanceHeadChain(most, depth), noise)
        return [tree.tokens for tree in proposal.trees]

    far = drafted(1.0, [depth, depth])
    assert [len(chain) for chain in far] == [depth, depth]
    accepted = acceptance_of(drafter.session(Runtime(2, LENGTH, depth + 1)), torch.tensor(far), ends)[1:]
    broken = 1 - torch.stack(accepted)[: depth - 1].cumprod(0).T  # [2, 5] after each token that could end a chain
    steps = broken.flatten().sort().values
    all_sizes = set()
    for below, above in zip(steps[:-1].tolist(), steps[1:].tolist(), strict=True):
        if above - below > 0.01:  # the kernels round to bfloat16
            most = (below + above) / 2
            sizes = [1 + int((row <= most).sum()) + 1 if (row > most).any() else depth for row in broken]
            assert drafted(most, [depth, depth]) == [chain[:size] for chain, size in zip(far, sizes, strict=True)]
            assert drafted(most, [0, 3]) == [[], far[1][: min(sizes[1], 3)]]
            all_sizes.add(tuple(sizes))
    assert len(all_sizes) > 3


def test_new_head_and_missing_head_predict_one_half(drafter: Trainable, target_dir: Path) -> None:
    nothing = torch.empty(2, 0, dtype=torch.int64)
    for variant in (drafter.add_head(), without_head_of(drafter, target_dir)):
        assert acceptance_of(variant.session(Runtime(2, LENGTH, 2)), nothing, [5, 9])[0].tolist() == [0.5, 0.5]


def test_session_swaps_versions_with_and_without_head(drafter: Trainable, target_dir: Path) -> None:
    nothing = torch.empty(2, 0, dtype=torch.int64)
    full = drafter.weights()
    bare = {name: value for name, value in full.items() if not name.startswith("acceptance.")}
    goal = acceptance_of(drafter.session(Runtime(2, LENGTH, 2)), nothing, [5, 9])[0]
    assert (goal - 0.5).abs().min() > 1e-3
    session = drafter.session(Runtime(2, LENGTH, 2))
    for weights, expected in ((bare, torch.full((2,), 0.5)), (full, goal)):
        with torch.inference_mode():
            session.load(session.stage(weights))
        assert torch.equal(acceptance_of(session, nothing, [5, 9])[0], expected)
    drafter.load_weights(bare)
    assert not any(parameter.any() for parameter in drafter.acceptance.parameters())
    alone = without_head_of(drafter, target_dir)
    session = alone.session(Runtime(2, LENGTH, 2))
    with torch.inference_mode():
        session.load(session.stage(full))
    alone.load_weights(full)
    assert acceptance_of(session, nothing, [5, 9])[0].tolist() == [0.5, 0.5]
