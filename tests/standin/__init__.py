"""Stand-in for an environment with vLLM: the interpreter of the tests, with the module ``vllm`` of this folder."""

from __future__ import annotations

import sys
from pathlib import Path


def standin_python(folder: Path) -> Path:
    """Write the interpreter to ``folder``, in a path with a space, and return it."""
    python = folder / "an environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    place = Path(__file__).parent
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{place}${{PYTHONPATH:+:$PYTHONPATH}}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python
