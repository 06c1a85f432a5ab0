"""Test whether the refusals of a model depend on the way of decoding.

Ways of decoding are compared on the same prompts: greedy answers by token, sampled answers by the labels of a judge.
``prompts`` reads the prompts. Answers come from a running ``service`` or from an engine. ``judges`` label the answers,
and ``comparison`` tests the labels with the statistics in ``paired``.
"""

from __future__ import annotations


class RefusalsError(ValueError):
    """Error of a comparison, for example of its file of prompts; the message is one line with the reason."""


class EndpointError(RefusalsError):
    """Error of the service or the judge, which did not answer; the message is one line with the reason."""
