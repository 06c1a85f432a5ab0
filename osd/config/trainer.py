"""Settings of online training."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from osd.config.base import COMMA_SEPARATED, FULL_DOMAIN, Section

Domains = Annotated[tuple[Annotated[str, Field(pattern=FULL_DOMAIN)], ...], COMMA_SEPARATED]
"""Names of domains, as a list or as one string with commas."""

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"([a-z0-9.-]{{1,253}}/)?{_NAME}={_NAME}")  # Ray follows the syntax of Kubernetes


class TrainerSettings(Section):
    """Online distillation of drafters."""

    enabled: bool = Field(default=True, description="false: drafters are not trained; recall still learns")
    warm_start: bool = Field(
        default=False,
        description="true: a new service of osd up answers prompts of its own until the first request, to learn from "
        "them",
    )
    divergence: Literal[
        "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance", "hybrid", "lk_hybrid"
    ] = Field(default="forward_kl", description="divergence between target and drafter that training minimises")
    jensen_shannon_beta: float = Field(
        default=0.5, gt=0, lt=1, description="weight of the target in the mixture of divergence=jensen_shannon"
    )
    positions: Literal["all", "rejected", "weighted"] = Field(
        default="all",
        description="tokens of a record that count: all; rejected: only rejected ones; weighted: rejected ones count "
        "more",
    )
    rejected_weight: float = Field(
        default=4.0, gt=0, description="weight of a rejected token with positions=weighted; other tokens have weight 1"
    )
    samples: Literal["teacher", "student", "mixed"] = Field(
        default="teacher",
        description="tokens that unrolled steps read: the target's (teacher), the drafter's own (student), or both in "
        "turns (mixed)",
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, description="learning rate of AdamW; embeddings of prompt tokens learn ten times as fast"
    )
    unroll: int = Field(
        default=3, ge=1, le=8, description="steps for which training feeds the drafter's output back to it"
    )
    depths: Literal["decay", "length"] = Field(
        default="decay",
        description="weight of each further step: 0.8 of the previous one (decay), or its gain in accepted length "
        "(length)",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="precision of matrix products in training; auto: bfloat16 if the hardware multiplies it",
    )
    negatives: int = Field(
        default=512,
        ge=0,
        description="negative samples from the draft vocabulary of dspark, eagle, kangaroo and medusa per micro-step, "
        "in addition to the target's tokens; 0: the whole vocabulary",
    )
    micro_batch_tokens: int = Field(default=256, ge=32, description="tokens per micro-step")
    update_tokens: int = Field(
        default=128, ge=1, description="tokens whose gradients are gathered for one optimizer update"
    )
    replay_tokens: int = Field(default=400_000, ge=1024, description="capacity of the replay buffer in tokens")
    replay_mb: int = Field(default=2048, ge=1, description="memory of the replay buffer in MB, hidden states included")
    held_out: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share of requests that are only used for evaluation; at first it is a third",
    )
    anchors: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        validate_default=True,
        description="share of the replay buffer that is a uniform sample of all records ever seen",
    )
    replay_days: float | None = Field(
        default=None, gt=0, description="days after which a record is removed from the replay buffer; none: never"
    )
    domains: Literal["own", "all"] = Field(
        default="own",
        description="traffic that this domain's drafter learns from; own: this domain; all: all domains except those "
        "of tenants",
    )
    extra_domains: Domains = Field(
        default=(), description="further domains to train; each starts with this domain's drafter"
    )
    trigger_records: int = Field(default=1, ge=1, description="new records that start an update")
    trigger_seconds: float = Field(
        default=60.0, ge=0, description="maximum seconds that a new record waits for an update"
    )
    drift_fall: float = Field(default=0.1, gt=0, lt=1, description="drop of the acceptance rate that starts an update")
    drift_records: int = Field(
        default=1000, ge=10, description="mean number of records between two false alarms of drift"
    )
    canary_share: float = Field(
        default=0.0, ge=0, le=0.5, description="share of decoding steps in which a new version is tried; 0: no canary"
    )
    canary_seconds: float = Field(default=600.0, gt=0, description="time limit of a canary, in seconds")
    steps_per_candidate: int = Field(default=75, ge=1, description="micro-steps between two gate decisions")
    min_records: int = Field(default=12, ge=1, description="records before the first micro-step")
    tracking: Literal["tensorboard", "mlflow", "wandb", "none"] = Field(
        default="none", description="experiment tracker for losses, gate decisions and versions; its files only grow"
    )
    threads: int = Field(default=1, ge=1, description="CPU threads per training process")
    workers: int = Field(
        default=1,
        ge=1,
        description="processes that train each drafter together, on other records; more than 1 needs osd-llm[cluster]",
    )
    processes: int = Field(
        default=1, ge=1, le=64, description="trainers that share the domains; each domain has one trainer"
    )
    node_labels: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        default=(),
        description="labels of the cluster nodes that train, such as role=training from ray start --labels; empty: all "
        "nodes",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="device of training; auto: a GPU if the replicas leave trainer.gpu_share of one"
    )
    gpu_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of a GPU per training process; below 1 other processes use the rest, and memory is not "
        "divided",
    )
    latency_objective_ms: float | None = Field(
        default=None,
        gt=0,
        description="mean milliseconds between two tokens above which training pauses; none: only queues pause it",
    )
    duty: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="maximum share of the time of its cores that training uses while requests run, if the time without "
        "requests is a smaller share",
    )
    price: float = Field(
        default=1.0,
        ge=0,
        description="price of a CPU second of training while requests run, and of a core second that they lose to "
        "training, paid from the fund; 0: free",
    )
    price_idle: float = Field(default=0.0, ge=0, description="price of a CPU second of training while no request runs")

    @property
    def labels(self) -> dict[str, str]:
        """Values of ``node_labels`` by key."""
        return dict(label.split("=") for label in self.node_labels)  # keys and values contain no "="

    @field_validator("node_labels")
    @classmethod
    def _check_labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        keys = [label.partition("=")[0] for label in value]
        for key, label in zip(keys, value, strict=True):
            if not _LABEL.fullmatch(label):
                raise PydanticCustomError("label", "must be key=value, such as role=training")
            if keys.count(key) > 1:
                raise PydanticCustomError("two_values", "has two values of {key}, and a node has one", {"key": key})
        return value

    @field_validator("processes")
    @classmethod
    def _check_processes(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and info.data.get("workers", 1) > 1:
            raise PydanticCustomError("divided_twice", "must be 1 where trainer.workers is more than 1")
        return value

    @field_validator("anchors")
    @classmethod
    def _check_anchors(cls, value: float, info: ValidationInfo) -> float:
        if value + info.data.get("held_out", 0.0) >= 1:
            raise PydanticCustomError("no_room", "and trainer.held_out must add up to less than 1")
        return value

    @field_validator("unroll")
    @classmethod
    def _check_unroll(cls, value: int, info: ValidationInfo) -> int:
        if value < 2 and info.data.get("samples", "teacher") != "teacher":
            raise PydanticCustomError("no_step", "must be at least 2 where trainer.samples is not teacher")
        return value

    @field_validator("gpu_share")
    @classmethod
    def _check_gpu_share(cls, value: float, info: ValidationInfo) -> float:
        if value < 1 and info.data.get("device") == "cpu":
            raise PydanticCustomError("no_gpu", "counts only where trainer.device is not cpu")
        if value < 1 and info.data.get("workers", 1) > 1:
            raise PydanticCustomError("shared", "must be 1 where trainer.workers is more than 1")
        return value

    @field_validator("jensen_shannon_beta", "rejected_weight")
    @classmethod
    def _check_is_used(cls, value: float, info: ValidationInfo) -> float:
        key, needed = {
            "jensen_shannon_beta": ("divergence", "jensen_shannon"),
            "rejected_weight": ("positions", "weighted"),
        }[info.field_name or ""]
        if value != cls.model_fields[info.field_name or ""].default and info.data.get(key) != needed:
            context = {"key": key, "needed": needed}
            raise PydanticCustomError("not_used", "counts only with trainer.{key}={needed}", context)
        return value
