"""Acceptance of live requests by domain, version and position."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Array
from osd.engine.counters import MAX_VERSIONS, OLDER_VERSIONS
from tests.unit.trainer.traffic import PIECE, live
from trainer.live_drafts import DraftCounts, LiveDrafts

A, R, N = ACCEPTED, REJECTED, NOT_DRAFTED


def traced(verdict: list[int], **changed):
    return msgspec.structs.replace(PIECE, verdict=Array.of(np.array(verdict, np.int8)), **changed)


@pytest.mark.parametrize(("verdict", "tested", "accepted"), [
    ([N, A, A, R, R, A, N], [3, 1, 1], [2, 1, 0]), ([A, A, N, A], [2, 1, 0], [2, 1, 0]),
    ([N, N], [0, 0, 0], [0, 0, 0]), ([R], [1, 0, 0], [0, 0, 0]), ([A] * 40, [1] * 3, [1] * 3),
])  # fmt: skip
def test_draft_begins_after_each_token_that_is_not_accepted(verdict, tested, accepted):
    counts = DraftCounts.of(traced(verdict))
    assert (counts.tested[:3], counts.accepted[:3]) == (tested, accepted)
    assert sum(counts.tested) == sum(token != N for token in verdict), "no tested token is lost"
    assert sum(counts.accepted) == verdict.count(A)


def test_rows_are_separate_by_domain_and_version():
    drafts = LiveDrafts()
    drafts.add(traced([A, R], domain="sql", drafter_version=2))
    drafts.add(traced([A, A, N], domain="sql", drafter_version=2, segment=1))
    drafts.add(traced([R], domain="code", drafter_version=1))
    drafts.add(traced([N], domain="plain", drafter_version=1))
    assert drafts.rows() == [
        {"domain": "code", "version": 1, "requests": 1, "tested": [1], "accepted": [0]},
        {"domain": "sql", "version": 2, "requests": 1, "tested": [2, 2], "accepted": [2, 1]},
    ], "a later segment is of the same request, and a domain without drafts has no row"


def test_old_versions_are_merged():
    drafts, rng = LiveDrafts(), np.random.default_rng(0)
    for version in range(1, MAX_VERSIONS + 4):
        drafts.add(live(rng, version, 0.5))
    versions = [row["version"] for row in drafts.rows()]
    assert len(versions) == MAX_VERSIONS + 1
    assert OLDER_VERSIONS in versions
    assert sum(row["requests"] for row in drafts.rows()) == MAX_VERSIONS + 3
