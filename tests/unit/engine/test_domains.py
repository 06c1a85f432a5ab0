"""Drafters of several domains in one engine, and routing of requests without a domain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osd.capture.trace import Trace
from osd.drafting import DrafterError
from osd.registry.pointer import Rollout
from osd.routing.clusters import Cluster
from osd.routing.router import Pick
from tests.unit.engine.harness import Client, Oracle, make_drafter, prompts, running, tokens_of, weights_of


class ScriptedRouter:
    """Router with scripted picks that records its input."""

    def __init__(self, *domains: str) -> None:
        self.domains, self.embeddings, self.seen, self.learnt = list(domains), [], [], []

    def pick(self, embedding: np.ndarray, domains: list[str]) -> Pick:
        self.embeddings.append(embedding)
        self.seen.append(domains)
        return Pick(embedding, Cluster(embedding), self.domains.pop(0), "math")

    def learn(self, pick: Pick, tokens: int, seconds: float) -> None:
        self.learnt.append((pick.drafter, tokens, seconds))


def routed_by(client: Client, *domains: str) -> ScriptedRouter:
    router: Any = client.engine.loop.router
    router.routers[""] = script = ScriptedRouter(*domains)
    return script


@pytest.mark.parametrize("kind", ["eagle", "language_model"])
def test_requests_are_drafted_by_their_domains_drafter(target_dir: Path, oracle: Oracle, kind: str) -> None:
    traces: list[Trace] = []
    texts = prompts([9, 30, 4, 17], seed=4)
    domains = ["general", "code", "poems", "code"]
    with running(target_dir, kind, traces=traces) as client:
        pool = client.engine.pool
        pool.open("code", 7, weights_of(kind, target_dir, 1.0))
        for index, (prompt, domain) in enumerate(zip(texts, domains, strict=True)):
            client.submit(str(index), prompt, 30, ignore_eos=True, capture=True, domain=domain)
        results = client.wait()
        counters = client.engine.counters()
        assert pool.take_requested() == {"poems"}
        assert pool.take_requested() == set()
    assert tokens_of(results.values()) == oracle.all(texts, 30)
    recorded = {trace.request_id: (trace.domain, trace.drafter_domain, trace.drafter_version) for trace in traces}
    assert recorded == {
        "0": ("general", "general", 1),
        "1": ("code", "code", 7),
        "2": ("poems", "general", 1),
        "3": ("code", "code", 7),
    }
    assert set(counters.by_version) == {("general", 1), ("code", 7)}
    counts_of_code = [results[str(index)].counts for index in (1, 3)]
    assert counters.by_version["code", 7].drafted == sum(counts.drafted for counts in counts_of_code if counts)


def test_swap_and_canary_affect_only_their_domain(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        pool, weights = client.engine.pool, weights_of("eagle", target_dir, 0.0)
        pool.open("code", 7, weights)
        code, general = client.engine.drafters("code"), client.engine.drafters("general")
        code.stage(8, weights)
        client.swapped_to(8, "code")
        code.try_canary(Rollout(8, 9, 1.0, 1.0), weights)
        assert (code.drafter_version, code.canary_version) == (8, 9)
        assert (general.drafter_version, general.canary_version) == (1, None)
        assert client.engine.drafter_version == 1
        assert pool.choose("code").alternate.drafter.version == 9
        assert pool.choose("general").alternate is None


def test_drop_idle_drops_the_least_recently_used_domain(target_dir: Path) -> None:
    with running(target_dir, "eagle", slots=4) as client:
        pool, weights = client.engine.pool, weights_of("eagle", target_dir, 0.0)
        for domain in ("a", "b", "c"):
            pool.open(domain, 1, weights)
        for domain in ("a", "b", "a"):
            client.submit(f"{domain} {len(client.results)}", [1, 2], 4, domain=domain)
            client.wait()
        client.submit("c", [1, 2], 120, domain="c", ignore_eos=True)
        client.until("c", 2)
        dropped = [pool.drop_idle(), pool.drop_idle(), pool.drop_idle()]
        assert client.results["c"].finish is None
        assert dropped == ["b", "a", None]
        assert client.wait()["c"].error is None
        assert pool.drop_idle() == "c"
        assert list(pool.domains) == ["general"]


def test_open_with_invalid_weights_is_refused(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        weights = weights_of("eagle", target_dir, 0.0)
        del weights["head.weight"]
        with pytest.raises(DrafterError, match=r"'head.weight' is missing"):
            client.engine.pool.open("code", 1, weights)
        assert list(client.engine.pool.domains) == ["general"]


def test_router_gets_the_mean_prompt_state_and_the_speed(target_dir: Path, oracle: Oracle) -> None:
    traces: list[Trace] = []
    texts = prompts([40, 1, 23], seed=9)
    with running(target_dir, "eagle", traces=traces, chunk=16) as client:
        client.engine.pool.open("code", 7, weights_of("eagle", target_dir, 0.5))
        script = routed_by(client, "code", "general", "code")
        for index, prompt in enumerate(texts):
            client.submit(str(index), prompt, 30, ignore_eos=True, capture=True, domain=None)
            client.wait()
        taps = client.engine.target.taps
    assert tokens_of(client.results.values()) == oracle.all(texts, 30)
    for index, prompt in enumerate(texts):
        with torch.no_grad():
            hidden = oracle.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        layer = hidden[1 + taps[len(taps) // 2]][0]
        assert np.allclose(script.embeddings[index], layer[min(1, len(prompt) - 1) :].mean(0), atol=1e-4)
    assert script.seen == [["general", "code"]] * 3
    assert [(domain, tokens) for domain, tokens, _ in script.learnt] == [("code", 29), ("general", 29), ("code", 29)]
    assert all(seconds > 0 for *_, seconds in script.learnt)
    recorded = [(trace.domain, trace.drafter_domain, trace.drafter_version) for trace in traces]
    assert recorded == [("math", "code", 7), ("math", "general", 1), ("math", "code", 7)]
    assert all(result.counts.drafted > 0 for result in client.results.values())


def test_routed_request_records_states_of_its_drafter(target_dir: Path) -> None:
    traces: list[Trace] = []
    wanted = {("math", "1"): 3.0, ("code", "2"): 2.0, ("general", "0"): 5.0}
    more: dict[str, Any] = {"states": lambda domain, request: wanted.get((domain, request), 0.0)}
    other = make_drafter("medusa", target_dir)
    with running(target_dir, "eagle", traces=traces, prefix_cache=False, **more) as client:
        client.engine.pool.open("code", 7, other.weights(), other)
        routed_by(client, "code", "code")
        for index, domain in enumerate((None, None, "code")):
            client.submit(str(index), prompts([20])[0], 20, ignore_eos=True, capture=True, domain=domain)
            client.wait()
    recorded = [(trace.domain, trace.states_weight, trace.hidden is not None) for trace in traces]
    assert recorded == [("math", 0.0, False), ("math", 3.0, True), ("code", 2.0, True)]
    assert traces[1].hidden == traces[2].hidden, "a routed request has the states of its prompt, too"


def test_single_domain_is_not_routed(target_dir: Path) -> None:
    traces: list[Trace] = []
    with running(target_dir, "eagle", traces=traces) as client:
        script = routed_by(client)
        client.submit("r", [1, 2, 3], 20, capture=True, domain=None, ignore_eos=True)
        assert client.wait()["r"].counts.drafted > 0
    assert script.embeddings == []
    assert [(trace.domain, trace.drafter_domain) for trace in traces] == [("general", "general")]


def test_cancelled_or_unrouted_requests_do_not_teach_the_router(target_dir: Path) -> None:
    with running(target_dir, "eagle") as client:
        client.engine.pool.open("code", 7, weights_of("eagle", target_dir, 0.0))
        script = routed_by(client, "code", "code")
        client.submit("short", [1, 2, 3], 1, domain=None)
        client.wait()
        client.submit("gone", [1, 2, 3], 120, domain=None, ignore_eos=True)
        client.until("gone", 3)
        client.engine.cancel("gone")
        client.submit("plain", [1, 2, 3], 20, domain=None, speculate=False)
        client.wait()
    assert len(script.embeddings) == 1
    assert script.learnt == []


def test_drafter_without_taps_is_routed_by_the_routers_layer(target_dir: Path, oracle: Oracle) -> None:
    traces: list[Trace] = []
    prompt = prompts([30], seed=9)[0]
    with running(target_dir, "language_model", traces=traces, taps=(2,)) as client:
        client.engine.pool.open("code", 7, weights_of("language_model", target_dir, 0.01))
        script = routed_by(client, "code")
        client.submit("r", prompt, 30, ignore_eos=True, capture=True, domain=None)
        assert client.wait()["r"].tokens == oracle.greedy(prompt, 30)
    assert script.embeddings[0].shape == (64,)
    assert [(trace.drafter_domain, trace.hidden) for trace in traces] == [("code", None)]
