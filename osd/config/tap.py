"""The tap: a proxy in front of another server, which captures what passes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from osd.config.base import LISTED, Section


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
