"""Target divided among processes, compared with the same target in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from osd.config import DrafterSettings, EarlyExitSettings, PromptTokensSettings
from osd.drafting import Drafter, initial
from osd.engine.engine import Engine
from osd.runtime.batch import consecutive_rows
from osd.runtime.kv_cache import KVCache, heads_of
from osd.runtime.model import SlotModel, TargetLostError
from osd.target.files import TargetError
from osd.target.tensor_parallel.divided import DividedTarget
from osd.target.tensor_parallel.follower import ShardingPlan
from osd.target.tensor_parallel.sharding import check_divisible, load_shard
from tests.tiny import tokenizer
from tests.unit.engine.harness import Client, make_drafter, prompts, running, settings, tokens_of
from tests.unit.runtime.test_model import build

TAPS = (0, 1, 2, 3)
JUDGED: dict[str, DrafterSettings] = {
    "early_exit": EarlyExitSettings(vocabulary=200),
    "prompt_tokens": PromptTokensSettings(tokens=2),
}


def plan(directory: Path, bucketed: bool | None = None) -> ShardingPlan:
    chosen = settings(directory).engine
    return ShardingPlan(
        str(directory), "float32", "cpu", 2, chosen.slots, chosen.context, chosen.max_draft + 65,
        embeddings=64 * chosen.slots, bucketed=bucketed,
    )  # fmt: skip


@contextmanager
def closing(target: SlotModel) -> Iterator[SlotModel]:
    try:
        yield target
    finally:
        target.close()


def drafter_of(kind: str, directory: Path) -> Drafter | None:
    return initial(JUDGED[kind], directory, directory) if kind in JUDGED else make_drafter(kind, directory)


@contextmanager
def decoding(target: SlotModel, directory: Path, drafter: Drafter | None) -> Iterator[Client]:
    engine = Engine(target, tokenizer(), settings(directory), drafter, 1)
    engine.start()
    try:
        yield Client(engine)
    finally:
        engine.stop()


def answers(client: Client, texts: Sequence[list[int]], name: str = "") -> list[list[int]]:
    return tokens_of(client.ask(texts, 12, name + "{}"))


def check_equal(target: SlotModel, directory: Path, kind: str, bucketed: bool = False) -> None:
    """Compare the answers with plain decoding; a ``bucketed`` drafter passes tokens that the host has not read."""
    first, second, third = prompts([9, 30, 4], seed=3)
    texts = [first, second, third, [*second[:25], 7, 8]]
    with running(directory, "none") as client:
        expected = answers(client, texts)
    drafter = drafter_of(kind, directory)
    if drafter is not None and bucketed:
        make = drafter.session
        drafter.session = lambda runtime: make(replace(runtime, bucketed=True))  # type: ignore[method-assign]
    with decoding(target, directory, drafter) as client:
        assert answers(client, texts) == expected
        assert answers(client, texts, "again") == expected  # with cached prompts
        drafted = sum(result.counts.drafted for result in client.results.values() if result.counts)
        assert bool(drafted) is (drafter is not None)


def test_two_padded_processes_match_one(target_dir: Path) -> None:
    with closing(DividedTarget(plan(target_dir, bucketed=True), taps=TAPS)) as target:
        check_equal(target, target_dir, "eagle", bucketed=True)


@pytest.mark.soak
def test_two_padded_processes_match_one_with_every_drafter(target_dir: Path) -> None:
    with closing(DividedTarget(plan(target_dir, bucketed=True), taps=TAPS)) as target:
        for kind in ("none", "kangaroo", "medusa", "prompt_tokens"):
            check_equal(target, target_dir, kind, bucketed=True)


@pytest.mark.soak
def test_two_processes_match_one_with_every_drafter(target_dir: Path) -> None:
    with closing(DividedTarget(plan(target_dir), taps=TAPS)) as target:
        for kind in ("none", "eagle", "kangaroo", "medusa", "early_exit", "prompt_tokens"):
            check_equal(target, target_dir, kind)


def check_until_ill(engine: Engine) -> None:
    while True:
        engine.check_health()
        time.sleep(0.05)


@pytest.mark.soak
def test_engine_reports_a_killed_process(target_dir: Path) -> None:
    before = set(psutil.Process().children())
    with closing(DividedTarget(plan(target_dir))) as target, decoding(target, target_dir, None) as client:
        (rank,) = set(psutil.Process().children()) - before
        client.submit("before", [1, 2, 3], 4, ignore_eos=True)
        client.wait()
        client.engine.check_health()
        rank.kill()
        why = "rank 1 of target.tensor_parallel 2 ended: its process ended with code -9"
        with pytest.raises(RuntimeError, match=why):
            check_until_ill(client.engine)
        client.submit("after", [1, 2, 3], 4, ignore_eos=True)
        assert client.wait()["after"].finish == "error"
        with pytest.raises(RuntimeError, match=f"decoding has ended: {why}"):
            client.engine.check_health()


@pytest.mark.soak
def test_failed_process_reports_its_error_and_ends(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())
    with closing(DividedTarget(plan(target_dir))) as target:
        (rank,) = set(psutil.Process().children()) - before
        with monkeypatch.context() as patch:
            patch.setattr(KVCache, "copy", lambda *_: None)
            target.cache.copy(0, 99, 0, 4)  # the other process has no such slot
        for _ in range(2):
            with pytest.raises(TargetLostError, match=r"^rank 1 of target.tensor_parallel 2 ended: IndexError: .*99"):
                target.forward(consecutive_rows(0, 0, [1, 2, 3]), torch.arange(3))
    assert not rank.is_running()


@pytest.mark.parametrize("family", ["llama with biases", "qwen2 with tied embeddings"])
def test_shards_of_a_model_join_to_the_whole(family: str, tmp_path: Path) -> None:
    whole = build(family)
    whole.save_pretrained(tmp_path)
    parts = [load_shard(tmp_path, "float32", torch.device("cpu"), rank, 2) for rank in range(2)]
    layer, head = "model.layers.1.", "lm_head.weight"
    every = dict(whole.named_parameters(remove_duplicate=False))
    for name in (f"{layer}self_attn.k_proj.weight", f"{layer}self_attn.q_proj.bias", f"{layer}mlp.up_proj.weight"):
        assert torch.equal(torch.cat([part.get_parameter(name) for part in parts]), every[name])
    for name in (f"{layer}self_attn.o_proj.weight", f"{layer}mlp.down_proj.weight"):
        assert torch.equal(torch.cat([part.get_parameter(name) for part in parts], 1), every[name])
    if f"{layer}self_attn.o_proj.bias" in every:  # only one part has the bias
        assert torch.equal(
            parts[0].get_parameter(f"{layer}self_attn.o_proj.bias"), every[f"{layer}self_attn.o_proj.bias"]
        )
        assert not parts[1].get_parameter(f"{layer}self_attn.o_proj.bias").any()
    rows = torch.cat([part.get_parameter(head) for part in parts])  # 131 ids do not divide by 2
    assert torch.equal(rows[:131], every[head])
    assert not rows[131:].any()
    assert [heads_of(part.config) for part in parts] == [(1, 8), (1, 8)]  # type: ignore[arg-type]


def test_indivisible_target_is_refused(target_dir: Path, tmp_path: Path) -> None:
    check_divisible(target_dir, 2)
    with pytest.raises(TargetError, match=r"target\.tensor_parallel is 4, and the target has 2 key heads"):
        check_divisible(target_dir, 4)
    build("gemma2").save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="which needs a Llama-shaped target, and the target is Gemma2ForCausalLM"):
        check_divisible(tmp_path, 2)


def test_missing_weight_is_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    safetensors.torch.save_file({name: value for name, value in weights.items() if "layers.2.mlp" not in name}, file)
    with pytest.raises(TargetError, match=r"holds no weight model\.layers\.2\.mlp\.down_proj\.weight"):
        load_shard(tmp_path, "float32", torch.device("cpu"), 0, 2)
