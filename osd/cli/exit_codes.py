"""Exit codes of all commands of ``osd``; this module imports nothing."""

from __future__ import annotations

OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130

MEANINGS = {
    OK: "success",
    FAILURE: "the command ran and something failed: a check, a request, an expectation, or a process that it needs",
    USAGE: "the command cannot do it: change its arguments, the settings or the machine as the line on standard error "
    "says",
    INTERRUPTED: "Ctrl-C or SIGTERM stopped the command",
}
"""Meaning of each exit code, as docs/commands.md states it."""
