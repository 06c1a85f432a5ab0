"""What rounds cost a replica: as its own cost model measured them, or by what is published of a GPU and a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from osd.config import PublishedCosts, Scenario, Settings
from osd.economy.costs import CostModel, CostTable
from osd.economy.plan import prompt_chunk

_TAPS, _BYTES = 3, 2  # layers that an EAGLE-3 head reads; of a number in bfloat16
_UNROLLED = 3  # steps of a micro-step, each forward and backward: 6 operations for each weight


class CostsError(ValueError):
    """There is no such measurement; the message is one line that says why."""


class RoundCosts(Protocol):
    """What a replica is made of.

    Attributes:
        cores: that a replica computes on; one for a GPU.
        hidden_width: numbers of the hidden states that a trace keeps of a token.
        version_bytes: of a drafter version.
        tokens_per_second: that a trainer trains in a second of one core or GPU.
    """

    cores: int
    hidden_width: int
    version_bytes: float
    tokens_per_second: float

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        """Of rounds in which each stream drafts so many ``nodes`` [n], beside ``reading`` tokens of prompts; [n]."""
        ...

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """Tokens of prompts that a round reads, as ``osd.economy.plan`` says."""
        ...


@dataclass(frozen=True)
class Measured:
    """What one machine was measured to take, kept in a file: ``machine`` and ``drafter`` in words.

    The other figures are as ``RoundCosts`` has them.
    """

    machine: str
    drafter: str
    cores: int
    hidden_width: int
    version_bytes: float
    tokens_per_second: float
    table: CostTable

    @classmethod
    def read(cls, file: Path) -> Measured:
        """Read what ``write`` wrote.

        Raises:
            CostsError: it cannot be read.
        """
        try:
            found = msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as error:
            raise CostsError(f"cannot read {file}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise CostsError(f"{file} holds no measured costs: {error}") from None
        if not found.table.forwards:
            raise CostsError(f"{file} holds no measured costs: table.forwards is empty")
        return found

    def write(self, file: Path) -> None:
        """Keep it."""
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class MeasuredRounds:
    """The product's own cost model, as it was measured."""

    def __init__(self, measured: Measured, settings: Settings, depth: int) -> None:
        """Look up all rounds of drafts of up to ``depth`` tokens beforehand."""
        self.cores, self.hidden_width = measured.cores, measured.hidden_width
        self.version_bytes, self.tokens_per_second = measured.version_bytes, measured.tokens_per_second
        model, kind = CostModel.of(measured.table), measured.drafter
        slots = settings.engine.slots
        self._rounds = model.rounds(slots * (1 + depth) + settings.engine.prefill_chunk).copy()
        plain = [model.plain_round(max(streams, 1)) for streams in range(slots + 1)]
        self._spared = np.maximum(self._rounds[: slots + 1] - plain, 0.0)  # of a round without drafts
        self._rows = np.arange(len(self._rounds))
        self._drafts = np.arange(depth + 1)
        self._proposals = [
            np.array([model.proposal(kind, max(streams, 1), n) for n in range(depth + 1)])
            for streams in range(slots + 1)
        ]

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        """See ``RoundCosts``."""
        found = np.interp(streams * (1 + nodes) + reading, self._rows, self._rounds)
        found = found + np.interp(nodes, self._drafts, self._proposals[streams])
        return found - np.where(nodes > 0, 0.0, self._spared[streams])

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """See ``RoundCosts``."""
        return prompt_chunk(self._rounds, decoding, reading, most) if decoding else most


@dataclass(frozen=True)
class Gpu:
    """As its maker publishes it: bytes and dense bfloat16 operations a second."""

    bandwidth: float
    operations: float
    source: str


@dataclass(frozen=True)
class Shape:
    """A model by its published configuration."""

    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    source: str

    @property
    def kv_bytes(self) -> int:
        """Keys and values of a token, bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head * _BYTES

    @property
    def hidden_width(self) -> int:
        """Numbers of the hidden states of a token at three taps."""
        return _TAPS * self.hidden

    def drafter(self, vocabulary: int) -> float:
        """Weights of an EAGLE-3 head: a layer that reads two vectors, what joins three taps, a head of its own."""
        reads = 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head + self.heads * self.head * self.hidden
        feed = 3 * self.hidden * self.intermediate
        return reads + feed + _TAPS * self.hidden**2 + min(vocabulary, self.vocabulary) * self.hidden


GPUS = {
    "h100": Gpu(3.35e12, 989e12, "NVIDIA H100 data sheet, SXM5"),
    "h200": Gpu(4.8e12, 989e12, "NVIDIA H200 data sheet, SXM5"),
    "a100": Gpu(2.039e12, 312e12, "NVIDIA A100 80 GB data sheet, SXM4"),
    "l4": Gpu(0.3e12, 121e12, "NVIDIA L4 data sheet"),
}
"""Dense figures: data sheets of those with sparsity show twice as many operations."""

MODELS = {
    "llama-3.1-8b": Shape(8.03e9, 32, 4096, 14336, 32, 8, 128, 128_256, "config.json of meta-llama/Llama-3.1-8B"),
    "smollm2-135m": Shape(134.5e6, 30, 576, 1536, 9, 3, 64, 49_152, "config.json of HuggingFaceTB/SmolLM2-135M"),
}

_DRAFT_VOCABULARY = 32_000  # as published EAGLE-3 heads have


class PublishedRounds:
    """A GPU as a roofline: weights, keys and values are read once a round, or operations take longer.

    A trained drafter is called for each token of the longest chain.
    """

    def __init__(self, costs: PublishedCosts, settings: Settings) -> None:
        gpu, model = GPUS[costs.gpu], MODELS[costs.model]
        weights = model.drafter(_DRAFT_VOCABULARY)
        self.cores, self.hidden_width, self.version_bytes = 1, model.hidden_width, weights * _BYTES
        self.tokens_per_second = gpu.operations * costs.training_efficiency / (6 * weights * _UNROLLED)
        self._bandwidth, self._operations = gpu.bandwidth * costs.efficiency, gpu.operations * costs.efficiency
        self._model, self._host, self._context = model, costs.host_ms / 1e3, costs.context
        self._step = self.version_bytes / self._bandwidth
        self._rounds: dict[int, np.ndarray] = {}
        self._chunk = settings.engine.prefill_chunk

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        """See ``RoundCosts``."""
        return self._round(streams, streams * (1 + nodes) + reading) + np.ceil(nodes) * self._step

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """See ``RoundCosts``."""
        if not decoding:
            return most
        if decoding not in self._rounds:
            self._rounds[decoding] = self._round(decoding, np.arange(decoding + self._chunk + 1))
        return prompt_chunk(self._rounds[decoding], decoding, reading, most)

    def _round(self, streams: int, rows: np.ndarray) -> np.ndarray:
        reads = self._model.parameters * _BYTES + streams * self._context * self._model.kv_bytes
        computes = 2 * self._model.parameters * rows / self._operations
        return np.maximum(reads / self._bandwidth, computes) + self._host


def round_costs(settings: Settings, scenario: Scenario) -> RoundCosts:
    """What ``scenario.costs`` says.

    Raises:
        CostsError: what was measured cannot be read.
    """
    return _KINDS[scenario.costs.kind](scenario.costs, settings, scenario.domains.depth)


_KINDS: dict[str, Callable[[Any, Settings, int], RoundCosts]] = {
    "measured": lambda costs, settings, depth: MeasuredRounds(Measured.read(costs.file), settings, depth),
    "published": lambda costs, settings, depth: PublishedRounds(costs, settings),
}
