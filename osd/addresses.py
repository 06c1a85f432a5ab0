"""Host names, and the parts of a Redis URL that redis-py does not know."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

CA, PREFIX = "ssl_ca_certs", "prefix"
"""Query fields of a Redis URL: the file of CA certificates, as in redis-py, and the prefix of all keys."""

SENTINEL = "redis+sentinel", "rediss+sentinel"
"""Schemes of Sentinel URLs, such as ``redis+sentinel://host:port,host:port/service/db``, without and with TLS."""


def host_of(address: str) -> str | None:
    """Return the normalised host of a URL without its port, or None when the URL has no host."""
    try:
        host = urlsplit(address).hostname
    except ValueError:
        return None
    return plain(host) if host else None


def url_of(host: str, port: int) -> str:
    """Return the URL by which this machine reaches a service that listens on ``host`` and ``port``."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def plain(name: str) -> str:
    """Return the normalised name of a host, for comparisons: lower case, without brackets and final dot."""
    return name.strip("[]").rstrip(".").lower()


def uses_proxies(url: str) -> bool:
    """Return whether a client of ``url`` follows the proxy variables of the environment; False for a loopback host."""
    host = host_of(url)
    return host is None or not is_loopback(host)


def is_loopback(name: str) -> bool:
    """Return whether a host is ``localhost`` or a loopback address, which no other machine can claim."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
