"""The whole engine keeps the target's law: a G-test on the joint law of the first three tokens.

The target knows five tokens and the drafter may draft four of them, so that every cell of the law is met often.
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
from tests.unit.engine.harness import settings, shaken
from tests.unit.engine.rounds import drawn
from tests.unit.engine.toys import Lookup, Pairs, Rider, Skip
from tests.unit.verification.test_penalties import written_out

VOCABULARY, LENGTH, COUNT, SLOTS, PROMPT = 5, 3, 4000, 64, (3, 1, 4)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A target that knows five tokens."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return drawn(LlamaForCausalLM(config).eval(), 0.25)


class Mute:
    """A tokenizer whose tokens have no text: making text would take longer than all the rest."""

    eos_token_id = None

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return ""


def law(model: LlamaForCausalLM, sampling: SamplingParams, length: int) -> Tensor:
    """[V ** length] the exact joint law of the first tokens, the first token in the highest place."""
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
    """An engine of ``SLOTS`` slots whose text nobody reads."""
    slotted, needs = copy.deepcopy(model), drafter.needs if drafter else Needs()
    chosen = settings(Path("tiny"), slots=SLOTS, depth=2, chunk=4096, governed=governed)
    sizes = {"scratch": chosen.engine.max_draft + 1 + needs.riders, "embeddings": SLOTS * needs.embeddings}
    target = SlotModel(slotted, slots=SLOTS, context=128, taps=needs.taps, **sizes)
    return Engine(target, Mute(), chosen, drafter, 1)  # type: ignore[arg-type]


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
    meanwhile: Callable[[Engine], None] = lambda engine: None,
) -> float:
    """Decode many requests that differ in their seed only, ``SLOTS`` at a time, and test the first ``length`` tokens.

    Where there are several policies, the requests take turns with them.
    Without ``cells`` [n] of tokens [n, length], each of the V ** length outputs is a cell of its own.
    ``meanwhile`` is called for each update that arrives.
    """
    torch.manual_seed(2)
    engine = engine_on(model, drafter or Eagle.from_target(copy.deepcopy(model), 4), governed)
    prepare(engine)
    seen: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
    policies = [*policy] if isinstance(policy, Sequence) else [policy]
    seeded = (dataclasses.replace(sampling, seed=seed) for seed in range(count))
    requests = [
        Request(str(one.seed), PROMPT, length + 1, one, ignore_eos=True, capture=True, policy=mine, domain=domain)
        for one, mine in zip(seeded, itertools.cycle(policies), strict=False)
    ]
    engine.start()
    try:
        # Each step of the engine looks at all that wait.
        for _, update in updates_of(engine, requests, 2 * SLOTS, patience=60):
            meanwhile(engine)
            seen[update.request_id] += update.token_ids
        counts = engine.counters().speculation()
    finally:
        engine.stop()
    assert counts.accepted > count / 10
    assert counts.drafted - counts.accepted > count / 10
    outputs = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))  # [V ** length, length]
    place = torch.arange(len(outputs)) if cells is None else cells(outputs)
    exact = law(model, sampling, length)
    goal = exact.new_zeros(int(place.max()) + 1).index_add(0, place, exact)
    codes = [sum(t * VOCABULARY**i for i, t in enumerate(reversed(s[:length]))) for s in seen.values()]
    found = place[torch.tensor(codes)].bincount(minlength=len(goal)).double()
    met = goal > 0
    outside = int(found[~met].sum())
    statistic = float(2 * torch.xlogy(found[met], found[met] / (goal[met] * count)).sum())
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
    "temperature 1": SamplingParams(1.0),
    "temperature 0.7": SamplingParams(0.7),
    "top-k": SamplingParams(1.0, top_k=3),
    "top-p": SamplingParams(1.0, top_p=0.8),
    "min-p": SamplingParams(1.5, min_p=0.5),
    "penalties": PENALISED,
    "seeds": SamplingParams(1.0, repeatable=True),
}


@pytest.mark.parametrize("sampling", SETTINGS.values(), ids=SETTINGS)
def test_speculation_does_not_change_the_law_of_the_output(model: LlamaForCausalLM, sampling: SamplingParams) -> None:
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
"""Each rule and each growth policy beside chains verified as chains."""


def named(name: str) -> Policy:
    growth, verification = POLICIES[name]
    return Policy.of(GROWTH_SETTINGS[growth["kind"]](**growth), verification)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_changes_the_law_of_the_output(model: LlamaForCausalLM, name: str) -> None:
    assert p_value(model, SamplingParams(1.0), named(name), count=2500) > 1e-4


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("name", POLICIES)
def test_in_a_hundred_thousand_runs_no_policy_changes_the_law(
    model: LlamaForCausalLM, name: str, temperature: float, top_p: float
) -> None:
    assert p_value(model, SamplingParams(temperature, top_p=top_p), named(name), count=100_000) > 1e-4


def test_swaps_and_drafts_of_changing_length_in_the_middle_of_requests_leave_the_law_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)  # noqa: S311 - repeatable, not secret

    def whim(chances: list[float], ready: Sequence[object], *_: object) -> list[int]:
        return [chance.randrange(3) for _ in ready]

    monkeypatch.setattr("osd.engine.planner.equal_drafts", whim)
    first = Eagle.from_target(copy.deepcopy(model), 4).weights()
    versions = itertools.cycle(enumerate([first, shaken(first)], 1))
    calls = itertools.count()
    swaps = []

    def disturb(engine: Engine) -> None:
        call = next(calls)
        if call % 100 == 0:
            engine.stage(*next(versions))
        swaps.append(engine.counters().swaps)

    assert p_value(model, SamplingParams(1.0), governed=True, meanwhile=disturb) > 1e-4
    assert swaps[-1] > 20


def test_a_canary_that_comes_and_is_promoted_in_the_middle_of_requests_leaves_the_law_alone(
    model: LlamaForCausalLM,
) -> None:
    first = Eagle.from_target(copy.deepcopy(model), 4).weights()
    calls, versions = itertools.count(), set()

    def disturb(engine: Engine) -> None:
        turn, call = divmod(next(calls), 150)
        number = 2 + turn
        if call == 0:
            weights = shaken(first, seed=turn) if turn % 2 else first
            engine.drafters("general").try_canary(Rollout(1 + turn, number, 0.5, 1.0), weights)
        elif call == 100:
            engine.stage(number, first)
            engine.drafters("general").end_canary()
        versions.update(engine.counters().by_version)

    assert p_value(model, SamplingParams(1.0), count=1500, meanwhile=disturb) > 1e-4
    assert len(versions) > 10


@pytest.mark.parametrize("toy", [Lookup, Rider, Skip, Recall])
def test_candidates_that_are_chosen_without_chance_leave_the_law_alone(
    model: LlamaForCausalLM, toy: type[Drafter]
) -> None:
    drafted: list[int] = []

    def look(engine: Engine) -> None:
        drafted.append(engine.counters().speculation().drafted)

    assert p_value(model, SamplingParams(1.0), count=1500, drafter=toy(), meanwhile=look) > 1e-4
    assert drafted[-1] > 500


def test_tokens_that_a_toy_draws_keep_the_law(model: LlamaForCausalLM) -> None:
    assert p_value(model, SamplingParams(1.0), count=1500, drafter=Pairs()) > 1e-4


def told_wrongly(drafts: VerificationBatch) -> VerificationBatch:
    """Shares of what was drawn that are a third of the true ones."""
    drawn = drafts.drawn_children
    wrong = None if drawn is None else drawn._replace(q=array("f", [share / 3 for share in drawn.q]))
    return dataclasses.replace(drafts, drawn_children=wrong)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("broken", [False, True], ids=["as it is", "told wrongly"])
def test_candidates_that_recall_draws_leave_the_law_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, temperature: float, broken: bool
) -> None:
    told = []

    def follow(logits: Tensor, drafts: VerificationBatch, sequences: Sequence[int]) -> dict[int, AcceptedPath]:
        if drafts.drawn_children is not None:
            told.append(sum(child >= 0 for child in drafts.drawn_children.child))
        return follow_draws(logits, told_wrongly(drafts) if broken else drafts, sequences)

    monkeypatch.setattr("osd.verification.verify.follow_draws", follow)
    policy = Policy.of(GROWTH_SETTINGS["best_first"]())  # type: ignore[arg-type]
    found = p_value(model, SamplingParams(temperature), policy, count=1500, drafter=Recall())
    assert sum(told) > 500
    assert found < 1e-9 if broken else found > 1e-4


@pytest.mark.parametrize("kind", ["best_first", "chain"])
def test_a_mixture_of_recall_and_a_trained_drafter_leaves_the_law_alone(model: LlamaForCausalLM, kind: str) -> None:
    torch.manual_seed(2)
    drafter = Mixed(Eagle.from_target(copy.deepcopy(model), 4))
    policy = Policy.of(GROWTH_SETTINGS[kind]())  # type: ignore[arg-type]
    assert p_value(model, SamplingParams(1.0), policy, count=1500, drafter=drafter) > 1e-4


class Coin:
    """A router that cannot decide."""

    def __init__(self) -> None:
        self.turn = itertools.cycle(["general", "code", "code"])

    def pick(self, embedding: np.ndarray, domains: list[str]) -> Pick:
        return Pick(embedding, Cluster(embedding), next(self.turn), "general")

    def learn(self, *measured: object) -> None: ...


def test_routing_between_the_drafters_of_domains_leaves_the_law_alone(model: LlamaForCausalLM) -> None:
    other = shaken(Eagle.from_target(copy.deepcopy(model), 4).weights())
    served: set[tuple[str, int]] = set()

    def prepare(engine: Engine) -> None:
        pool: Any = engine.pool
        router: Any = engine.loop.router
        pool.open("code", 5, other)
        router.routers[""] = Coin()

    def look(engine: Engine) -> None:
        served.update(engine.counters().by_version)

    assert p_value(model, SamplingParams(1.0), count=1500, domain=None, prepare=prepare, meanwhile=look) > 1e-4
    assert served == {("general", 1), ("code", 5)}


def test_trees_that_take_another_shape_after_every_round_leave_the_law_alone(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, shapes = random.Random(0), set()  # noqa: S311 - repeatable, not secret
    policy = Policy.of(StaticTreeSettings(budget=4, depth=2), "siblings")

    def whim(self: CostModel, sequences: float) -> dict[int, float]:
        shapes.add(policy.growth.max_nodes)
        return {1: 1.0, 2: 1.0, chance.choice([3, 5]): chance.choice([1.0, 9.0])}

    monkeypatch.setattr(AcceptanceTable, "due", lambda self: True)
    monkeypatch.setattr(CostModel, "forward_by_share", whim)
    assert p_value(model, SamplingParams(1.0), policy, count=2500) > 1e-4
    assert len(shapes) > 2


@pytest.mark.parametrize("sampling", [PENALISED, SamplingParams(1.0, repeatable=True)], ids=["penalties", "seeds"])
def test_a_tree_does_not_change_the_law_either(model: LlamaForCausalLM, sampling: SamplingParams) -> None:
    tree = Policy.of(DynamicTreeSettings(budget=4), "siblings")
    assert p_value(model, sampling, tree) > 1e-4


def repetitions(tokens: Tensor) -> Tensor:
    """[n] which of the tokens [n, length] repeat the one before, as one number."""
    again = (tokens[:, 1:] == tokens[:, :-1]).long()
    return (again << torch.arange(again.shape[1])).sum(-1)


def test_what_only_the_draft_path_repeats_is_penalised_once_for_all(model: LlamaForCausalLM) -> None:
    # Nothing is in a bias, and only the repetition penalty would ask for the prompt: two drafted tokens that are equal
    # and unlike the first of the output are known from their path alone. They decide about the fourth. At so high a
    # temperature many are accepted.
    sampling = SamplingParams(3.0, presence_penalty=-4.0)
    assert p_value(model, sampling, count=2500, length=4, cells=repetitions) > 1e-4


class AcceptEverything(ChainRule):
    """What must not pass: every drafted token is kept."""

    def verify(self, draft: DraftBatch, p: Distributions, noise: Noise) -> Verdict:
        index = torch.arange(draft.tokens.shape[1])
        token = noise.pick(p[torch.arange(len(draft.sizes)), draft.sizes], Purpose.RESIDUAL, draft.sizes)
        # One in four rounds stays honest, so that both outcomes are there to be counted.
        honest = VERIFICATIONS["honest"].verify(draft, p, noise)
        broken = noise.uniform(Purpose.BONUS, 0) < 0.75
        path = torch.where(index < draft.sizes[:, None], index, -1)
        return Verdict(
            torch.where(broken[:, None], path, honest.path),
            torch.where(broken, draft.sizes, honest.accepted),
            torch.where(broken, token, honest.token),
        )


def test_a_rule_that_keeps_what_it_should_not_is_caught(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFICATIONS, "honest", VERIFICATIONS["chain"])
    monkeypatch.setitem(VERIFICATIONS, "chain", AcceptEverything())
    assert p_value(model, SamplingParams(1.0)) < 1e-9


def test_chosen_candidates_that_are_kept_whatever_the_target_says_are_caught(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps_everything(
        logits: Tensor, drafts: VerificationBatch, sequences: Sequence[int]
    ) -> dict[int, AcceptedPath]:
        honest = follow_draws(logits, drafts, sequences)
        bare = dataclasses.replace(drafts, trees=[([], [])] * len(drafts.trees))
        ends = torch.tensor(drafts.rows).cumsum(0) - 1
        broken = follow_draws(logits[ends], bare, sequences)
        # One in four rounds stays honest, so that both outcomes are there to be counted.
        for b, path in honest.items():
            if (drafts.settings[b].seed + drafts.steps[b]) % 4 == 0:
                broken[b] = path
            else:
                broken[b] = list(range(len(drafts.trees[b][0]))), broken[b][1]
        return broken

    monkeypatch.setattr("osd.verification.verify.follow_draws", keeps_everything)
    assert p_value(model, SamplingParams(1.0), count=1500, drafter=Skip()) < 1e-9


def test_penalties_that_forget_the_draft_path_are_caught(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def committed_only(self: Penalties, logits: Tensor, rows: Tensor, nodes: Tensor, *more: Any) -> Tensor:
        return whole(self, logits, rows, torch.full_like(nodes, ROOT), *more)

    whole = Penalties.adjust
    monkeypatch.setattr(Penalties, "adjust", committed_only)
    assert p_value(model, PENALISED) < 1e-9
