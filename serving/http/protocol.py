"""HTTP/1.1 protocol of Ray Serve's proxy, which counts the requests that it refuses."""

from __future__ import annotations

from uvicorn.config import HTTP_PROTOCOLS

from osd.http_protocol import BoundedProtocol
from serving.http.paths import UNREAD
from serving.metrics.http_counts import COUNTS


def install() -> None:
    """Make this the default protocol of all uvicorn servers of the process."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{Protocol.__qualname__}"


class Protocol(BoundedProtocol):
    """HTTP connection that counts its refusals in ``COUNTS``."""

    def count_refusal(self, status: int) -> None:
        COUNTS[UNREAD, status] += 1
