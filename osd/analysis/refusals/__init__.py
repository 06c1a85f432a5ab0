"""Whether what a model refuses depends on how its answers were decoded.

Ways to decode are compared on the same prompts: greedy answers token by token, sampled ones by what a judge says of
them. ``prompts`` are read, answers come from a running ``service`` or from an engine, one of the
``judges`` labels them, and ``comparison`` tests the labels as ``paired`` says.
"""

from __future__ import annotations


class RefusalsError(ValueError):
    """A file, the service or the judge does not give what is needed; the message is one line that says why."""
