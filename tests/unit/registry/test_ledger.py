"""CPU seconds of training, by version."""

from __future__ import annotations

from osd.registry.ledger import Spent


def test_seconds_of_removed_versions_are_folded_into_the_older_ones():
    spent = Spent({1: 2.0, 2: 3.0}, unpublished=1.0, older=4.0, slowed=0.5, saving={1: 0.25, 2: 0.5}, older_saving=0.25)
    assert (spent.total, spent.cpu, spent.payback(2), spent.payback_of_all) == (10.0, 9.5, 6.0, 10.0)
    kept = spent.only({2})
    assert (kept.by_version, kept.older, kept.saving, kept.older_saving) == ({2: 3.0}, 6.0, {2: 0.5}, 0.5)
    assert (kept.total, kept.cpu, kept.payback(1), kept.payback_of_all) == (10.0, 9.5, None, 10.0)
