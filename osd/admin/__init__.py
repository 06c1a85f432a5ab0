"""Logged actions of operators from the command line or over HTTP: moves of versions and purges of requests."""

from __future__ import annotations


class AdminError(Exception):
    """Refused or failed action, as a message of one line with the reason."""


class NotThere(AdminError):
    """Action on a domain, version or request that does not exist."""


class Conflict(AdminError):
    """Action that does not fit the versions in service."""


class Unavailable(AdminError):
    """Action that needs a Redis, disk or process that does not answer or cannot be written."""
