"""Forwards padded to buckets over fixed buffers, compared with unpadded forwards."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from osd.runtime.batch import DeviceTokens, GridShape, PackedRows, RowBuffer, StaticBuffer, laid_out
from osd.runtime.cuda_graph import BucketedForward, GraphCache, GraphRecorder
from osd.runtime.decoder import Forward, recordable
from osd.runtime.kv_cache import KVCache
from osd.runtime.model import SlotModel
from tests.device import DEVICE, forbid_device_waits
from tests.unit.runtime.on_gpu import with_kernels
from tests.unit.runtime.rows import rows_of
from tests.unit.runtime.test_model import FAMILIES, build, everything, prompt, slotted

SCRATCH, SLOTS = 8, 4
Part = tuple[int, int, list[int]]


def bucketed(family: str, taps: tuple[int, ...] = (), **more: Any) -> SlotModel:
    model = build(family).to(DEVICE)
    return SlotModel(model, slots=SLOTS, context=64, scratch=SCRATCH, taps=taps, bucketed=True, **more)


def equal(got: Tensor, goal: Tensor) -> None:
    """Assert equality up to the rounding of float32 sums in another order."""
    torch.testing.assert_close(got.cpu(), goal.cpu(), rtol=1e-5, atol=1e-5 * max(1.0, float(goal.abs().max())))


def mixed(rows: int, lengths: dict[int, int], chance: random.Random) -> tuple[list[Part], dict[int, list[int]]]:
    """Return parts of ``rows`` rows after the committed ``lengths``; some parts end in trees."""
    parts: list[Part] = []
    trees: dict[int, list[int]] = {}
    slots = chance.sample(range(SLOTS), SLOTS)
    while rows and slots:
        count = rows if len(slots) == 1 else chance.randint(1, min(rows, SCRATCH))
        if count > 1 and chance.random() < 0.6:
            nodes = chance.randint(1, count - 1)
            trees[len(parts)] = [chance.randint(-1, node - 1) for node in range(nodes)]
        slot = slots.pop()
        parts.append((slot, lengths[slot], prompt(count, seed=count + slot)))
        rows -= count
    return parts, trees


@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "mistral", "gemma2"])
def test_bucketed_forward_equals_the_unpadded_one(family: str) -> None:
    plain, padded = slotted(family, (0, -1)), bucketed(family, (0, -1))
    lengths = {0: 3, 1: 20, 2: 11, 3: 7}
    for slot, length in lengths.items():
        for model in (plain, padded):
            model.forward(rows_of([(slot, 0, prompt(length, slot))]), everything(1))
    chance = random.Random(0)  # noqa: S311 - no secret
    for count in range(1, 34):
        parts, trees = mixed(count, lengths, chance)
        rows = rows_of(parts, trees)
        wanted = torch.tensor(sorted(chance.sample(range(count), chance.randint(1, count))))
        goal, got = plain.forward(rows, wanted), padded.forward(rows, wanted)
        equal(got.logits, goal.logits)
        assert torch.equal(got.logits.argmax(-1), goal.logits.argmax(-1))
        equal(got.hidden, goal.hidden)
        for slot, start, ids in parts:
            for cache, expected in ((padded.cache.keys, plain.cache.keys), (padded.cache.values, plain.cache.values)):
                end = start + len(ids)
                equal(cache[:, slot, :, :end], expected[:, slot, :, :end])
    assert 0 < len(padded.bucketed) < 33


def test_padding_changes_no_place_that_a_row_can_see() -> None:
    model = bucketed("llama")
    before = model.cache.keys.clone()
    model.forward(rows_of([(1, 5, prompt(3)), (2, 9, prompt(2))]), everything(5))
    changed = (model.cache.keys != before).any(-1).any(2).any(0)  # [slots, places]
    places = {(int(slot), int(place)) for slot, place in changed.nonzero()}
    assert places == {(1, 5), (1, 6), (1, 7), (2, 9), (2, 10), (0, model.cache.places - 1)}
    assert model.cache.places - 1 >= 64 + SCRATCH


def test_forwards_of_one_bucket_share_a_graph() -> None:
    model = bucketed("llama", (1,))
    first = model.forward(rows_of([(0, 0, prompt(5))]), everything(5))
    kept, states = first.logits.clone(), first.hidden.clone()
    again = model.forward(rows_of([(3, 0, prompt(7, 1))]), everything(7))
    assert len(model.bucketed) == 1
    assert again.logits.shape[0] == 7
    assert torch.equal(first.logits, kept)
    assert torch.equal(first.hidden, states)
    model.forward(rows_of([(0, 5, prompt(9))]), everything(1))
    assert len(model.bucketed) == 1, "a forward larger than drafts is not recorded"


def test_recorded_forward_reads_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = slotted("llama"), bucketed("llama")
    seen: list[list[int]] = []

    class WarmingRecorder(GraphRecorder):
        def record(self, run: Any) -> Any:
            run()  # a GPU warms up like this
            return run

    class Spy:
        def forward(self, rows: PackedRows, wanted: Tensor, layers: range, states: Tensor | None) -> Forward:
            parts = (rows.token_ids, rows.positions, rows.slots, rows.stores, rows.visible, wanted)
            seen.append([part.data_ptr() for part in parts])
            return model.decoder.forward(rows, wanted, layers, states)

    monkeypatch.setattr("osd.runtime.cuda_graph.GraphRecorder", WarmingRecorder)
    model.bucketed = BucketedForward(Spy(), model.cache, SCRATCH, recordable=True)
    for start, count in ((0, 4), (4, 3)):
        rows = rows_of([(2, start, prompt(count))])
        goal = plain.forward(rows, everything(count)).logits
        equal(model.forward(rows, everything(count)).logits, goal)
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("padded", [True, False])
def test_unread_device_tokens_reach_their_rows(padded: bool) -> None:
    plain, model = slotted("llama"), bucketed("llama") if padded else slotted("llama")
    tokens = prompt(6)
    goal = plain.forward(rows_of([(1, 0, tokens)]), everything(6)).logits
    rows = rows_of([(1, 0, [tokens[0], 0, 0, tokens[3], 0, tokens[5]])])
    drafted = torch.tensor([tokens[4], tokens[1], 99, tokens[2]], device=DEVICE)
    unread = DeviceTokens(drafted, torch.tensor([-1, 1, 3, -1, 0, -1]))
    equal(model.forward(replace(rows, unread=unread), everything(6)).logits, goal)


@pytest.mark.parametrize("nodes", [0, SCRATCH])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_forward_reads_no_device_values(family: str, nodes: int) -> None:
    """Run on meta tensors, which have no values and refuse operations with other devices."""
    slots = SlotModel(build(family).to("meta"), slots=SLOTS, context=64, scratch=SCRATCH, taps=(0, -1), bucketed=True)
    buffer = RowBuffer(GridShape(8, 8, 2, 4, 64, nodes), slots.cache)
    with torch.inference_mode():
        forward = slots.compute(buffer.rows, buffer.wanted)
    assert forward.logits.shape == (8, slots.vocab_size)
    assert forward.hidden.shape == (8, 2 * slots.hidden_size)


def test_recordable_is_false_for_experts_and_dynamic_angles() -> None:
    config = build("llama").config
    assert recordable(config)
    config.num_local_experts = 8
    assert not recordable(config)
    config.num_local_experts = None
    config.rope_parameters = {"full_attention": {"rope_type": "dynamic"}}
    assert not recordable(config)


def test_load_keeps_addresses_and_changes_the_output() -> None:
    model, reference = bucketed("llama"), slotted("llama", seed=1)
    rows = rows_of([(0, 0, prompt(4))])
    before = model.forward(rows, everything(4)).logits
    addresses = {name: value.data_ptr() for name, value in model.model.state_dict().items()}
    weights = build("llama", 1).state_dict()
    staged = {name: model.stage(name, value) for name, value in weights.items()}
    with torch.inference_mode():
        model.load(staged)
    after = model.forward(rows, everything(4)).logits
    assert {name: value.data_ptr() for name, value in model.model.state_dict().items()} == addresses
    assert not torch.allclose(after, before)
    equal(after, reference.forward(rows, everything(4)).logits)


def test_static_buffer_pads_at_each_fill() -> None:
    buffer = StaticBuffer({"a": 3, "b": 2}, 4, torch.device("cpu"))
    views = buffer["a"], buffer["b"], buffer.flags
    buffer.fill(
        {"a": (torch.tensor([5, 6, 7]).numpy(), 9), "b": (torch.tensor([1]).numpy(), -1)}, torch.ones(4).numpy()
    )
    assert [view.tolist() for view in views] == [[5, 6, 7], [1, -1], [True] * 4]
    buffer.fill({"a": (np.array([4]), 9), "b": (np.array([2, 3]), -1)})
    assert [view.tolist() for view in views] == [[4, 9, 9], [2, 3], [False] * 4]
    assert [(view.data_ptr() - views[0].data_ptr()) % 16 for view in views] == [0, 0, 0], (
        "else Triton compiles further kernels"
    )


cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU, and OSD_TEST_DEVICE=cuda")


@cuda
def test_recorded_forward_on_gpu_equals_the_cpu_without_waiting() -> None:
    plain, model = slotted("llama"), build("llama").to("cuda")
    fast = SlotModel(model, slots=SLOTS, context=64, scratch=SCRATCH)
    for start, count in ((0, 5), (5, 7), (12, 2)):
        rows, wanted = rows_of([(1, start, prompt(count))]), everything(count)
        with forbid_device_waits() if start == 5 else nullcontext():  # the recording exists already
            got = fast.forward(rows, wanted).logits if count != 2 else None
        if got is not None:
            torch.testing.assert_close(got.cpu(), plain.forward(rows, wanted).logits.cpu(), rtol=1e-3, atol=1e-3)
    assert len(fast.bucketed) == 1


@cuda
def test_laid_out_rows_on_gpu_are_not_waited_for() -> None:
    cache = KVCache(1, SLOTS, 2, 128, 16, torch.float32, torch.device("cuda"))
    with forbid_device_waits():
        rows, _ = laid_out(rows_of([(1, 3, prompt(30))]), everything(1), cache)
    assert rows.stores.tolist() == list(range(3, 33))


@cuda
def test_recording_pauses_garbage_collection() -> None:
    """Check that garbage collection pauses: freeing a graph during a recording fails with an unclear error."""
    collects: list[bool] = []
    somewhere = torch.zeros(1, device=DEVICE)

    def work() -> None:
        collects.append(gc.isenabled())
        somewhere.add_(1)

    GraphRecorder(DEVICE).record(work)
    assert collects[0]
    assert not collects[-1]
    assert gc.isenabled()


class Launches(TorchDispatchMode):
    """Count of the operators that launch GPU kernels; views and allocations launch none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looks = func.is_view or func.__name__.split(".")[0] in ("_unsafe_view", "empty", "detach", "alias")
        self.count += not looks
        return func(*args, **(kwargs or {}))


