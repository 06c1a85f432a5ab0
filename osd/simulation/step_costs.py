"""Duration of decoding steps: from a measured cost model, or from published figures of a GPU and a model."""

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

_TAPS, _BYTES = 3, 2  # layers whose states an EAGLE-3 head reads; bytes of a bfloat16 number
_UNROLLED = 3  # steps of a micro-step, each with 6 operations per weight for forward and backward


class CostsError(ValueError):
    """Error of a missing or unusable measurement; the message is one line with the reason."""


class StepCosts(Protocol):
    """Costs of a replica and of training.

    Attributes:
        cores: of a replica; 1 for a GPU.
        hidden_width: numbers in the hidden states of a token in a trace.
        version_bytes: size of a drafter version.
        tokens_per_second: training speed per core or GPU.
    """

    cores: int
    hidden_width: int
    version_bytes: float
    tokens_per_second: float

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        """Return the seconds [n] of steps for several draft sizes.

        Args:
            streams: decoding requests.
            nodes: [n], draft nodes per stream, without the root.
            reading: prompt tokens that the same step reads.
        """
        ...

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """Return the prompt tokens that a step reads, as ``osd.economy.plan`` decides.

        Args:
            decoding: decoding requests.
            reading: requests whose prompt is being read.
            most: limit of prompt tokens per step.
        """
        ...


