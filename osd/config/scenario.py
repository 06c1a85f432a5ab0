"""What ``osd simulate`` is told of a deployment beside its settings: machines, traffic, domains, and more."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import Section, by_kind, of_kind

Gpu = Literal["h100", "h200", "a100", "l4"]
Model = Literal["llama-3.1-8b", "smollm2-135m"]


class Assumed(Section):
    """A part of a scenario: every number is finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class MeasuredCosts(Assumed):
    """A cost model that was measured: ``osd simulate --measure`` writes it."""

    kind: Literal["measured"] = "measured"
    file: Path = Field(description="what osd simulate --measure wrote")


class PublishedCosts(Assumed):
    """A GPU by what its maker publishes of it, and a model by its configuration."""

    kind: Literal["published"] = "published"
    gpu: Gpu = Field(default="h100", description="one for each replica")
    model: Model = Field(default="llama-3.1-8b", description="in bfloat16")
    efficiency: float = Field(default=0.6, gt=0, le=1, description="share of the published speed that forwards reach")
    training_efficiency: float = Field(default=0.3, gt=0, le=1, description="the same of training")
    host_ms: float = Field(default=1.0, ge=0, description="of a round beside its forward")
    context: int = Field(default=1024, ge=0, description="tokens of a sequence whose keys and values a round reads")


_Costs = PublishedCosts | MeasuredCosts
COSTS_SETTINGS = by_kind(get_args(_Costs))
CostsSettings = Annotated[_Costs, Field(discriminator="kind"), of_kind(COSTS_SETTINGS, "published")]
"""What a replica's rounds cost."""


_CACHED = "share of a prompt's tokens that a slot holds already, and that are not read again"


class DiurnalArrivals(Assumed):
    """Independent users, of whom more come by day: a Poisson stream whose rate is a sine over the day."""

    kind: Literal["diurnal"] = "diurnal"
    rate: float = Field(default=1.0, gt=0, description="requests a second for each replica, over the day")
    swing: float = Field(default=0.5, ge=0, le=1, description="how far the rate goes up and down, as a share of it")
    begins: float = Field(default=6.0, ge=0, lt=24, description="hours after the fewest requests come")
    prompt: int = Field(default=512, ge=1, description="tokens of a prompt, on average")
    answer: int = Field(default=256, ge=1, description="tokens of an answer, on average")
    lengths: Literal["exponential", "constant"] = Field(
        default="exponential", description="how both are distributed around these"
    )
    cached: float = Field(default=0.0, ge=0, lt=1, description=_CACHED)


class TraceArrivals(Assumed):
    """Requests as a trace has them, over and over."""

    kind: Literal["trace"] = "trace"
    file: Path = Field(description="CSV with TIMESTAMP, ContextTokens and GeneratedTokens, as Azure publishes them")
    rate: float = Field(default=1.0, gt=0, description="requests a second for each replica: the trace is stretched")
    cached: float = Field(default=0.0, ge=0, lt=1, description=_CACHED)


_Arrivals = DiurnalArrivals | TraceArrivals
ARRIVALS_SETTINGS = by_kind(get_args(_Arrivals))
ArrivalsSettings = Annotated[_Arrivals, Field(discriminator="kind"), of_kind(ARRIVALS_SETTINGS, "diurnal")]
"""When requests come, and how long they are."""


class DomainsAssumed(Assumed):
    """The domains, alike but for how much is asked of them, and how drafts do there."""

    count: int = Field(default=1, ge=1, le=1000, description="domains")
    skew: float = Field(default=1.0, ge=0, description="the n-th has 1 / n^skew of the requests of the first")
    depth: int = Field(default=5, ge=1, le=16, description="tokens of the longest draft")
    length: float = Field(default=1.2, ge=1, description="tokens per round of such drafts with the first version")
    recall_gain: float = Field(default=1.0, ge=0, description="tokens per round that recall adds in the end")
    recall_tokens: float = Field(default=20_000, gt=0, description="answered tokens after which 1/e of that is left")
    gain: float = Field(default=0.5, ge=0, description="tokens per round that training adds in the end")
    tokens: float = Field(default=40_000, gt=0, description="trained tokens, repeats included, after which 1/e is left")
    certainty: float = Field(
        default=1.0,
        gt=0,
        description="a + b of the beta distribution of chances: low where tokens are sure or hopeless",
    )
    second: float = Field(
        default=0.5, ge=0, le=1, description="a second choice is right this times c (1 - c) where the first is c"
    )
    drift_hours: float | None = Field(default=None, gt=0, description="mean time until traffic changes, none: never")
    drift_loss: float = Field(default=0.5, gt=0, le=1, description="share of what was learnt that is lost then")
    gate_error: float = Field(default=0.005, ge=0, description="standard error of a gate's acceptance per position")


