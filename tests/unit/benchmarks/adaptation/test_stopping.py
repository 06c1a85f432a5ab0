from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.adaptation.stopping import Oracle
from osd.drafters.base import Drafter
from osd.drafters.recall.drafter import Recall
from osd.drafters.session import NOBODY, Asked, Kept, Origin, Proposal, Runtime, Session, Tree
from osd.engine.request import SamplingParams
from osd.speculation.growth.chain import Chain
from osd.speculation.noise import Noise
from tests.unit.benchmarks.adaptation.test_experiments import command, streams_of

INDEX = torch.zeros(1, dtype=torch.int64)


class Counting(Session):
    """Drafts 1, 2, 3, ... as far as it may."""

    def open(self, slot: int, token: int, origin: Origin = NOBODY) -> None: ...

    def propose(self, asked: Asked, growth, noise: Noise) -> Proposal:
        trees = [Tree.chain(list(range(1, limit + 1)), "counting") for limit in asked.limits]
        return Proposal(trees)

    def commit(self, slot: int, kept: Kept) -> None: ...

    def close(self, slot: int) -> None: ...

    def stage(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def load(self, staged: dict[str, Tensor]) -> None: ...


class Counter(Recall):
    def session(self, runtime: Runtime) -> Session:
        return Counting()


def sizes(oracle: Drafter, request: str, outcomes: Sequence[int], limit: int = 4) -> list[int]:
    """How many tokens each of several rounds drafts, of which so many are accepted where so many are drafted."""
    session = oracle.session(Runtime(1, 64, 8))
    session.open(0, 9, Origin(request))
    session.commit(0, Kept([9, 9], None))  # the prompt
    found = []
    for right in outcomes:
        asked = Asked([0], [limit], [SamplingParams(temperature=0)])
        (tree,) = session.propose(asked, Chain(4), Noise(INDEX, INDEX, INDEX)).trees
        found.append(len(tree.tokens))
        session.commit(0, Kept([9] * (min(right, len(tree.tokens)) + 1), None))
    session.close(0)
    return found


def test_an_oracle_ends_drafts_with_the_first_token_that_will_be_rejected():
    oracle = Oracle(Counter())
    assert sizes(oracle, "a", [0, 2, 4, 3]) == [4, 4, 4, 4], "it knows nothing yet"
    assert sizes(oracle, "a", [0, 2, 4, 3]) == [1, 3, 4, 4]
    assert sizes(oracle, "a", [0, 2, 4, 3], limit=2) == [1, 2, 2, 2], "never more than it may"
    assert sizes(oracle, "b", [0, 2]) == [4, 4], "it knows nothing of another request"
    assert sizes(oracle, "a", [1, 2])[0] == 1


def test_where_a_text_has_left_what_was_seen_drafts_are_whole():
    oracle = Oracle(Counter())
    sizes(oracle, "a", [1, 1])
    session = oracle.session(Runtime(1, 64, 8))
    session.open(0, 9, Origin("a"))
    session.commit(0, Kept([9], None))
    asked = Asked([0], [4], [SamplingParams(temperature=0)])
    (tree,) = session.propose(asked, Chain(4), Noise(INDEX, INDEX, INDEX)).trees
    assert len(tree.tokens) == 4


def test_every_way_to_end_a_chain_decodes_the_same_prompts_and_the_oracle_drafts_least_in_vain(experiment, tmp_path):
    (stream,) = streams_of(tmp_path, "tiny")
    files = [tmp_path / name for name in ("a.json", "a.md")]
    result = command(
        experiment, tmp_path, "stopping", "--stream", stream, "--drafter", "eagle", "--records", 16, "--unseen", 8,
        "--tokens", 16, "--passes", 1, "--depth", 4, "--turns", 4, "--json", files[0], "--markdown", files[1],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(files[0].read_text())["streams"]["tiny"]
    ways = {way["way"]: way for way in found["ways"]}
    assert list(ways) == ["chain", "confidence", "acceptance_head", "oracle"]
    assert found["learnt"]["way"] == "online"
    assert ways["oracle"]["tokens"] == pytest.approx(ways["chain"]["tokens"]), "nothing that would be kept is missing"
    assert ways["oracle"]["drafted"] < ways["chain"]["drafted"]
    assert ways["oracle"]["acceptance"] > ways["chain"]["acceptance"]
    assert ways["oracle"]["calls"] < ways["chain"]["calls"]
    assert ways["confidence"]["of_confidence"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert "| oracle | " in files[1].read_text()