def test_lean_layer_launches_at_most_22_kernels() -> None:
    counts = {}
    for layers in (1, 3):
        model = build("llama")
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.to("meta")
        slots = SlotModel(model, slots=SLOTS, context=64, scratch=SCRATCH, bucketed=True)
        buffer = RowBuffer(GridShape(8, 8, 2, 4, 64, 0), slots.cache)
        with torch.inference_mode(), Launches() as launches:
            slots.compute(buffer.rows, buffer.wanted)
        counts[layers] = launches.count
    assert (counts[3] - counts[1]) / 2 <= 22


def test_forward_with_gpu_kernels_equals_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llama with heads that they read"
    monkeypatch.setitem(FAMILIES, family, {"head_dim": 16})
    rows = rows_of([(1, 0, prompt(9)), (3, 0, prompt(5, 1))], {1: [-1, -1, 0]})

    def run() -> tuple[Forward, Tensor | None, SlotModel]:
        model = bucketed(family, (0, -1))
        first = model.forward(rows, everything(14), range(2)).states
        return model.forward(rows, everything(14)), first, model

    goal, goal_states, plain = run()
    launched = with_kernels(monkeypatch)
    got, states, model = run()
    layers = 2 + 3
    assert launched == {
        "add_norm": 2 + 2 * layers,
        **dict.fromkeys(("rotate", "store", "attend", "combine", "gate"), layers),
    }
    for result, expected in (
        (got.logits, goal.logits), (got.hidden, goal.hidden), (states, goal_states),
        (model.cache.keys, plain.cache.keys), (model.cache.values, plain.cache.values),
    ):  # fmt: skip
        equal(result, expected)


