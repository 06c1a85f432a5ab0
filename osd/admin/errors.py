"""Why an operator's action is not done; each message is one line."""

from __future__ import annotations


class AdminError(Exception):
    """An action is not done."""


class NotThere(AdminError):
    """What it is about does not exist."""


class Conflict(AdminError):
    """It does not fit what is in service now."""


class Unavailable(AdminError):
    """What it needs does not answer, or does not take it."""
