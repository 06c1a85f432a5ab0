"""The command line. Each command imports what it needs when it runs, so that ``osd --help`` answers at once."""

from __future__ import annotations

from osd.cli.app import main

__all__ = ["main"]
