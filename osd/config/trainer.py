"""How drafters are trained online."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import FULL_DOMAIN, LISTED, Section

Domains = Annotated[tuple[Annotated[str, Field(pattern=FULL_DOMAIN)], ...], LISTED]
"""Names of domains, in a list or with commas between them."""

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"([a-z0-9.-]{{1,253}}/)?{_NAME}={_NAME}")  # the syntax of Kubernetes, which Ray's nodes have


class TrainerSettings(Section):
    """Online distillation."""

    enabled: bool = Field(default=True, description="false: drafters stay what they are; recall learns all the same")
    warm_start: bool = Field(
        default=False,
        description="a service of osd up that has learnt nothing yet answers prompts of its own until somebody asks",
    )
    divergence: Literal[
        "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance", "hybrid", "lk_hybrid"
    ] = Field(default="forward_kl", description="what is made small between what target and drafter say")
    jensen_shannon_beta: float = Field(default=0.5, gt=0, lt=1, description="weight of the target in the mixture")
    positions: Literal["all", "rejected", "weighted"] = Field(
        default="all", description="which tokens of a record count: all, those rejected, or these more than the others"
    )
    rejected_weight: float = Field(default=4.0, gt=0, description="with weighted positions; the others weigh 1")
    samples: Literal["teacher", "student", "mixed"] = Field(
        default="teacher", description="whose tokens unrolled steps read: the target's, the drafter's own, or in turns"
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, description="of AdamW; embeddings of prompt tokens learn ten times as fast"
    )
    unroll: int = Field(default=3, ge=1, le=8, description="steps that training feeds a drafter its own output")
    depths: Literal["decay", "length"] = Field(
        default="decay",
        description="how much each further step counts: 0.8 of the one before, or what it adds to the accepted length",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of training's matrix products; auto: bfloat16 where the CPU multiplies that"
    )
    negatives: int = Field(
        default=512,
        ge=0,
        description="of the draft vocabulary of eagle, kangaroo and medusa, sampled for each micro-step beside what "
        "the target named; 0: all of it",
    )
    micro_batch_tokens: int = Field(default=256, ge=32, description="tokens of one micro-step")
    update_tokens: int = Field(default=128, ge=1, description="tokens whose gradients make one optimizer update")
    replay_tokens: int = Field(default=400_000, ge=1024, description="tokens kept for replay")
    replay_mb: int = Field(default=2048, ge=1, description="memory of what is kept for replay, hidden states included")
    held_out: float = Field(
        default=0.1, gt=0, lt=1, description="share of requests that is only evaluated; at first it is a third"
    )
    anchors: float = Field(
        default=0.1, ge=0, lt=1, validate_default=True, description="share of the replay that samples all time"
    )
    replay_days: float | None = Field(default=None, gt=0, description="age at which a record is forgotten")
    domains: Literal["own", "all"] = Field(
        default="own",
        description="whose traffic this domain's drafter learns from; all: every domain's but tenants'",
    )
    extra_domains: Domains = Field(default=(), description="to train too; each begins with this domain's drafter")
    trigger_records: int = Field(default=1, ge=1, description="new records that start an update")
    trigger_seconds: float = Field(default=60.0, ge=0, description="longest wait of a new record for its update")
    drift_fall: float = Field(default=0.1, gt=0, lt=1, description="drop of the acceptance rate that starts an update")
    drift_records: int = Field(default=1000, ge=10, description="records between two false alarms, on average")
    canary_share: float = Field(default=0.0, ge=0, le=0.5, description="steps that try a new version, 0 for none")
    canary_seconds: float = Field(default=600.0, gt=0, description="time limit of the decision on a canary")
    steps_per_candidate: int = Field(default=75, ge=1, description="micro-steps between two gates")
    min_records: int = Field(default=12, ge=1, description="records before the first step")
    tracking: Literal["tensorboard", "mlflow", "wandb", "none"] = Field(
        default="tensorboard", description="where losses, verdicts and versions are recorded"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads of a training process")
    workers: int = Field(
        default=1,
        ge=1,
        description="processes that train every drafter together, each on other records; several need osd[cluster]",
    )
    processes: int = Field(
        default=1, ge=1, le=64, description="trainers that the domains are divided among; each domain is trained by one"
    )
    node_labels: Annotated[tuple[str, ...], LISTED] = Field(
        default=(),
        description="labels of the nodes of a cluster that train, as role=training is one of ray start --labels; "
        "without, all may",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="of training; auto: a GPU where the replicas leave trainer.gpu_share of one"
    )
    gpu_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="of a GPU for each training process; below 1 others have the rest, its memory is not divided",
    )
    latency_objective_ms: float | None = Field(
        default=None, gt=0, description="mean time between two tokens above which training rests; none: queues only"
    )
    duty: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="largest share of its cores' time that training takes while requests run",
    )
    price: float = Field(
        default=1.0, ge=0, description="price of a CPU second of training while requests run, paid by the fund; 0: free"
    )
    price_idle: float = Field(default=0.0, ge=0, description="the same while no request runs")

    @property
    def labels(self) -> dict[str, str]:
        """``node_labels`` by their keys."""
        return dict(label.split("=") for label in self.node_labels)  # neither has another "="

    @field_validator("node_labels")
    @classmethod
    def _are_labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        keys = [label.partition("=")[0] for label in value]
        for key, label in zip(keys, value, strict=True):
            if not _LABEL.fullmatch(label):
                raise PydanticCustomError("label", "must be key=value, as role=training is")
            if keys.count(key) > 1:
                raise PydanticCustomError("two_values", "has two values of {key}, and a node has one", {"key": key})
        return value

    @field_validator("processes")
    @classmethod
    def _is_not_divided_twice(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("workers", 1) > 1:
            raise PydanticCustomError("divided_twice", "must be 1 where trainer.workers is more than 1")
        return value

    @field_validator("anchors")
    @classmethod
    def _leaves_room(cls, value: float, info: ValidationInfo) -> float:
        if value + info.data.get("held_out", 0.0) >= 1:
            raise PydanticCustomError("no_room", "and trainer.held_out must add up to less than 1")
        return value

    @field_validator("unroll")
    @classmethod
    def _has_steps_to_read(cls, value: int, info: ValidationInfo) -> int:
        if value < 2 and info.data.get("samples", "teacher") != "teacher":
            raise PydanticCustomError("no_step", "must be at least 2 where trainer.samples is not teacher")
        return value

    @field_validator("gpu_share")
    @classmethod
    def _of_a_gpu(cls, value: float, info: ValidationInfo) -> float:
        if value < 1 and info.data.get("device") == "cpu":
            raise PydanticCustomError("no_gpu", "counts only where trainer.device is not cpu")
        if value < 1 and info.data.get("workers", 1) > 1:
            raise PydanticCustomError("shared", "must be 1 where trainer.workers is more than 1")
        return value

    @field_validator("jensen_shannon_beta", "rejected_weight")
    @classmethod
    def _is_used(cls, value: float, info: ValidationInfo) -> float:
        key, needed = {
            "jensen_shannon_beta": ("divergence", "jensen_shannon"),
            "rejected_weight": ("positions", "weighted"),
        }[info.field_name or ""]
        if value != cls.model_fields[info.field_name or ""].default and info.data.get(key) != needed:
            context = {"key": key, "needed": needed}
            raise PydanticCustomError("not_used", "counts only with trainer.{key}={needed}", context)
        return value