@dataclass(frozen=True)
class CostMeasurement:
    """Measured costs of a machine, in a JSON file; see ``StepCosts`` for the fields without a description.

    Attributes:
        machine: description of the machine.
        drafter: kind of the drafter.
        table: of the cost model.
    """

    machine: str
    drafter: str
    cores: int
    hidden_width: int
    version_bytes: float
    tokens_per_second: float
    table: CostTable

    @classmethod
    def read(cls, file: Path) -> CostMeasurement:
        """Read a file of ``write``.

        Raises:
            CostsError: the file cannot be read or has no measured costs.
        """
        try:
            measurement = msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as error:
            raise CostsError(f"cannot read {file}: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise CostsError(f"{file} holds no measured costs: {error}") from None
        if not measurement.table.forwards:
            raise CostsError(f"{file} holds no measured costs: table.forwards is empty")
        return measurement

    def write(self, file: Path) -> None:
        """Write the measurement to a JSON file."""
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class MeasuredStepCosts:
    """Step costs from a measured cost model of the product."""

    def __init__(self, measured: CostMeasurement, settings: Settings, depth: int) -> None:
        """Compute the costs of all steps with drafts of up to ``depth`` tokens."""
        self.cores, self.hidden_width = measured.cores, measured.hidden_width
        self.version_bytes, self.tokens_per_second = measured.version_bytes, measured.tokens_per_second
        model, kind = CostModel.of(measured.table), measured.drafter
        slots = settings.engine.slots
        self._steps = model.steps(slots * (1 + depth) + settings.engine.prefill_chunk).copy()
        plain = [model.plain_step(max(streams, 1)) for streams in range(slots + 1)]
        self._spared = np.maximum(self._steps[: slots + 1] - plain, 0.0)  # seconds saved by a step without drafts
        self._rows = np.arange(len(self._steps))
        self._drafts = np.arange(depth + 1)
        self._proposals = [
            np.array([model.proposal(kind, max(streams, 1), n) for n in range(depth + 1)])
            for streams in range(slots + 1)
        ]

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        """Return the seconds [n] of steps, interpolated in the measurements; see ``StepCosts.seconds``."""
        seconds = np.interp(streams * (1 + nodes) + reading, self._rows, self._steps)
        seconds = seconds + np.interp(nodes, self._drafts, self._proposals[streams])
        return seconds - np.where(nodes > 0, 0.0, self._spared[streams])

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """Return the prompt tokens that a step reads, as ``prompt_chunk`` chooses by the measured seconds of steps.

        It is ``most`` if no request decodes; see ``StepCosts.chunk`` for the arguments.
        """
        return prompt_chunk(self._steps, decoding, reading, most) if decoding else most


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU.

    Attributes:
        bandwidth: bytes per second.
        operations: dense bfloat16 operations per second.
        source: of the figures.
    """

    bandwidth: float
    operations: float
    source: str


@dataclass(frozen=True)
class ModelShape:
    """Published configuration of a model."""

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
        """Bytes of a token's keys and values in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head * _BYTES

    @property
    def hidden_width(self) -> int:
        """Numbers in the hidden states of a token at three taps."""
        return _TAPS * self.hidden

    def drafter(self, vocabulary: int) -> float:
        """Return the number of weights of an EAGLE-3 head: a layer with two inputs, the fusion of taps, and a head."""
        reads = 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head + self.heads * self.head * self.hidden
        feed = 3 * self.hidden * self.intermediate
        return reads + feed + _TAPS * self.hidden**2 + min(vocabulary, self.vocabulary) * self.hidden


GPUS = {
    "h100": Gpu(3.35e12, 989e12, "NVIDIA H100 data sheet, SXM5"),
    "h200": Gpu(4.8e12, 989e12, "NVIDIA H200 data sheet, SXM5"),
    "a100": Gpu(2.039e12, 312e12, "NVIDIA A100 80 GB data sheet, SXM4"),
    "l4": Gpu(0.3e12, 121e12, "NVIDIA L4 data sheet"),
}
"""Dense figures; some data sheets show twice as many operations, with sparsity."""

MODELS = {
    "llama-3.1-8b": ModelShape(8.03e9, 32, 4096, 14336, 32, 8, 128, 128_256, "config.json of meta-llama/Llama-3.1-8B"),
    "smollm2-135m": ModelShape(134.5e6, 30, 576, 1536, 9, 3, 64, 49_152, "config.json of HuggingFaceTB/SmolLM2-135M"),
}

_DRAFT_VOCABULARY = 32_000  # of published EAGLE-3 heads


class PublishedStepCosts:
    """Step costs from a roofline of published figures.

    A step takes the time to read all weights, keys and values once, or the time of its operations if that is longer. A
    trained drafter is called for each token of the longest chain.
    """

    def __init__(self, costs: PublishedCosts, settings: Settings) -> None:
        gpu, model = GPUS[costs.gpu], MODELS[costs.model]
        weights = model.drafter(_DRAFT_VOCABULARY)
        self.cores, self.hidden_width, self.version_bytes = 1, model.hidden_width, weights * _BYTES
        self.tokens_per_second = gpu.operations * costs.training_efficiency / (6 * weights * _UNROLLED)
        self._bandwidth, self._operations = gpu.bandwidth * costs.efficiency, gpu.operations * costs.efficiency
        self._model, self._host, self._context = model, costs.host_ms / 1e3, costs.context
        self._step = self.version_bytes / self._bandwidth
        self._by_decoding: dict[int, np.ndarray] = {}
        self._chunk = settings.engine.prefill_chunk

    def seconds(self, streams: int, nodes: np.ndarray, reading: float) -> np.ndarray:
        """Return the seconds [n] of steps with ``nodes`` [n] nodes per stream, computed from the roofline."""
        return self._step_seconds(streams, streams * (1 + nodes) + reading) + np.ceil(nodes) * self._step

    def chunk(self, decoding: int, reading: int, most: int) -> int:
        """Return the prompt tokens that a step reads, as ``prompt_chunk`` chooses by the computed seconds of steps.

        It is ``most`` if no request decodes; see ``StepCosts.chunk`` for the arguments.
        """
        if not decoding:
            return most
        if decoding not in self._by_decoding:
            self._by_decoding[decoding] = self._step_seconds(decoding, np.arange(decoding + self._chunk + 1))
        return prompt_chunk(self._by_decoding[decoding], decoding, reading, most)

    def _step_seconds(self, streams: int, rows: np.ndarray) -> np.ndarray:
        reads = self._model.parameters * _BYTES + streams * self._context * self._model.kv_bytes
        computes = 2 * self._model.parameters * rows / self._operations
        return np.maximum(reads / self._bandwidth, computes) + self._host


def make_step_costs(settings: Settings, scenario: Scenario) -> StepCosts:
    """Return the step costs that ``scenario.costs`` describes.

    Raises:
        CostsError: the measurement cannot be read.
    """
    return _KINDS[scenario.costs.kind](scenario.costs, settings, scenario.domains.depth)


_KINDS: dict[str, Callable[[Any, Settings, int], StepCosts]] = {
    "measured": lambda costs, settings, depth: MeasuredStepCosts(CostMeasurement.read(costs.file), settings, depth),
    "published": lambda costs, settings, depth: PublishedStepCosts(costs, settings),
}
