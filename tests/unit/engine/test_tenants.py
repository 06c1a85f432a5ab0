"""Tenants that share an engine: separate recall, traces and routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osd.capture.trace import Trace
from osd.config import BestFirstSettings
from osd.drafting.recall.drafter import Recall
from tests.unit.engine.harness import Client, make_drafter, prompts, running

PROMPT = prompts([21], seed=6)[0]
EVERYTHING = BestFirstSettings(governed=False)


def ask(client: Client, name: str, tenant: str, **more: Any) -> int:
    """Submit a request and return its number of accepted tokens."""
    fields = {"domain": None, "client": tenant, "tenant": tenant, **more}
    client.submit(name, PROMPT, 24, ignore_eos=True, capture=True, **fields)
    counts = client.wait()[name].counts
    return counts.accepted


def test_tenants_recall_only_their_own_text(target_dir: Path) -> None:
    with running(target_dir, drafter=Recall(), growth=EVERYTHING) as client:
        first = {tenant: ask(client, f"first {tenant}", tenant) for tenant in ("acme", "blue", "")}
        again = {tenant: ask(client, f"again {tenant}", tenant) for tenant in first}
        cached = {name: result.cached for name, result in client.results.items()}
        recalled = client.engine.pool.all_memories()
    assert len(set(first.values())) == 1, "no tenant has recalled text at first"
    assert all(again[tenant] > first[tenant] for tenant in first)
    assert {name for name, count in cached.items() if count} == {f"again {tenant}" for tenant in first}
    assert set(recalled) == {"general", "acme.general", "blue.general"}


def test_tenant_traces_have_the_tenants_domain(target_dir: Path) -> None:
    traces: list[Trace] = []
    with running(target_dir, drafter=Recall(), growth=EVERYTHING, traces=traces) as client:
        ask(client, "default", "acme")
        ask(client, "code", "acme", domain="code")
        ask(client, "no tenant", "", domain="code")
    recorded = {trace.request_id: (trace.domain, trace.drafter_domain) for trace in traces}
    assert recorded == {
        "default": ("acme.general", "general"),
        "code": ("acme.code", "general"),
        "no tenant": ("code", "general"),
    }


def test_tenant_uses_its_own_drafters_if_any(target_dir: Path) -> None:
    drafter = make_drafter("eagle", target_dir)
    with running(target_dir, "eagle") as client:
        for version, domain in enumerate(("code", "acme.general", "acme.code"), 2):
            client.engine.pool.open(domain, version, drafter.weights())
        for name, tenant, domain in (
            ("1", "", "sql"),
            ("2", "", "code"),
            ("3", "acme", "sql"),
            ("4", "acme", "code"),
            ("5", "blue", "code"),
        ):
            ask(client, name, tenant, domain=domain)
        served = dict(client.engine.counters().by_version)
        assert client.engine.pool.take_requested() == {"sql", "acme.sql", "blue.code"}
    assert {drafted_by: counts.rounds > 0 for drafted_by, counts in served.items()} == dict.fromkeys(
        [("general", 1), ("code", 2), ("acme.general", 3), ("acme.code", 4)], True
    )


def test_tenant_is_routed_among_its_own_domains(target_dir: Path) -> None:
    drafter = make_drafter("eagle", target_dir)
    with running(target_dir, "eagle") as client:
        for domain in ("code", "acme.code", "blue.code"):
            client.engine.pool.open(domain, 2, drafter.weights())
        for number in range(6):
            for tenant in ("", "acme", "lone"):
                ask(client, f"{tenant} {number}", tenant)
        routers: Any = client.engine.loop.router.routers  # type: ignore[union-attr]
        known = {tenant: set(router.bandit.everywhere) for tenant, router in routers.items()}
        served = {domain for domain, _ in client.engine.counters().by_version}
    assert known == {"": {"general", "code"}, "acme": {"acme.general", "acme.code"}}
    assert served == {"general", "code", "acme.code"}


def test_least_recent_tenant_loses_its_table(target_dir: Path) -> None:
    with running(target_dir, drafter=Recall(), growth=EVERYTHING) as client:
        most = client.engine.settings.engine.domains
        for number in range(most):
            ask(client, f"first {number}", f"t{number}")
        ask(client, "again", "t0")
        ask(client, "one more", "new")
        assert set(client.engine.pool.all_memories()) == {
            "general",
            "t0.general",
            "new.general",
            *(f"t{number}.general" for number in range(2, most)),
        }


@pytest.mark.parametrize("shared", [True, False])
def test_tenant_keeps_its_table_with_new_drafters(target_dir: Path, shared: bool) -> None:
    with running(target_dir, drafter=Recall(), growth=EVERYTHING, shared=shared) as client:
        first = ask(client, "first", "acme")
        client.engine.pool.open("acme.general", 2, {}, Recall())
        assert ask(client, "again", "acme") > first
