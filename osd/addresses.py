"""Addresses: names of hosts, and the parts of a Redis URL that redis-py does not know."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

CA, PREFIX = "ssl_ca_certs", "prefix"
"""Fields of a Redis URL's query: a file of certificates, as in redis-py, and the text that every key begins with."""

SENTINEL = "redis+sentinel", "rediss+sentinel"
"""Schemes of URLs that name sentinels: ``redis+sentinel://host:port,host:port/service/db``."""


def host_of(address: str) -> str | None:
    """The host of a URL without its port, None where there is none."""
    try:
        host = urlsplit(address).hostname
    except ValueError:
        return None
    return plain(host) if host else None


def plain(name: str) -> str:
    """A host's name as others are compared with it."""
    return name.strip("[]").rstrip(".").lower()


def is_loopback(name: str) -> bool:
    """Whether a host is this machine, and nothing that another machine could say it is."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
