"""The command line. Each command imports what it needs when it runs, so that ``osd --help`` answers at once."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from osd.cli.app import app
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "osd":
            raise
        print(f"osd: it needs {error.name}, which comes with: pip install 'osd[serve]'", file=sys.stderr)
        sys.exit(2)
    app()