class TrainersAssumed(Assumed):
    """Processes that train; each domain has one. Today's product has one, beside a replica."""

    count: int = Field(default=1, ge=0, description="0: nothing is captured or trained")
    dedicated: bool = Field(default=True, description="true: on machines of their own; false: on the replicas'")
    tokens_per_second: float | None = Field(
        default=None, gt=0, description="trained in a second of a core or GPU; by default what costs say"
    )
    slowing: float = Field(
        default=0.0, ge=0, description="seconds that a replica loses by each second trained beside it"
    )
    gate_seconds: float = Field(default=3.0, ge=0, description="of a core that a gate and publishing take")
    network_mb_per_second: float = Field(default=1000.0, gt=0, description="of records that one reads at most")


class CaptureAssumed(Assumed):
    """What a record holds, and what takes it."""

    hidden_width: int | None = Field(
        default=None, ge=0, description="numbers of the hidden states of a token; by default what costs say"
    )
    store_mb_per_second: float = Field(default=500.0, gt=0, description="that one Redis takes")


class VersionsAssumed(Assumed):
    """How versions come to the nodes: one copy for each."""

    mb: float | None = Field(default=None, gt=0, description="of a version; by default what costs say")
    replicas_per_node: int = Field(default=1, ge=1, description="on one machine, which share a copy of it")
    node_mb_per_second: float = Field(default=1000.0, gt=0, description="that a node reads")
    store_mb_per_second: float = Field(default=5000.0, gt=0, description="that the store gives to all together")
    poll_seconds: float = Field(default=0.5, ge=0, description="within which a node hears of a version")


class Prices(Assumed):
    """What things cost, in any currency; by default everything in hours of a replica."""

    replica_hour: float = Field(default=1.0, ge=0, description="what one that is not needed saves")
    trainer_hour: float = Field(default=1.0, ge=0, description="of a trainer on a machine of its own")
    store_hour: float = Field(
        default=0.1, ge=0, description="of a Redis; as many as the busiest sixth of the time needs"
    )
    gigabyte: float = Field(default=0.0, ge=0, description="written to a stream, read from it, or pulled by a node")


class Scenario(Assumed):
    """Everything that a simulation is told beside the settings of the service."""

    seconds: float = Field(default=3600.0, gt=0, le=31 * 86_400, description="of traffic")
    replicas: int = Field(
        default=4, ge=1, le=256, description="simulated at most: each stands for as many of the others"
    )
    seed: int = Field(default=0, ge=0, description="of all chance")
    costs: CostsSettings = PublishedCosts()
    arrivals: ArrivalsSettings = DiurnalArrivals()
    domains: DomainsAssumed = DomainsAssumed()
    trainers: TrainersAssumed = TrainersAssumed()
    capture: CaptureAssumed = CaptureAssumed()
    versions: VersionsAssumed = VersionsAssumed()
    prices: Prices = Prices()

    @field_validator("domains")
    @classmethod
    def _within_depth(cls, domains: DomainsAssumed) -> DomainsAssumed:
        most = domains.length + domains.recall_gain + domains.gain
        if most > domains.depth + 1:
            context = {"most": f"{most:g}", "depth": domains.depth, "limit": domains.depth + 1}
            message = (
                "give {most} tokens per round with recall_gain and gain, and a draft of {depth} gives {limit} at most"
            )
            raise PydanticCustomError("too_long", message, context)
        return domains
