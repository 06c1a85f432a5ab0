"""Names of domains: ``code``, and ``acme.code`` of the tenant acme, which has domains of its own."""

from __future__ import annotations

import re

_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"

DOMAIN = f"^{_NAME}$"
"""What a request may call a domain, and what a tenant is called."""

FULL_DOMAIN = rf"^({_NAME}\.)?{_NAME}$"
"""A domain as the service knows it: it becomes the name of a folder and of a Redis key."""


def check_domain(domain: str) -> str:
    """Return ``domain`` if it is the full name of one.

    Raises:
        ValueError: it is not.
    """
    if not re.fullmatch(FULL_DOMAIN, domain):
        rule = "must be 1 to 64 of a-z, 0-9, _ and -, and start with a letter or digit; TENANT. may stand before it"
        raise ValueError(f"domain {domain!r}: {rule}")
    return domain


def tenant_of(domain: str) -> str:
    """The tenant whose domain it is, "" for nobody's."""
    return domain.rpartition(".")[0]


def in_tenant(tenant: str, domain: str) -> str:
    """The full name of what ``tenant`` calls ``domain``; "" is no tenant, and full names of the tenant stay."""
    return f"{tenant}.{domain}" if tenant and tenant_of(domain) != tenant else domain
