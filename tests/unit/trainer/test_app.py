from __future__ import annotations

import pytest

from osd.config import Settings
from trainer import app


@pytest.mark.parametrize(
    ("kind", "enabled", "wanted", "said"),
    [
        ("eagle", True, True, ""),
        ("eagle", False, False, ""),
        ("none", True, False, ""),
        ("recall", False, False, ""),
        ("recall", True, False, "drafter.kind recall has nothing to train, there is no trainer"),
    ],
)
def test_where_there_is_nothing_to_train_there_is_no_trainer_and_the_log_says_so_once(
    kind, enabled, wanted, said, caplog
):
    settings = Settings(drafter={"kind": kind}, trainer={"enabled": enabled})
    with caplog.at_level("INFO"):
        assert app.wanted(settings) is wanted
    assert [record.message for record in caplog.records] == [said] * bool(said)
