"""Names of hosts, and which of them nobody but this machine can mean."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


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
