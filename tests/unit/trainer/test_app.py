from __future__ import annotations

from typing import Any

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


def of(state: str, domains: list[str], failure: str = "") -> dict[str, Any]:
    others = {domain: {"state": state if domain in domains else "waiting"} for domain in ("code", "sql")}
    own = state if "general" in domains else "waiting"
    return {"state": own, "domains": domains, "extra_domains": others, "failure": failure}


def test_of_several_trainers_each_domain_is_told_by_the_one_that_has_it():
    assert app.merged("general", [of("a", ["code"]), of("b", ["general", "sql"], "OSError: full")]) == {
        "state": "b",
        "domains": ["code", "general", "sql"],
        "extra_domains": {"code": {"state": "a"}, "sql": {"state": "b"}},
        "failure": "OSError: full",
    }
    starting = {"state": "waiting", "failure": ""}
    assert app.merged("general", [starting, of("a", ["code"])])["extra_domains"]["code"] == {"state": "a"}
    alone = of("a", ["code", "general", "sql"])
    assert app.merged("general", [alone]) == alone


def test_the_first_trainer_has_the_name_that_the_only_one_has():
    assert app.names(1) == [app.NAME] == ["osd-trainer"]
    assert app.names(3) == ["osd-trainer", "osd-trainer-2", "osd-trainer-3"]
