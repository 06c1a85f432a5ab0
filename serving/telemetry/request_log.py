"""A line in the log for each request."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from osd.metrics import SpeculationCounts
from serving.telemetry.observed import ObservedRequest, ObservedSequence

logger = logging.getLogger(__name__)


def log_request(observed: ObservedRequest) -> None:
    """Log what became of a request; of one that only reads, and may, nobody needs to know."""
    reads = observed.method in ("GET", "HEAD") and (observed.status or 0) < 400
    if reads or not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, Any] = {
        "method": observed.method,
        "path": observed.path,
        "status": observed.status,
        "seconds": round(observed.seconds, 6),
        "request_id": observed.request_id,
    }
    if observed.trace_id:
        fields["trace_id"] = observed.trace_id
    if observed.caller is not None:
        key = observed.caller.key
        fields |= {"response_id": observed.response_id, "key_name": key.name if key else None}
        fields["tenant"] = observed.caller.tenant
    if observed.sequences:
        fields |= _figures([*observed.sequences.values()])
    message = "%s %s answered with %s"
    arguments = (observed.method, observed.path, observed.status)
    logger.info(message, *arguments, extra={"event": "request", "fields": fields})


def _figures(sequences: list[ObservedSequence]) -> dict[str, Any]:
    """Tokens and drafts of all sequences together, and the times of the one that took longest."""
    counts = SpeculationCounts.sum(one.counts for one in sequences)
    drafted = next((one.drafted for one in sequences if one.drafted is not None), None)
    lifetimes = [one.lifetime for one in sequences if one.lifetime is not None]
    return {
        "sequences": len(sequences),
        "finish_reasons": [one.finish for one in sequences],
        "prompt_tokens": sum(one.prompt_tokens for one in sequences),
        "cached_tokens": sum(one.cached_tokens for one in sequences),
        "completion_tokens": sum(one.completion_tokens for one in sequences),
        "queue_seconds": _longest((life.queued, life.began) for life in lifetimes),
        "first_token_seconds": _longest((life.arrived, life.first) for life in lifetimes),
        "decode_seconds": _longest((life.first, life.last) for life in lifetimes),
        "rounds": counts.rounds,
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "domain": None if drafted is None else drafted[0],
        "version": None if drafted is None else drafted[1],
    }


def _longest(times: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The longest of some times from one moment to another, None where none of them has ended."""
    took = [end - begin for begin, end in times if begin is not None and end is not None]
    return round(max(took), 6) if took else None
