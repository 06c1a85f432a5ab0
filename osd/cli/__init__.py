"""Command line. Commands import their modules when they run, so that ``osd --help`` is fast."""

from __future__ import annotations

import sys

from osd.cli.exit_codes import USAGE


def main() -> None:
    """Run the command line; the console script ``osd`` calls this function."""
    try:
        from osd.cli.app import app
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "osd":
            raise
        print(f"osd: the package {error.name} is missing: run pip install 'osd-llm[serve]'", file=sys.stderr)
        sys.exit(USAGE)
    app()
