"""Where requests come from: prompt sources, and a client that sends them as they would arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from osd.traffic import pydoc, stdlib
from osd.traffic.file import read
from osd.traffic.prompt import Prompt, TrafficError

SOURCES: dict[str, Callable[[], list[Prompt]]] = {
    "unittest": stdlib.unit_tests,
    "stdlib": stdlib.prompts,
    "pydoc": pydoc.prompts,
}
"""Sources that need no file."""


def load(source: str) -> list[Prompt]:
    """The prompts of a source of ``SOURCES`` or of a JSON lines file, in an order that is always the same.

    Raises:
        TrafficError: there is no such source or file, or a line of the file is no prompt.
    """
    if source in SOURCES:
        return SOURCES[source]()
    path = Path(source)
    if not path.is_file():
        raise TrafficError(f"{source} is neither a file nor one of {', '.join(SOURCES)}")
    return read(path)
