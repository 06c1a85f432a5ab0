"""Toy drafters on every path of the engine, with unchanged output."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osd.capture.trace import ACCEPTED, NOT_DRAFTED, REJECTED, Trace, decode, encode
from osd.config import DynamicTreeSettings
from osd.drafting import DRAFTERS, Drafter, DrafterError, from_config
from osd.engine.policy import Policy
from osd.engine.request import SamplingParams
from tests.device import skip_unless_cpu
from tests.unit.engine.harness import LENGTHS, Oracle, make_drafter, prompts, running
from tests.unit.engine.toys import (
    Lookup,
    LookupSession,
    Pairs,
    PairsSession,
    Rider,
    RiderSession,
    Skip,
    SkipSession,
    TextSession,
)

CHOOSING = [Lookup, Rider, Skip]
TOYS = [*CHOOSING, Pairs]
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
REPEATABLE = replace(DRAWN, repeatable=True)


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(
    "how",
    [{}, {"bucketed": True}, {"governed": True}, {"prefix_cache": False, "slots": 2}],
    ids=["plain", "bucketed", "governed", "few slots"],
)
def test_toy_drafters_keep_greedy_output(
    target_dir: Path, goals: list[list[int]], toy: type[Drafter], how: dict[str, Any]
) -> None:
    with running(target_dir, drafter=toy(), **how) as client:
        for _ in range(2):
            client.ask_greedily(goals, 24)
        counts = client.engine.counters().speculation()
    assert counts.drafted > 0
    assert counts.by_source.keys() == {toy.kind}
    assert counts.by_source[toy.kind].accepted == counts.accepted
    if not how.get("governed"):
        assert counts.accepted > 0


@pytest.mark.parametrize("toy", CHOOSING)
@pytest.mark.parametrize("sampling", [SamplingParams(0.0), DRAWN], ids=["greedy", "drawn"])
def test_draft_without_logits_is_traced_with_its_verdict(
    target_dir: Path, toy: type[Drafter], sampling: SamplingParams
) -> None:
    traces: list[Trace] = []
    with running(target_dir, drafter=toy(), traces=traces) as client:
        client.ask(prompts(LENGTHS), 24, sampling=sampling, capture=True, logprobs=2)
        results = client.results
    accepted = rejected = 0
    for trace in (decode(encode(trace)) for trace in traces):
        verdict, drafted, source = (array.numpy() for array in (trace.verdict, trace.drafted, trace.source))
        assert trace.sources in ((), (toy.kind,))
        assert ((source == 0) == (verdict != NOT_DRAFTED)).all()
        assert ((drafted >= 0) == (verdict != NOT_DRAFTED)).all()
        assert (trace.draft_ids.numpy() == -1).all()
        completion = trace.completion_ids.numpy()
        assert (drafted[verdict == ACCEPTED] == completion[verdict == ACCEPTED]).all()
        result = results[trace.request_id]
        assert int((verdict == ACCEPTED).sum()) == result.counts.accepted
        assert [place.token for place in result.logprobs] == completion.tolist()
        accepted += int((verdict == ACCEPTED).sum())
        rejected += int((verdict == REJECTED).sum())
    assert accepted
    assert rejected


@pytest.mark.parametrize("toy", TOYS)
def test_toy_drafters_keep_repeatable_output(target_dir: Path, toy: type[Drafter]) -> None:
    with running(target_dir, drafter=toy()) as client:
        plain, drafted = (
            client.ask(prompts(LENGTHS), 24, f"{speculate} {{}}", sampling=REPEATABLE, speculate=speculate)
            for speculate in (False, True)
        )
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]
        assert client.engine.counters().speculation().drafted > 0


@pytest.mark.parametrize("classes", [
    (Lookup, LookupSession, TextSession), (Rider, RiderSession, TextSession), (Skip, SkipSession, TextSession),
    (Pairs, PairsSession),
])  # fmt: skip
def test_new_drafter_is_sixty_lines_and_one_entry(target_dir: Path, monkeypatch, classes: tuple[type[Any], ...]):
    assert sum(len(inspect.getsource(code).splitlines()) for code in classes) < 60
    kind = classes[0].kind
    monkeypatch.setitem(DRAFTERS, kind, classes[0])
    drafter = from_config({"kind": kind}, target_dir)
    assert isinstance(drafter, classes[0])
    assert drafter.config() == {"kind": kind}


@pytest.mark.parametrize("toy", TOYS)
def test_domains_may_have_drafters_of_different_kinds(target_dir: Path, oracle: Oracle, toy: type[Drafter]) -> None:
    traces: list[Trace] = []
    with running(target_dir, "eagle", traces=traces, riders=2) as client:
        pool = client.engine.pool
        pool.open("code", 7, {}, toy())
        for index, prompt in enumerate(prompts(LENGTHS)):
            for domain in ("general", "code"):
                client.submit(f"{domain} {index}", prompt, 24, ignore_eos=True, domain=domain, capture=True)
        results = client.wait()
        by_version = client.engine.counters().by_version
    for index, prompt in enumerate(prompts(LENGTHS)):
        assert results[f"general {index}"].tokens == results[f"code {index}"].tokens == oracle.greedy(prompt, 24)
    assert by_version["general", 1].by_source.keys() == {"eagle"}
    assert by_version["code", 7].by_source.keys() == {toy.kind}
    hidden = {trace.drafter_domain: trace.hidden is not None for trace in traces}
    assert hidden == {"general": True, "code": False}


@skip_unless_cpu("a GPU's places are padded, and there is room")
def test_drafter_with_unmet_needs_is_refused(target_dir: Path) -> None:
    with running(target_dir, drafter=Lookup()) as client:
        pool, eagle = client.engine.pool, make_drafter("eagle", target_dir)
        with pytest.raises(DrafterError, match="this rider drafter has 2 riders, but there is room for 0"):
            pool.open("poems", 7, {}, Rider())
        with pytest.raises(DrafterError, match=r"reads layers \[0, 1, 2\], but the target is tapped at \[\]"):
            pool.open("code", 7, eagle.weights(), eagle)
        assert list(pool.domains) == ["general"]


@pytest.mark.parametrize("policy", [Policy.of(DynamicTreeSettings(budget=6), "siblings")], ids=["tree"])
def test_drafter_beyond_its_limits_fails_only_the_step(target_dir: Path, policy: Policy) -> None:
    class Greedy(Rider):
        needs = type(Rider.needs)(riders=0)

    with running(target_dir, drafter=Greedy()) as client:
        client.submit("r", [1, 2, 3], 20, ignore_eos=True, policy=policy)
        assert client.wait()["r"].error == "ValueError while decoding"
        client.submit("plain", [1, 2, 3], 4, ignore_eos=True, speculate=False)
        assert client.wait()["plain"].finish == "length"
        client.engine.check_health()


def test_drafter_learns_from_rejected_rows(target_dir: Path) -> None:
    with running(target_dir, drafter=Lookup()) as client:
        client.submit("r", prompts([9], seed=4)[0], 60, ignore_eos=True)
        tokens = client.wait()["r"].tokens
        pool = client.engine.pool
        session: Any = pool.default.session
    assert set(session.top_tokens) - set(tokens), "it has learned from rejected tokens"


def test_staged_versions_of_another_kind_replace_the_session(target_dir: Path, oracle: Oracle) -> None:
    with running(target_dir, "eagle", riders=2) as client:
        handle, toy, pool = client.engine.drafters("general"), Lookup(), client.engine.pool
        with client.engine.loop.changed:  # the lock prevents a swap
            handle.stage(2, {}, toy)
            handle.stage(3, {}, toy)
        client.swapped_to(3)
        client.submit("r", [1, 2, 3], 20, ignore_eos=True)
        assert client.wait()["r"].tokens == oracle.greedy([1, 2, 3], 20)
        assert pool.default.drafter is toy
