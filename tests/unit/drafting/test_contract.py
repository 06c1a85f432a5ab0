"""Contract of all kinds of drafters; a new kind adds a line to ``CASES``."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from osd.config import DRAFTER_SETTINGS
from osd.drafting import DRAFTERS, Drafter, DrafterError, Trainable, from_config, initial
from osd.drafting.growth import Stop
from osd.drafting.growth.chain import Chain
from osd.drafting.growth.top_k_tree import TopKTree
from osd.drafting.mixed import Mixed
from osd.drafting.session import Runtime
from osd.engine.request import SamplingParams
from osd.runtime.batch import consecutive_rows
from osd.runtime.linear import PackedLinear
from osd.runtime.model import SlotModel
from osd.runtime.native import kernels
from osd.target.model import load_model
from osd.verification.sampling import SamplingBatch
from tests.tiny import loaded, make_tiny
from tests.unit.drafting.driver import NOTHING, Driver
from tests.unit.drafting.other_tokens import make_pair, random_model
from tests.unit.drafting.sequences import Sequences, assert_close, at_places, expand_chain, expand_tree
from tests.unit.verification.enumeration import check_integrity

VOCABULARY, LENGTH = 150, 30
PARENTS = [-1, -1, 0, 0, 1, 2, 2, 5, 7, 4]
"""A tree of five levels."""

Reads = Callable[[int, int], bool]


def chain_of_tokens(depth: int, back: int) -> bool:
    return 1 <= back <= depth


def last_token(depth: int, back: int) -> bool:
    return depth >= 1 and back == 1


def blocks_of(size: int) -> Reads:
    return lambda depth, back: depth - depth // size * size < back <= depth


def last_token_of_calls(size: int) -> Reads:
    return lambda depth, back: depth >= size and back - 1 == depth % size


def no_token(depth: int, back: int) -> bool:
    return False


@dataclass(frozen=True)
class Case:
    """A kind of drafter.

    Attributes:
        settings: settings of a first version, or a function that makes a drafter for a target.
        reads: whether training's step ``depth`` for a place reads the token drafted ``back`` places before it.
        sees: distance in places of the last target state that step 0 reads; None for no states.
        ahead: whether each further step reads only states of the step before.
        tolerance: relative error of sessions against training, which multiplies in float32.
        target: name of the target.
        noise: standard deviation of the noise on its first weights.
        chains: ways in which a session drafts whole greedy chains in one call: "kernels" or "bucketed".
    """

    settings: Any
    reads: Reads = no_token
    sees: int | None = None
    ahead: bool = True
    tolerance: float = 1e-2
    target: str = "tiny"
    noise: float = 0.05
    chains: tuple[str, ...] = ()


def of_kind(kind: str, **fields: Any) -> Any:
    return DRAFTER_SETTINGS[kind](**fields)


BOTH = ("kernels", "bucketed")
MODEL = {"reads": last_token, "tolerance": 0.03}
CASES = {
    "dspark": Case(of_kind("dspark", vocabulary=VOCABULARY), last_token, 2, tolerance=0.02, chains=BOTH),
    "dspark of 1": Case(of_kind("dspark", vocabulary=VOCABULARY, layers=1, rank=8), last_token, 2, chains=BOTH),
    "eagle": Case(of_kind("eagle", vocabulary=VOCABULARY), chain_of_tokens, 2, chains=BOTH),
    "early_exit": Case(of_kind("early_exit", vocabulary=VOCABULARY), last_token, 1, False, target="deep", noise=0.1),
    "falcon": Case(of_kind("falcon", vocabulary=VOCABULARY, block=2), blocks_of(2), 2),
    "falcon of 3": Case(of_kind("falcon", vocabulary=VOCABULARY, block=3), blocks_of(3), 2),
    "kangaroo": Case(of_kind("kangaroo", vocabulary=VOCABULARY, exit_layer=2), last_token, 1, False),
    "language_model": Case(of_kind("language_model"), chains=("bucketed",), **MODEL),
    "llama": Case(lambda target: random_model("llama"), chains=("bucketed",), **MODEL),
    "gpt_neox": Case(lambda target: random_model("gpt_neox"), chains=("bucketed",), **MODEL),
    "qwen2": Case(lambda target: random_model("qwen2"), chains=("bucketed",), **MODEL),
    "other tokens": Case("source", target="pair", chains=("bucketed",), **MODEL),
    "looks ahead": Case(
        of_kind("language_model", prompt_tokens=2), last_token_of_calls(3), tolerance=0.03, chains=BOTH
    ),
    "medusa": Case(of_kind("medusa", vocabulary=VOCABULARY, heads=4), sees=2, noise=0.2, chains=BOTH),
    "prompt_tokens": Case(of_kind("prompt_tokens", tokens=3, copies=2), tolerance=0.03),
}  # fmt: skip
UNTRAINED = {
    "recall": Case(of_kind("recall")),
    "token_select": Case(of_kind("token_select")),
    "mixed": Case(of_kind("eagle", vocabulary=VOCABULARY)),
}
"""Kinds without training, and a mixed drafter."""

WAYS = [
    pytest.param(name, way, id=f"{name}-{way}")
    for name, case in CASES.items()
    for way in ("kernels", *(["plain"] if case.sees is not None else []), "bucketed")
]
"""Ways of a session to compute: with our kernels, with PyTorch's layers, and as on a GPU."""


