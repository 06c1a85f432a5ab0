"""Assumptions of ``osd simulate`` about machines, traffic and domains, in addition to the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import Section, by_kind, of_kind

Gpu = Literal["h100", "h200", "a100", "l4"]
Model = Literal["llama-3.1-8b", "smollm2-135m"]


class Assumptions(Section):
    """Section of a scenario; all numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class MeasuredCosts(Assumptions):
    """Costs measured by ``osd bench net``."""

    kind: Literal["measured"] = "measured"
    file: Path = Field(description="file costs-KIND.json written by osd bench net")


class PublishedCosts(Assumptions):
    """Costs computed from the published figures of a GPU and the configuration of a model."""

    kind: Literal["published"] = "published"
    gpu: Gpu = Field(default="h100", description="GPU of each replica")
    model: Model = Field(default="llama-3.1-8b", description="model, in bfloat16")
    efficiency: float = Field(default=0.6, gt=0, le=1, description="share of the published speed that forwards reach")
    training_efficiency: float = Field(
        default=0.3, gt=0, le=1, description="share of the published speed that training reaches"
    )
    host_ms: float = Field(
        default=1.0, ge=0, description="milliseconds of a decoding step on the host, outside the forward"
    )
    context: int = Field(
        default=1024, ge=0, description="mean tokens of a sequence whose keys and values a decoding step reads"
    )


_Costs = PublishedCosts | MeasuredCosts
COSTS_SETTINGS = by_kind(get_args(_Costs))
CostsSettings = Annotated[_Costs, Field(discriminator="kind"), of_kind(COSTS_SETTINGS, "published")]
"""Costs of a replica's decoding steps."""


_CACHED = "share of a prompt's tokens that are already in the KV cache of a slot"


class DiurnalArrivals(Assumptions):
    """Poisson arrivals of independent users, with a rate that follows a sine over the day."""

    kind: Literal["diurnal"] = "diurnal"
    rate: float = Field(default=1.0, gt=0, description="mean requests per second and replica")
    swing: float = Field(default=0.5, ge=0, le=1, description="amplitude of the rate, as a share of its mean")
    begins: float = Field(
        default=6.0, ge=0, lt=24, description="start of the simulation, in hours after the lowest rate"
    )
    prompt: int = Field(default=512, ge=1, description="mean tokens of a prompt")
    answer: int = Field(default=256, ge=1, description="mean tokens of an answer")
    lengths: Literal["exponential", "constant"] = Field(
        default="exponential", description="distribution of both lengths"
    )
    cached: float = Field(default=0.0, ge=0, lt=1, description=_CACHED)


class TraceArrivals(Assumptions):
    """Arrivals of a recorded trace, which is repeated."""

    kind: Literal["trace"] = "trace"
    file: Path = Field(description="CSV file with TIMESTAMP, ContextTokens and GeneratedTokens, as Azure publishes it")
    rate: float = Field(
        default=1.0, gt=0, description="mean requests per second and replica, to which the trace is stretched"
    )
    cached: float = Field(default=0.0, ge=0, lt=1, description=_CACHED)


_Arrivals = DiurnalArrivals | TraceArrivals
ARRIVALS_SETTINGS = by_kind(get_args(_Arrivals))
ArrivalsSettings = Annotated[_Arrivals, Field(discriminator="kind"), of_kind(ARRIVALS_SETTINGS, "diurnal")]
"""Arrival times and lengths of requests."""


class DomainAssumptions(Assumptions):
    """Domains, which differ only in their number of requests, and the success of drafts in them."""

    count: int = Field(default=1, ge=1, le=1000, description="number of domains")
    skew: float = Field(default=1.0, ge=0, description="exponent s: domain n gets 1 / n^s of the requests of domain 1")
    depth: int = Field(default=5, ge=1, le=16, description="maximum draft length in tokens")
    length: float = Field(
        default=1.2, ge=1, description="mean acceptance length of such drafts with the first version, in tokens"
    )
    recall_gain: float = Field(default=1.0, ge=0, description="tokens per step that recall adds in the end")
    recall_tokens: float = Field(
        default=20_000, gt=0, description="answer tokens until 1/e of recall's gain is still missing"
    )
    gain: float = Field(default=0.5, ge=0, description="tokens per step that training adds in the end")
    tokens: float = Field(
        default=40_000,
        gt=0,
        description="trained tokens, repeats included, until 1/e of the training gain is still missing",
    )
    certainty: float = Field(
        default=1.0,
        gt=0,
        description="a + b of the beta distribution of acceptance; low values: most tokens are certain or hopeless",
    )
    second: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="factor f: the second choice is right with probability f c (1 - c) where the first has probability "
        "c",
    )
    drift_hours: float | None = Field(
        default=None, gt=0, description="mean hours between changes of traffic; none: traffic never changes"
    )
    drift_loss: float = Field(
        default=0.5, gt=0, le=1, description="share of both gains that a change of traffic removes"
    )
    gate_error: float = Field(default=0.005, ge=0, description="standard error of the gate's acceptance per position")


