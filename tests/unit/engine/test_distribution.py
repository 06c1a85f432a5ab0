"""Output distribution of the whole engine: a G-test on the joint distribution of the first three tokens.

The target has five tokens and the drafter four of them, so that every outcome is frequent.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.streams import updates_of
from osd.config import GROWTH_SETTINGS, DynamicTreeSettings, StaticTreeSettings
from osd.drafting import Drafter
from osd.drafting.base import Needs
from osd.drafting.eagle.drafter import Eagle
from osd.drafting.growth.acceptance_table import AcceptanceTable
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.economy.costs import CostModel
from osd.engine.engine import Engine
from osd.engine.policy import Policy
from osd.engine.request import Request, SamplingParams
from osd.registry.pointer import Rollout
from osd.routing.clusters import Cluster
from osd.routing.router import Pick
from osd.runtime.model import SlotModel
from osd.verification import VERIFICATIONS
from osd.verification.base import Verdict
from osd.verification.chains import ChainRule
from osd.verification.distributions import Distributions
from osd.verification.draws import AcceptedPath, VerificationBatch, follow_draws
from osd.verification.noise import Noise, Purpose
from osd.verification.penalties import Penalties
from osd.verification.tree import ROOT, DraftBatch
from tests.unit.engine.harness import settings, with_noise
from tests.unit.engine.steps import randomised
from tests.unit.engine.toys import Lookup, Pairs, Rider, Skip
from tests.unit.verification.test_penalties import written_out

VOCABULARY, LENGTH, COUNT, SLOTS, PROMPT = 5, 3, 2500, 64, (3, 1, 4)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Target with a vocabulary of five tokens."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return randomised(LlamaForCausalLM(config).eval(), 0.25)


class SilentTokenizer:
    """Tokenizer without text, because detokenisation would take most of the time."""

    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


def exact_distribution(model: LlamaForCausalLM, sampling: SamplingParams, length: int) -> Tensor:
    """Return [V ** length], the exact joint distribution; the first token is the most significant digit."""
    exact = copy.deepcopy(model).double()
    goal = torch.ones(1, dtype=torch.float64)
    paths = torch.tensor([PROMPT])
    for _ in range(length):
        with torch.no_grad():
            logits = exact(input_ids=paths, use_cache=False).logits[:, -1].tolist()
        histories = zip(logits, paths[:, len(PROMPT) :].tolist(), strict=True)
        scores = torch.stack(
            [written_out(row, range(VOCABULARY), sampling, PROMPT, output) for row, output in histories]
        )
        scores = scores.double() / sampling.temperature
        if sampling.min_p:
            p = scores.softmax(-1)
            scores = scores.masked_fill(p < sampling.min_p * p.amax(-1, keepdim=True), -torch.inf)
        if sampling.top_k:
            scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[:, -1:], -torch.inf)
        ordered, order = scores.softmax(-1).sort(descending=True)
        outside = (ordered.cumsum(-1) - ordered >= sampling.top_p).gather(-1, order.argsort())
        goal = (goal[:, None] * scores.masked_fill(outside, -torch.inf).softmax(-1)).flatten()
        following = torch.arange(VOCABULARY).repeat(len(paths))[:, None]
        paths = torch.cat([paths.repeat_interleave(VOCABULARY, 0), following], 1)
    return goal


def engine_on(model: LlamaForCausalLM, drafter: Drafter | None, governed: bool = False) -> Engine:
    """Return an engine of ``SLOTS`` slots without text."""
    slotted, needs = copy.deepcopy(model), drafter.needs if drafter else Needs()
    chosen = settings(Path("tiny"), slots=SLOTS, depth=2, chunk=4096, governed=governed)
    sizes = {"scratch": chosen.engine.max_draft + 1 + needs.riders, "embeddings": SLOTS * needs.embeddings}
    target = SlotModel(slotted, slots=SLOTS, context=128, taps=needs.taps, **sizes)
    return Engine(target, SilentTokenizer(), chosen, drafter, 1)  # type: ignore[arg-type]


def p_value(
    model: LlamaForCausalLM,
    sampling: SamplingParams,
    policy: Policy | Sequence[Policy] | None = None,
    *,
    count: int = COUNT,
    length: int = LENGTH,
    cells: Callable[[Tensor], Tensor] | None = None,
    drafter: Drafter | None = None,
    governed: bool = False,
    domain: str | None = "general",
    prepare: Callable[[Engine], None] = lambda engine: None,
    on_update: Callable[[Engine], None] = lambda engine: None,
) -> float:
    """Decode many requests that differ in their seed only, ``SLOTS`` at a time, and test the first ``length`` tokens.

    Several policies are assigned to the requests in turn. ``cells`` maps tokens [n, length] to outcomes [n]; by default
    each of the V ** length outputs is an outcome. ``on_update`` is called after each update.
    """
    torch.manual_seed(2)
    engine = engine_on(model, drafter or Eagle.from_target(copy.deepcopy(model), 4), governed)
    prepare(engine)
    seen: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
    policies = [*policy] if isinstance(policy, Sequence) else [policy]
    seeded = (dataclasses.replace(sampling, seed=seed) for seed in range(count))
    requests = [
        Request(
            str(request_sampling.seed), PROMPT, length + 1, request_sampling, ignore_eos=True, capture=True,
            policy=request_policy, domain=domain,
        )
        for request_sampling, request_policy in zip(seeded, itertools.cycle(policies), strict=False)
    ]  # fmt: skip
    engine.start()
    try:
        # Each step looks at all waiting sequences.
        for _, update in updates_of(engine, requests, 2 * SLOTS, patience=60):
            on_update(engine)
            seen[update.request_id] += update.token_ids
        counts = engine.counters().speculation()
    finally:
        engine.stop()
    assert counts.accepted > count / 10
    assert counts.drafted - counts.accepted > count / 10
    outputs = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))  # [V ** length, length]
    place = torch.arange(len(outputs)) if cells is None else cells(outputs)
    exact = exact_distribution(model, sampling, length)
    goal = exact.new_zeros(int(place.max()) + 1).index_add(0, place, exact)
    codes = [sum(t * VOCABULARY**i for i, t in enumerate(reversed(s[:length]))) for s in seen.values()]
    counted = place[torch.tensor(codes)].bincount(minlength=len(goal)).double()
    met = goal > 0
    outside = int(counted[~met].sum())
    statistic = float(2 * torch.xlogy(counted[met], counted[met] / (goal[met] * count)).sum())
    freedom = int(met.sum()) - 1
    print(
        f"{sampling}: G = {statistic:.1f}, {freedom} degrees of freedom, {outside} outside, "
        f"acceptance rate {counts.acceptance_rate:.2f}"
    )
    return 0.0 if outside else float(chi2.sf(statistic, freedom))


PENALISED = SamplingParams(
    1.0, presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.8, logit_bias=((2, 0.7), (0, -0.5))
)
SETTINGS = {
    "temperature 1": SamplingParams(1.0), "temperature 0.7": SamplingParams(0.7), "top-k": SamplingParams(1.0, top_k=3),
    "top-p": SamplingParams(1.0, top_p=0.8), "min-p": SamplingParams(1.5, min_p=0.5), "penalties": PENALISED,
    "seeds": SamplingParams(1.0, repeatable=True),
}  # fmt: skip


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_speculation_keeps_the_output_distribution(model: LlamaForCausalLM, sampling: SamplingParams) -> None:
    assert p_value(model, sampling) > 1e-4


POLICIES = {
    "confidence": ({"kind": "confidence", "depth": 3, "eta": 0.3}, "chain"),
    "acceptance head": ({"kind": "acceptance_head", "depth": 3, "h": 0.6}, "chain"),
    "heuristic": ({"kind": "heuristic", "depth": 3, "start": 1}, "chain"),
    "block": ({"kind": "chain", "depth": 3}, "block"),
    "siblings": ({"kind": "dynamic_tree", "budget": 4}, "siblings"),
    "siblings with replacement": ({"kind": "static_tree", "budget": 4, "depth": 2, "draw": "iid"}, "siblings"),
    "traversal": ({"kind": "dynamic_tree", "budget": 4, "threshold": 0.1}, "traversal"),
    "naive": ({"kind": "top_k_tree", "budget": 4, "depth": 2, "top_k": 2}, "naive"),
    "greedy multi-draft": (
        {"kind": "static_tree", "budget": 4, "depth": 2, "draw": "top_then_drawn"},
        "greedy_multidraft",
    ),
    "k-seq": ({"kind": "static_tree", "budget": 4, "depth": 2, "draw": "iid"}, "k_seq"),
}
"""Each rule and each growth policy other than the default chains."""


def policy_named(name: str) -> Policy:
    growth, verification = POLICIES[name]
    return Policy.of(GROWTH_SETTINGS[growth["kind"]](**growth), verification)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_the_output_distribution(model: LlamaForCausalLM, name: str) -> None:
    assert p_value(model, SamplingParams(1.0), policy_named(name)) > 1e-4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_the_distribution_in_long_runs(
    model: LlamaForCausalLM, name: str, temperature: float, top_p: float
) -> None:
    assert p_value(model, SamplingParams(temperature, top_p=top_p), policy_named(name), count=100_000) > 1e-4


def test_swaps_and_changing_lengths_keep_the_distribution(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch):
    chance = random.Random(0)  # noqa: S311 - repeatable, not secret

    def random_choice(chances: list[float], ready: Sequence[object], *_: object) -> list[int]:
        return [chance.randrange(3) for _ in ready]

    monkeypatch.setattr("osd.engine.planner.equal_drafts", random_choice)
    first = Eagle.from_target(copy.deepcopy(model), 4).weights()
    versions = itertools.cycle(enumerate([first, with_noise(first)], 1))
    calls = itertools.count()
    swaps = []

    def disturb(engine: Engine) -> None:
        call = next(calls)
        if call % 100 == 0:
            engine.stage(*next(versions))
        swaps.append(engine.counters().swaps)

    assert p_value(model, SamplingParams(1.0), governed=True, on_update=disturb) > 1e-4
    assert swaps[-1] > 20


def test_canary_trials_keep_the_distribution(model: LlamaForCausalLM):
    first = Eagle.from_target(copy.deepcopy(model), 4).weights()
    calls, versions = itertools.count(), set()

    def disturb(engine: Engine) -> None:
        turn, call = divmod(next(calls), 150)
        number = 2 + turn
        if call == 0:
            weights = with_noise(first, seed=turn) if turn % 2 else first
            engine.drafters("general").try_canary(Rollout(1 + turn, number, 0.5, 1.0), weights)
        elif call == 100:
            engine.stage(number, first)
            engine.drafters("general").end_canary()
        versions.update(engine.counters().by_version)

    assert p_value(model, SamplingParams(1.0), count=1500, on_update=disturb) > 1e-4
    assert len(versions) > 10


@pytest.mark.parametrize("toy", [Lookup, Rider, Skip, Recall])
def test_deterministic_drafts_keep_the_distribution(model: LlamaForCausalLM, toy: type[Drafter]) -> None:
    drafted: list[int] = []

    def look(engine: Engine) -> None:
        drafted.append(engine.counters().speculation().drafted)

    assert p_value(model, SamplingParams(1.0), count=1500, drafter=toy(), on_update=look) > 1e-4
    assert drafted[-1] > 500


def test_drawn_toy_drafts_keep_the_distribution(model: LlamaForCausalLM) -> None:
    assert p_value(model, SamplingParams(1.0), count=1500, drafter=Pairs()) > 1e-4


def with_wrong_q(drafts: VerificationBatch) -> VerificationBatch:
    """Return the drafts with a third of the true q."""
    randomised = drafts.drawn_children
    wrong = None if randomised is None else randomised._replace(q=array("f", [share / 3 for share in randomised.q]))
    return dataclasses.replace(drafts, drawn_children=wrong)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("broken", [False, True], ids=["correct", "wrong q"])
def test_drawn_recall_keeps_the_distribution(model: LlamaForCausalLM, monkeypatch, temperature: float, broken: bool):
    drawn_tokens = []

    def follow(logits: Tensor, drafts: VerificationBatch, sequences: Sequence[int]) -> dict[int, AcceptedPath]:
        if drafts.drawn_children is not None:
            drawn_tokens.append(sum(child >= 0 for child in drafts.drawn_children.child))
        return follow_draws(logits, with_wrong_q(drafts) if broken else drafts, sequences)

    monkeypatch.setattr("osd.verification.verify.follow_draws", follow)
    policy = Policy.of(GROWTH_SETTINGS["best_first"]())  # type: ignore[arg-type]
    p = p_value(model, SamplingParams(temperature), policy, count=1500, drafter=Recall())
    assert sum(drawn_tokens) > 500
    assert p < 1e-9 if broken else p > 1e-4


@pytest.mark.parametrize("kind", ["best_first", "chain"])
def test_mixed_drafter_keeps_the_distribution(model: LlamaForCausalLM, kind: str) -> None:
    torch.manual_seed(2)
    drafter = Mixed(Eagle.from_target(copy.deepcopy(model), 4))
    policy = Policy.of(GROWTH_SETTINGS[kind]())  # type: ignore[arg-type]
    assert p_value(model, SamplingParams(1.0), policy, count=1500, drafter=drafter) > 1e-4


class AlternatingRouter:
    """Router that alternates between domains."""

    def __init__(self) -> None:
        self.turn = itertools.cycle(["general", "code", "code"])

    def pick(self, embedding: np.ndarray, domains: list[str]) -> Pick:
        return Pick(embedding, Cluster(embedding), next(self.turn), "general")

    def learn(self, *measured: object) -> None: ...


def test_routing_between_domains_keeps_the_distribution(model: LlamaForCausalLM) -> None:
    other = with_noise(Eagle.from_target(copy.deepcopy(model), 4).weights())
    served: set[tuple[str, int]] = set()

    def prepare(engine: Engine) -> None:
        pool: Any = engine.pool
        router: Any = engine.loop.router
        pool.open("code", 5, other)
        router.routers[""] = AlternatingRouter()

    def look(engine: Engine) -> None:
        served.update(engine.counters().by_version)

    assert p_value(model, SamplingParams(1.0), count=1500, domain=None, prepare=prepare, on_update=look) > 1e-4
    assert served == {("general", 1), ("code", 5)}


def test_changing_tree_shapes_keep_the_distribution(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, shapes = random.Random(0), set()  # noqa: S311 - repeatable, not secret
    policy = Policy.of(StaticTreeSettings(budget=4, depth=2), "siblings")

    def random_choice(self: CostModel, sequences: float) -> dict[int, float]:
        shapes.add(policy.growth.max_nodes)
        return {1: 1.0, 2: 1.0, chance.choice([3, 5]): chance.choice([1.0, 9.0])}

    monkeypatch.setattr(AcceptanceTable, "due", lambda self: True)
    monkeypatch.setattr(CostModel, "forward_by_share", random_choice)
    assert p_value(model, SamplingParams(1.0), policy) > 1e-4
    assert len(shapes) > 2


@pytest.mark.parametrize("sampling", [PENALISED, SamplingParams(1.0, repeatable=True)], ids=["penalties", "seeds"])
def test_tree_with_penalties_or_seeds_keeps_the_distribution(model: LlamaForCausalLM, sampling: SamplingParams) -> None:
    tree = Policy.of(DynamicTreeSettings(budget=4), "siblings")
    assert p_value(model, sampling, tree) > 1e-4


def repetitions(tokens: Tensor) -> Tensor:
    """Return [n], a bit mask of the tokens [n, length] that repeat the token before."""
    again = (tokens[:, 1:] == tokens[:, :-1]).long()
    return (again << torch.arange(again.shape[1])).sum(-1)


def test_repetition_within_a_draft_is_penalised(model: LlamaForCausalLM) -> None:
    # Only the draft path shows that two drafted tokens are equal: the penalty ignores the prompt, and the first token
    # of the output differs. The fourth token depends on it. The high temperature accepts many draft tokens.
    sampling = SamplingParams(3.0, presence_penalty=-4.0)
    assert p_value(model, sampling, length=4, cells=repetitions) > 1e-4


class AcceptEverything(ChainRule):
    """Wrong rule that accepts every draft token."""

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        index = torch.arange(draft.tokens.shape[1])
        token = noise.pick(p[torch.arange(len(draft.sizes)), draft.sizes], Purpose.RESIDUAL, draft.sizes)
        # A quarter of the steps is verified correctly, so that both outcomes occur.
        honest = VERIFICATIONS["honest"].verify(draft, p, noise)
        broken = noise.uniform(Purpose.BONUS, 0) < 0.75
        path = torch.where(index < draft.sizes[:, None], index, -1)
        return Verdict(
            torch.where(broken[:, None], path, honest.path),
            torch.where(broken, draft.sizes, honest.accepted),
            torch.where(broken, token, honest.token),
        )


def test_rule_that_accepts_everything_is_detected(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFICATIONS, "honest", VERIFICATIONS["chain"])
    monkeypatch.setitem(VERIFICATIONS, "chain", AcceptEverything())
    assert p_value(model, SamplingParams(1.0)) < 1e-9


def test_accepting_all_deterministic_drafts_is_detected(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch):
    def keeps_everything(
        logits: Tensor, drafts: VerificationBatch, sequences: Sequence[int]
    ) -> dict[int, AcceptedPath]:
        honest = follow_draws(logits, drafts, sequences)
        bare = dataclasses.replace(drafts, trees=[([], [])] * len(drafts.trees))
        ends = torch.tensor(drafts.rows).cumsum(0) - 1
        broken = follow_draws(logits[ends], bare, sequences)
        # A quarter of the steps is verified correctly, so that both outcomes occur.
        for b, path in honest.items():
            if (drafts.settings[b].seed + drafts.steps[b]) % 4 == 0:
                broken[b] = path
            else:
                broken[b] = list(range(len(drafts.trees[b][0]))), broken[b][1]
        return broken

    monkeypatch.setattr("osd.verification.verify.follow_draws", keeps_everything)
    assert p_value(model, SamplingParams(1.0), count=1500, drafter=Skip()) < 1e-9


def test_penalties_without_the_draft_path_are_detected(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch):
    def committed_only(self: Penalties, logits: Tensor, rows: Tensor, nodes: Tensor, *more: Any) -> Tensor:
        return whole(self, logits, rows, torch.full_like(nodes, ROOT), *more)

    whole = Penalties.adjust
    monkeypatch.setattr(Penalties, "adjust", committed_only)
    assert p_value(model, PENALISED) < 1e-9
