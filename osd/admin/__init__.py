"""Logged actions of operators from the command line or over HTTP: moves of versions and purges of requests."""

from __future__ import annotations


class AdminError(Exception):
    """Error of a refused or failed action; the message is one line with the reason."""


class NotFoundError(AdminError):
    """Error of an action on a domain, version or request that does not exist."""


class ConflictError(AdminError):
    """Error of an action that does not fit the versions in service."""


class UnavailableError(AdminError):
    """Error of an action that needs a Redis, disk or process that does not answer or cannot be written."""
