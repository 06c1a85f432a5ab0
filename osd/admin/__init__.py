"""What operators do, from the command line or over HTTP: move versions, forget requests, and leave a record of both."""

from __future__ import annotations


class AdminError(Exception):
    """An action is not done; the message is one line that says why."""


class NotThere(AdminError):
    """What it is about does not exist."""


class Conflict(AdminError):
    """It does not fit what is in service now."""


class Unavailable(AdminError):
    """What it needs does not answer, or does not take it."""