def of(choose: Callable[[Case], object]) -> pytest.MarkDecorator:
    """Parametrise a test with the chosen trained kinds."""
    return pytest.mark.parametrize("name", [name for name, case in CASES.items() if choose(case)])


every_trained = of(lambda case: True)
every = pytest.mark.parametrize("name", [*CASES, *UNTRAINED])
with_states = of(lambda case: case.sees is not None)


@pytest.fixture(scope="module")
def targets(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make the tiny target, a deep target, and a target with a draft model of another tokenizer."""
    pair, source = make_pair(tmp_path_factory.mktemp("pair"), noise=0.05)
    deep = make_tiny(tmp_path_factory.mktemp("deep"), layers=8)
    return {"tiny": target_dir, "deep": deep, "pair": pair, "source": source}


@pytest.fixture(scope="module")
def make(targets: dict[str, Path]) -> Callable[..., Any]:
    """Make a drafter of a case with random bfloat16 weights and a vocabulary with gaps."""

    @functools.cache
    def made(name: str, seed: int) -> Drafter:
        case = {**CASES, **UNTRAINED}[name]
        settings, target = case.settings, targets[case.target]
        torch.manual_seed(seed)
        if settings == "source":
            settings = of_kind("language_model", source=str(targets["source"]))
        drafter = settings(target) if callable(settings) else initial(settings, target, target)
        if isinstance(drafter, Trainable):
            drafter.adapt_vocabulary(torch.rand(259))
            with torch.no_grad():
                for parameter in drafter.trained().values():
                    parameter.copy_((parameter + torch.randn_like(parameter) * case.noise).bfloat16())
        return Mixed(drafter) if name == "mixed" else drafter

    return lambda name, seed=3: copy.deepcopy(made(name, seed))


@pytest.fixture
def start(targets: dict[str, Path], make: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Start a session of a case in one of the ``WAYS``."""

    def started(name: str, way: str = "kernels", drafter: Drafter | None = None, **more: Any) -> Driver:
        if way == "plain":
            monkeypatch.setattr("osd.drafting.autoregressive.fused_dtype", lambda device: torch.float32)
            monkeypatch.setattr("osd.runtime.attention.native.kernels", lambda: None)
        case = {**CASES, **UNTRAINED}[name]
        return Driver(drafter or make(name), targets[case.target], bucketed=way == "bucketed", **more)

    return started


@pytest.fixture
def batch_of(targets: dict[str, Path]) -> Callable[..., Sequences]:
    """Make a training batch with the target's states of its tokens [B, L], if the kind reads states."""

    def batch(name: str, drafter: Any, tokens: Tensor, places: list[tuple[int, int]]) -> Sequences:
        taps = drafter.needs.taps
        if not taps:
            return at_places(tokens, None, places)
        how = {"slots": 1, "context": 2 * LENGTH, "scratch": 1, "taps": taps}
        target = SlotModel(loaded(targets[CASES[name].target]), **how)
        states = [target.forward(consecutive_rows(0, 0, row), NOTHING).hidden for row in tokens.tolist()]
        return at_places(tokens, torch.stack([states for states in states if states is not None]), places)

    return batch


def texts(drafter: Any, count: int, seed: int = 1) -> Tensor:
    """Return [count, LENGTH] tokens of the draft vocabulary."""
    ids = getattr(drafter, "draft_ids", None)
    ids = torch.arange(256) if ids is None else ids
    return ids[torch.randint(0, len(ids), (count, LENGTH), generator=torch.Generator().manual_seed(seed))]


def depth_of(drafter: Any) -> int:
    return drafter.levels or 5


def next_logits(driver: Driver, slot: int) -> Tensor:
    """Return the logits after the text of a slot."""
    return expand_chain(driver.session, [slot], torch.empty(1, 0, dtype=torch.int64))[0][0]


def test_cases_hold_every_kind() -> None:
    kinds = {getattr(case.settings, "kind", "language_model") for case in [*CASES.values(), *UNTRAINED.values()]}
    assert kinds == DRAFTERS.keys()


@pytest.mark.parametrize(("name", "way"), WAYS)
@torch.inference_mode()
def test_session_logits_equal_training_logits(start: Any, make: Any, batch_of: Any, name: str, way: str) -> None:
    """Three sequences in one call, over three steps with different and equal numbers of new tokens."""
    drafter, slots = make(name), [2, 0, 3]
    driver, depth, tokens = start(name, way, drafter), depth_of(drafter), texts(drafter, 3)
    for ends in ([5, 9, 3], [8, 12, 6], [20, 20, 20]):
        for row, end in enumerate(ends):
            driver.read(slots[row], tokens[row, :end].tolist())
        drafted = torch.stack([tokens[row, end : end + depth - 1] for row, end in enumerate(ends)])
        for step, got in enumerate(expand_chain(driver.session, slots, drafted)):
            places = [(row, end + step) for row, end in enumerate(ends)]
            goal = drafter.unroll(batch_of(name, drafter, tokens, places), depth)[step]
            assert_close(got, goal, CASES[name].tolerance)


@pytest.mark.parametrize("name", [*CASES, "token_select"])
def test_tree_node_logits_equal_chain_logits(start: Any, make: Any, name: str) -> None:
    drafter = make(name)
    tokens, deepest = texts(drafter, 1), (getattr(drafter, "levels", None) or 6) - 1
    paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    nodes = next((node for node, path in enumerate(paths) if len(path) > deepest), len(PARENTS))
    drafted = tokens[0, 15 : 15 + nodes].tolist()
    tree, chains = start(name, drafter=drafter), start(name, drafter=drafter)
    tree.read(0, tokens[0, :5].tolist())
    tree.read(1, tokens[0, :10].tolist())
    logits = expand_tree(tree.session, 1, drafted, PARENTS[:nodes])
    for node, path in enumerate(paths[:nodes]):
        chains.read(1, tokens[0, :10].tolist())
        alone = expand_chain(chains.session, [1], torch.tensor([[drafted[above] for above in path]]))
        assert_close(logits[1 + node], alone[-1][0], CASES.get(name, UNTRAINED.get(name)).tolerance)
        chains.close(1)
    assert not torch.allclose(logits[0], logits[-1])


@every_trained
@torch.inference_mode()
def test_training_reads_drafted_tokens_like_a_draft(make: Any, batch_of: Any, name: str) -> None:
    drafter = make(name)
    depth, tokens, at = depth_of(drafter), texts(drafter, 1), 12
    changed = tokens.clone()
    changed[0, at] = next(token for token in texts(drafter, 1, 2)[0] if token != tokens[0, at])
    places = [(0, at + back) for back in range(6)]
    batch = batch_of(name, drafter, tokens, places)
    true, actual = drafter.unroll(batch, depth), drafter.unroll(batch, depth, changed)
    goal = drafter.unroll(batch_of(name, drafter, changed, places), depth)
    read = 0
    for step in range(depth):
        for back in range(6):
            reads = CASES[name].reads(step, back)
            torch.testing.assert_close(actual[step][back], (goal if reads else true)[step][back], rtol=1e-3, atol=1e-3)
            read += reads and not torch.allclose(goal[step][back], true[step][back], atol=1e-2)
    assert (read > 0) == any(CASES[name].reads(step, back) for step in range(depth) for back in range(6))


@every_trained
@torch.inference_mode()
def test_training_reads_only_inputs_of_a_draft(make: Any, batch_of: Any, name: str) -> None:
    """No token from the place on, and no target state after the start of the draft."""
    drafter, case = make(name), CASES[name]
    depth, tokens, place = depth_of(drafter), texts(drafter, 1), 14
    batch = batch_of(name, drafter, tokens, [(0, place)])
    before = drafter.unroll(batch, depth)
    later = tokens.clone()
    later[0, place:] = texts(drafter, 1, 2)[0, place:]
    for step, logits in enumerate(drafter.unroll(replace(batch, token_ids=later), depth)):
        torch.testing.assert_close(logits, before[step], rtol=1e-4, atol=1e-4)
    if case.sees is not None:
        for step in range(depth):
            last = place - case.sees - (step if case.ahead else 0)
            for seen in (False, True):
                hidden = batch.hidden.clone()
                hidden[:, last + (not seen) :] = 9.0
                logits = drafter.unroll(replace(batch, hidden=hidden), depth)[step]
                assert torch.allclose(logits, before[step], rtol=1e-4, atol=1e-4) is not seen


@every_trained
@torch.inference_mode()
def test_padding_has_no_effect_in_training(make: Any, batch_of: Any, name: str) -> None:
    drafter = make(name)
    tokens = texts(drafter, 2)
    batch = batch_of(name, drafter, tokens, [(0, 12), (1, 25)])
    padded = tokens.clone()
    padded[0, 13:] = 0
    other = replace(batch, token_ids=padded, lengths=torch.tensor([13, LENGTH]))
    for actual, expected in zip(drafter.unroll(other, 2), drafter.unroll(batch, 2), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@with_states
def test_training_without_target_states_is_refused(make: Any, name: str) -> None:
    drafter = make(name)
    with pytest.raises(DrafterError, match=f"^{drafter.kind} learns from hidden states, and the trace has none$"):
        drafter.unroll(at_places(texts(drafter, 1), None, [(0, 5)]), 1)


@every_trained
@torch.inference_mode()
def test_acceptance_head_reads_the_states_of_training(start: Any, make: Any, batch_of: Any, name: str) -> None:
    drafter = make(name).add_head()
    nn.init.ones_(drafter.acceptance.odds.weight)
    driver, depth, ends = start(name, drafter=drafter), depth_of(drafter), [7, 16]
    tokens = texts(drafter, 2)
    for row, end in enumerate(ends):
        driver.read(row, tokens[row, :end].tolist())
    drafted = texts(drafter, 2, 2)[:, :depth].contiguous()
    if name == "looks ahead":  # training uses true tokens between a call and the place
        drafted = torch.stack([tokens[row, end : end + depth] for row, end in enumerate(ends)])
    if drafter.levels is not None:
        drafted = drafted[:, : depth - 1].contiguous()
    session, states, judged = driver.session, list[Tensor](), list[Tensor]()

    class Noting:
        support = session.support

        def expand(self, *arguments: Any) -> Tensor:
            logits = session.expand(*arguments)
            states.append(session.states)
            judged.append(session.acceptance())
            return logits

    expand_chain(Noting(), [0, 1], drafted)
    places = [(row, end + step) for step in range(drafted.shape[1]) for row, end in enumerate(ends)]
    batch = batch_of(name, drafter, tokens, places)
    goal = drafter.drafted_states(batch, drafted.T.flatten(), drafted.shape[1])
    for step, state in enumerate(states[1:]):
        assert state.shape == (2, drafter.state_width)
        torch.testing.assert_close(judged[1 + step], drafter.acceptance(state).sigmoid())
        assert_close(state, goal[step][2 * step : 2 * step + 2], 2 * CASES[name].tolerance)


@every
def test_version_is_restored_from_config_and_weights(
    make: Any, batch_of: Any, targets: dict[str, Path], name: str
) -> None:
    drafter, case = make(name), {**CASES, **UNTRAINED}[name]
    if isinstance(drafter, Trainable):
        nn.init.ones_(drafter.add_head().acceptance.odds.weight)
    again = from_config(json.loads(json.dumps(drafter.config())), targets[case.target])
    again.load_weights({key: value.clone() for key, value in drafter.weights().items()})
    assert again.config() == drafter.config()
    assert again.weights().keys() == drafter.weights().keys()
    for key, value in again.weights().items():
        assert torch.equal(value, drafter.weights()[key]), key
    if isinstance(drafter, Trainable) and isinstance(again, Trainable):
        assert again.needs == drafter.needs
        assert again.draft_ids is None or torch.equal(again.draft_ids, drafter.draft_ids)
        batch = batch_of(name, drafter, texts(drafter, 2), [(0, 7), (1, 25)])
        with torch.no_grad():
            for actual, expected in zip(again.unroll(batch, 3), drafter.unroll(batch, 3), strict=True):
                assert torch.equal(actual, expected)


@of(lambda case: not callable(case.settings) and case.target != "pair")
def test_version_holds_no_table_of_the_target(make: Any, name: str) -> None:
    shapes = {key: list(value.shape) for key, value in make(name).weights().items()}
    own = ("t2d", "markov_in.weight")  # the drafter's tables
    assert not [key for key, shape in shapes.items() if shape[:1] == [259] and key not in own]


@pytest.mark.parametrize("same", [True, False])
@of(lambda case: getattr(case.settings, "vocabulary", None))
def test_equal_target_table_is_shared_in_memory(make: Any, targets: dict[str, Path], name: str, same: bool) -> None:
    drafter = make(name)
    model = load_model(targets[CASES[name].target], "bfloat16", "cpu")
    drafter.target_head = drafter.target_head.bfloat16()
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += not same
    target = SlotModel(model, slots=2, context=32, scratch=8, taps=drafter.needs.taps)
    before = drafter.target_head.clone()
    session = drafter.session(Runtime.serving(2, 32, 8, target=target))
    assert (drafter.target_head.untyped_storage().data_ptr() == target.embedding.untyped_storage().data_ptr()) == same
    assert torch.equal(drafter.target_head, before)
    assert session.stage(drafter.weights())


@pytest.mark.parametrize(("name", "way"), WAYS)
@torch.inference_mode()
def test_loaded_version_drafts_like_a_fresh_session(start: Any, make: Any, name: str, way: str) -> None:
    """Load several versions in turn while a sequence is open."""
    drafter, other = make(name), make(name, 8)
    running, goal = start(name, way, drafter), start(name, way, other)
    text = texts(drafter, 1)[0].tolist()
    running.read(1, text[:9])
    before = next_logits(running, 1)
    for version in (other, drafter, other):  # over the state of earlier versions
        given = {key: value.clone() for key, value in version.weights().items()}
        staged = running.session.stage(given)
        running.session.load(staged)
        for value in given.values():  # the session has tensors of its own
            value.zero_()
    assert running.session.support is None or torch.equal(running.session.support, other.draft_ids)
    for driver in (running, goal):
        driver.read(0, text[:12])
        driver.read(0, text[:14])
    actual, expected = next_logits(running, 0), next_logits(goal, 0)
    assert torch.equal(actual, expected)
    assert not torch.allclose(actual, before, atol=1e-3)
    running.read(1, text[:15])
    assert next_logits(running, 1).isfinite().all()


@every_trained
@torch.inference_mode()
def test_staged_version_has_no_effect_before_load(start: Any, make: Any, name: str) -> None:
    drafter, text = make(name), texts(make(name), 1)[0].tolist()
    staging, alone = start(name, drafter=drafter), start(name, drafter=drafter)
    staging.session.stage(make(name, 8).weights())
    for driver in (staging, alone):
        driver.read(0, text[:12])
    assert torch.equal(next_logits(staging, 0), next_logits(alone, 0))


@of(lambda case: case.sees is not None)
@torch.inference_mode()
def test_load_swaps_packed_layers_and_keeps_graph_addresses(start: Any, make: Any, name: str) -> None:
    for way in ("kernels", "bucketed"):
        session = start(name, way).session
        places = {key: layer.place.data_ptr() for key, layer in session.linear.items()}
        places |= {key: value.data_ptr() for key, value in session.vector.items()}
        staged = session.stage(make(name, 8).weights())
        session.load(staged)
        held = {key: layer.place for key, layer in session.linear.items()} | session.vector
        assert held.keys() == staged.keys()
        if way == "bucketed":
            assert {key: value.data_ptr() for key, value in held.items()} == places
        elif kernels() is not None:
            assert all(held[key] is staged[key] for key in held)


@pytest.mark.skipif(kernels() is None, reason="the kernels were not built")
@of(lambda case: case.sees is not None)
@torch.inference_mode()
def test_weights_in_8_bits_give_similar_logits(start: Any, make: Any, name: str) -> None:
    drafter, other = make(name), make(name, 8)
    small, fresh, full = start(name, drafter=drafter, int8=True), start(name, drafter=other, int8=True), start(name)
    text = texts(drafter, 1)[0].tolist()
    for driver in (small, fresh, full):
        driver.read(0, text[:12])
    goal = next_logits(full, 0)
    assert 0 < float((next_logits(small, 0) - goal).norm() / goal.norm()) < 0.06
    small.session.load(small.session.stage(other.weights()))
    small.read(1, text[:12])
    assert torch.equal(next_logits(small, 1), next_logits(fresh, 0))
    layers = small.session.linear.values()
    assert {layer.packed.dtype for layer in layers if isinstance(layer, PackedLinear)} == {torch.int8}


def malformed(weights: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yield weights with one fault each, and the expected message."""
    yield weights | {"surprise": torch.ones(2)}, "'surprise' is unknown"
    for name, value in weights.items():
        yield {key: tensor for key, tensor in weights.items() if key != name}, f"'{name}' is missing"
        yield weights | {name: torch.stack([value, value])}, f"'{name}' has shape"
        if value.is_floating_point():
            yield weights | {name: value.to(torch.int64)}, f"'{name}' is torch.int64 instead of torch.float32"
            for wrong in (float("nan"), float("inf")):
                bad = value.clone()
                bad.view(-1)[-1] = wrong
                yield weights | {name: bad}, f"'{name}' has numbers that are not finite"
        else:
            yield weights | {name: value.float()}, f"'{name}' is torch.float32 instead of {value.dtype}"
    if "d2t" in weights:
        for added in (1, 1000):
            moved = weights["d2t"].clone()
            moved[-1:] += added
            yield weights | {"d2t": moved}, "'d2t' and 't2d' do not describe the same draft vocabulary"
        yield weights | {"t2d": ~weights["t2d"]}, "'d2t' and 't2d' do not describe the same draft vocabulary"


@every_trained
def test_malformed_weights_are_refused_by_name(start: Any, make: Any, name: str) -> None:
    drafter = make(name).add_head()
    session, before = (
        start(name, drafter=drafter).session,
        {key: value.clone() for key, value in drafter.weights().items()},
    )
    for weights, message in malformed(before):
        for take in (session.stage, drafter.load_weights):
            with pytest.raises(DrafterError) as refused:
                take(weights)
            assert message in str(refused.value)
    assert all(torch.equal(value, before[key]) for key, value in drafter.weights().items())


@pytest.fixture
def exactly(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply in float32 if the order of additions depends on the shapes, so that rounding changes no token."""
    if way == "bucketed":
        monkeypatch.setattr("osd.drafting.autoregressive.fused_dtype", lambda device: torch.float32)
        monkeypatch.setattr("osd.drafting.language_model.session._DTYPE", torch.float32)


CHAINS = [(name, way) for name, case in CASES.items() for way in case.chains]


@pytest.mark.parametrize(("name", "way"), CHAINS)
@torch.inference_mode()
def test_whole_chains_equal_stepwise_chains(start: Any, make: Any, exactly: None, name: str, way: str) -> None:
    """Chains end at the limits and after the first unlikely token; an empty draft changes nothing."""
    drafter, slots = make(name), [3, 0, 2]
    most = 3 if name == "looks ahead" else min(drafter.levels or 5, 5)
    limits, tokens = [most, 0, most - 1], texts(drafter, 3)

    def started() -> Driver:
        driver = start(name, way, drafter)
        for row, slot in enumerate(slots):
            driver.read(slot, tokens[row, : 6 + 4 * row].tolist())
        return driver

    session = started().session
    chains = session.chains(slots, limits, Stop())
    drafted_chains = chains.draft.token_lists()
    assert [len(chain) for chain in drafted_chains] == limits
    assert chains.pending is (way == "bucketed")
    drafted = torch.tensor([[*chain, *([int(tokens[0, 0])] * (most - len(chain)))] for chain in drafted_chains])
    steps = expand_chain(started().session, slots, drafted[:, : most - 1].contiguous())
    ids = torch.arange(259) if session.support is None else session.support
    for row, limit in enumerate(limits):
        for level in range(limit):
            assert_close(chains.logits[row, level], steps[level][row], 1e-2)
            assert drafted_chains[row][level] == ids[steps[level][row].argmax()]
    after = session.chains([slots[1]], [2], Stop())
    assert after.draft.token_lists() == started().session.chains([slots[1]], [2], Stop()).draft.token_lists()
    best = torch.stack(steps).softmax(-1).amax(-1)[:, 0]  # of each level
    floor = float(best[: most - 1].min()) + 1e-4
    short = started().session.chains(slots, [most, most, most], Stop(floor)).draft.token_lists()[0]
    if name == "looks ahead":  # one call gives all of it
        assert short == drafted_chains[0]
    else:
        assert short == drafted_chains[0][: 1 + next(level for level in range(most) if best[level] < floor)]
        assert len(short) < most


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "kernels" not in case.chains])
def test_session_without_whole_chains_returns_none(start: Any, name: str) -> None:
    assert start(name).session.chains([0], [2], Stop()) is None


@pytest.mark.parametrize("way", ["kernels", "bucketed"])
@pytest.mark.parametrize("growth", [Chain(3), TopKTree(budget=9, top_k=3, depth=3)], ids=["chain", "tree"])
@every
@torch.inference_mode()
def test_drafts_in_a_batch_equal_single_drafts(
    start: Any, make: Any, exactly: None, name: str, growth: Any, way: str
) -> None:
    """Sampled and greedy drafts keep to their limits, and tokens are drawn from the reported q."""
    drafter, slots, limits = make(name), [2, 0, 3], [9, 4, 0]
    tokens = texts(drafter, 3)
    for settings in (SamplingParams(0.8, top_p=0.9), SamplingParams(0)):
        together, alone_driver = start(name, way, drafter), start(name, way, drafter)
        for driver in (together, alone_driver):
            for row, slot in enumerate(slots):
                driver.read(slot, tokens[row, : 8 + row].tolist())
        proposal = together.propose(slots, limits, growth, settings)
        trees = trees_of(proposal)
        assert [len(drafted) <= limit for (drafted, _), limit in zip(trees, limits, strict=True)] == [True] * 3
        for row, slot in enumerate(slots):
            if limits[row]:
                alone = alone_driver.propose([slot], [limits[row]], growth, settings, [slots[row]])
                assert paths_of(*trees_of(alone)[0]) == paths_of(*trees[row])
        assert name == "recall" or all(drafted for drafted, _ in trees[:2])
        if proposal.draft is not None and settings.temperature:
            check_integrity(proposal.draft)
            sampling = SamplingBatch.of([settings])
            for row, (drafted, parents) in enumerate(trees):
                for node in range(len(drafted)):
                    q = proposal.draft.q_at(torch.tensor([row]), torch.tensor([node]))
                    goal = sampling.probabilities(proposal.logits[row : row + 1, 1 + parents[node]])
                    torch.testing.assert_close(q, goal, rtol=1e-4, atol=1e-6)
                    assert float(q[0, proposal.draft.columns[row, node]]) > 0


def trees_of(proposal: Any) -> list[tuple[list[int], list[int]]]:
    """Return tokens and parents of each draft, read by the host."""
    if not proposal.pending:
        return [(tree.tokens, tree.parents) for tree in proposal.trees]
    return [(chain, list(range(-1, len(chain) - 1))) for chain in proposal.drafted()]


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Return the sorted token paths of all nodes, as nodes of equal chances may have any order."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return sorted(paths)


@every
@torch.inference_mode()
def test_close_frees_the_state_of_a_sequence(start: Any, make: Any, name: str) -> None:
    drafter = make(name)
    used, fresh, tokens = start(name, drafter=drafter), start(name, drafter=drafter), texts(drafter, 2)
    used.read(1, tokens[0, :12].tolist())
    used.propose([1], [4], TopKTree(budget=4, top_k=2, depth=2))
    used.read(1, tokens[0, :14].tolist())
    given = used.states[1]
    used.close(1)
    assert [reference() for reference in given] == [None] * len(given)
    if name == "recall":
        return  # recall keeps its table
    drafts, said_first = [], []
    for driver in (used, fresh):
        driver.read(1, tokens[1, :9].tolist())
        proposal = driver.propose([1], [3], Chain(3))
        drafts.append(trees_of(proposal))
        said_first.append(None if proposal.logits is None else proposal.logits[:, 0].clone())
    assert drafts[0] == drafts[1]
    assert name == "mixed" or torch.equal(*said_first)


@of(lambda case: getattr(case.settings, "vocabulary", None))
def test_vocabulary_follows_counts_and_prefers_lower_ids(make: Any, name: str) -> None:
    drafter = make(name)
    counts = torch.zeros(259)
    counts[200] = 3
    drafter.adapt_vocabulary(counts)
    assert drafter.draft_ids.tolist() == [*range(VOCABULARY - 1), 200]
    assert torch.equal(drafter.t2d.nonzero().squeeze(1), drafter.draft_ids)
    counts[torch.arange(109, 259)] = torch.arange(150).float() + 1
    drafter.adapt_vocabulary(counts)
    assert drafter.draft_ids.tolist() == list(range(109, 259))
    assert torch.equal(drafter.head_rows, drafter.target_head[109:].float())
    drafter.load_weights(drafter.weights())


@of(lambda case: getattr(case.settings, "vocabulary", None))
def test_first_version_vocabulary_is_capped_by_the_target(targets: dict[str, Path], name: str) -> None:
    case = CASES[name]
    drafter = initial(case.settings.model_copy(update={"vocabulary": 100_000}), targets[case.target], Path())
    assert drafter.draft_ids.tolist() == list(range(259))
    assert torch.equal(drafter.head_rows, drafter.target_head.float())
    assert all(bool(value.isfinite().all()) for value in drafter.weights().values())


@pytest.mark.parametrize(
    ("name", "taps"),
    [
        ("dspark", (0, 1, 2)), ("eagle", (0, 1, 2)), ("early_exit", (2, 5, 7)), ("falcon", (3,)), ("kangaroo", (1,)),
        ("medusa", (3,)), ("language_model", ()), ("prompt_tokens", ()),
    ],
)  # fmt: skip
def test_kind_taps_its_usual_layers(make: Any, name: str, taps: tuple[int, ...]) -> None:
    assert make(name).needs.taps == taps


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("early_exit", "the early_exit drafter needs its target, and this session has none"),
        ("kangaroo", "the kangaroo drafter needs its target, and this session has none"),
        ("token_select", "the token_select drafter needs its target, and this session has none"),
        ("recall", "the recall drafter needs the memories of its domain, and this session has none"),
        ("mixed", "the mixed drafter needs the memories of its domain, and this session has none"),
    ],
)
def test_session_without_required_resource_is_refused(make: Any, name: str, message: str) -> None:
    with pytest.raises(DrafterError, match=f"^{message}$"):
        make(name).session(Runtime(1, LENGTH, 3))