class TrainerAssumptions(Assumptions):
    """Training processes, among which the domains are divided."""

    count: int = Field(default=1, ge=0, description="number of trainers; 0: no capture and no training")
    dedicated: bool = Field(
        default=True, description="true: trainers have their own machines; false: they run on the replicas' machines"
    )
    tokens_per_second: float | None = Field(
        default=None, gt=0, description="tokens trained per second of a core or GPU; by default computed from costs"
    )
    slowing: float = Field(
        default=0.0, ge=0, description="seconds that a replica loses per second of training on its machine"
    )
    gate_seconds: float = Field(default=3.0, ge=0, description="core seconds of one gate decision and publication")
    network_mb_per_second: float = Field(
        default=1000.0, gt=0, description="maximum rate at which a trainer reads records, in MB per second"
    )


class CaptureAssumptions(Assumptions):
    """Size of a record, and speed of its transport."""

    hidden_width: int | None = Field(
        default=None, ge=0, description="numbers in the hidden states of one token; by default computed from costs"
    )
    store_mb_per_second: float = Field(default=500.0, gt=0, description="maximum rate of one Redis, in MB per second")


class VersionAssumptions(Assumptions):
    """Distribution of versions to nodes; each node reads one copy."""

    mb: float | None = Field(default=None, gt=0, description="size of a version in MB; by default computed from costs")
    replicas_per_node: int = Field(default=1, ge=1, description="replicas of a node, which share one copy of a version")
    node_mb_per_second: float = Field(default=1000.0, gt=0, description="maximum read rate of a node, in MB per second")
    store_mb_per_second: float = Field(
        default=5000.0, gt=0, description="maximum read rate of the store over all nodes, in MB per second"
    )
    poll_seconds: float = Field(default=0.5, ge=0, description="maximum delay until a node learns of a version")


class PriceAssumptions(Assumptions):
    """Prices in any currency; by default all costs are counted in replica hours."""

    replica_hour: float = Field(
        default=1.0, ge=0, description="price of a replica hour, which a superfluous replica saves"
    )
    trainer_hour: float = Field(default=1.0, ge=0, description="price of an hour of a trainer on its own machine")
    store_hour: float = Field(
        default=0.1, ge=0, description="price of an hour of one Redis; the busiest sixth of the time sets their number"
    )
    gigabyte: float = Field(
        default=0.0, ge=0, description="price of a gigabyte written to a stream, read from it, or read by a node"
    )


class Scenario(Assumptions):
    """All assumptions of a simulation, in addition to the settings of the service."""

    seconds: float = Field(default=3600.0, gt=0, le=31 * 86_400, description="simulated time, in seconds")
    replicas: int = Field(
        default=4,
        ge=1,
        le=256,
        description="maximum of simulated replicas; each stands for an equal share of all replicas",
    )
    seed: int = Field(default=0, ge=0, description="seed of all random numbers")
    costs: CostsSettings = PublishedCosts()
    arrivals: ArrivalsSettings = DiurnalArrivals()
    domains: DomainAssumptions = DomainAssumptions()
    trainers: TrainerAssumptions = TrainerAssumptions()
    capture: CaptureAssumptions = CaptureAssumptions()
    versions: VersionAssumptions = VersionAssumptions()
    prices: PriceAssumptions = PriceAssumptions()

    @field_validator("domains")
    @classmethod
    def _within_depth(cls, domains: DomainAssumptions) -> DomainAssumptions:
        most = domains.length + domains.recall_gain + domains.gain
        if most > domains.depth + 1:
            context = {"most": f"{most:g}", "depth": domains.depth, "limit": domains.depth + 1}
            message = (
                "give {most} tokens per step with recall_gain and gain, and a draft of {depth} gives {limit} at most"
            )
            raise PydanticCustomError("too_long", message, context)
        return domains
