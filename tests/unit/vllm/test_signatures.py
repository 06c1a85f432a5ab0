"""Check of the parts of vLLM that capture relies on, tested with fake modules."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import msgspec
import pytest

from osd.vllm.signatures import missing


class State(NamedTuple):
    logits: int
    other: int


@dataclass
class Batch:
    keys: list[str]


class Parameters(msgspec.Struct):
    top_k: int

    @property
    def end(self) -> int:
        return 0


class Runner:
    def __init__(self, config: int, pending: int | None) -> None: ...

    def sample(self, hidden: int, batch: int, extra: int = 0) -> None: ...


@pytest.fixture(autouse=True)
def _module(monkeypatch) -> None:
    module = ModuleType("fake_vllm")
    for kind in (State, Batch, Parameters, Runner):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "fake_vllm", module)


@pytest.mark.parametrize(("part", "names", "is_there"), [
    ("State", ("logits",), True), ("State", ("logit",), False), ("Batch", ("keys",), True),
    ("Batch", ("ids",), False), ("Parameters", ("top_k",), True), ("Parameters.end", (), True),
    ("Parameters.stop", (), False), ("Runner", ("pending",), True), ("Runner", ("waiting",), False),
    ("Runner.sample", ("self", "hidden", "batch"), True), ("Runner.sample", ("self", "batch", "hidden"), False),
    ("Runner.execute", ("self",), False), ("Nothing", (), False),
])  # fmt: skip
def test_changed_part_is_named(part, names, is_there):
    place = f"fake_vllm:{part}"
    assert missing({place: names}) == (None if is_there else place)


def test_module_that_moved_is_named():
    assert missing({"fake_vllm:State": (), "fake_vllm.moved:State": ()}) == "fake_vllm.moved:State"