def test_graph_cache_keeps_the_most_recently_used() -> None:
    kept: GraphCache[int, str] = GraphCache(2)
    made: list[int] = []

    def get(key: int) -> str:
        return kept.get(key, lambda: (made.append(key), str(key))[1])

    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == ["1", "2", "1", "3", "1", "2"]
    assert made == [1, 2, 3, 2]
    assert len(kept) == 2


@pytest.mark.parametrize(("rows", "wanted", "sequences", "width", "recorded"), [
    (1, 1, 1, 1, (1, 1)), (5, 5, 1, 5, (8, 8)), (9, 9, 3, 4, (16, 16)), (70, 3, 2, 65, (128, 16)),
    (30, 1, 1, 30, (32, 16)),
])  # fmt: skip
def test_grid_shape_bucket_rounds_sizes_up(
    rows: int, wanted: int, sequences: int, width: int, recorded: tuple[int, int]
) -> None:
    cache = KVCache(1, 16, 1, 1024, 8, torch.float32, torch.device("meta"))
    shape = GridShape(rows, wanted, sequences, width, 300, 0).bucket(cache, 65)
    assert (shape.rows, shape.wanted, shape.context) == (*recorded, 512)
    assert GridShape(rows, wanted, sequences, 66, 300, 0).bucket(cache, 65) is None
