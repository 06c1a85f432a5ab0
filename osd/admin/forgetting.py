"""Forgetting a request: in the streams, in what trainers and replicas remember, and in the snapshots on disk."""

from __future__ import annotations

import time
from dataclasses import dataclass

from redis.exceptions import RedisError

from osd.admin import NotThere, Unavailable
from osd.admin.audit import Actor, AuditLog
from osd.capture.purge import Member, Purges, Removed
from osd.capture.retention import Retention
from osd.config import Settings
from osd.drafting.recall.snapshot import Snapshots
from osd.redis_client import connect
from osd.registry.learnt import versions_trained_on
from osd.registry.object_storage import storage_of
from osd.registry.versions import Registry
from osd.routing.outcome_stream import OutcomeStream

ANSWER_SECONDS = 60.0
"""For the answers of trainers and replicas."""


@dataclass(frozen=True)
class Forgotten:
    """What was removed, and what has learnt from the request and stays.

    ``streamed`` records of the streams, ``remembered`` ones of trainers' memories, ``entries`` of what is recalled;
    domains whose drafter in training is ``learning`` from it, and ``versions`` of each domain that have learnt.
    """

    streamed: int
    remembered: int
    entries: int
    learning: list[str]
    versions: dict[str, list[int]]


def forget(settings: Settings, redis_url: str | None, actor: Actor, request: str) -> Forgotten:
    """Remove a request everywhere; waits up to a minute for whoever remembers it.

    Raises:
        NotThere: nobody knows of it.
        Unavailable: the audit log, Redis or the disk does not take it, or somebody does not answer: ask again.
    """
    with AuditLog(settings.home_dir).action(actor, "purge", request=request):
        return _forget(settings, redis_url, request)


def _forget(settings: Settings, redis_url: str | None, request: str) -> Forgotten:
    streamed, answers, silent = 0, {}, set()
    if redis_url is not None:
        try:
            streamed, answers, silent = _ask(settings, redis_url, request)
        except RedisError as error:
            raise Unavailable(f"Redis does not answer, the request may not be removed: {error}") from error
    try:
        entries = Snapshots(settings.registry_dir).purge(request)
    except OSError as error:
        raise Unavailable(
            f"the snapshots of what is recalled cannot be written, the request may not be removed: {error}"
        ) from error
    registry = Registry(storage_of(settings))
    versions = {domain: versions_trained_on(registry, domain, request) for domain in registry.domains()}
    found = Forgotten(
        streamed,
        sum(removed.records for removed in answers.values()),
        entries + sum(removed.entries for removed in answers.values()),
        sorted(member.name for member, removed in answers.items() if removed.learnt),
        {domain: numbers for domain, numbers in versions.items() if numbers},
    )
    if silent:
        names = " and ".join(f"the {role} {name}" for role, name in sorted(silent))
        raise Unavailable(f"{names} did not answer, and will forget request {request} as soon as it can; ask again")
    if found == Forgotten(0, 0, 0, [], {}):
        where = "in a stream, in a trainer's memory or in what a version learnt from"
        raise NotThere(f"there is no request {request} {where}")
    return found


def _ask(settings: Settings, url: str, request: str) -> tuple[int, dict[Member, Removed], set[Member]]:
    """Records removed from the streams, what each member removed, and those that do not answer."""
    client, purges, outcomes = connect(url, timeout=5.0), Purges(url), OutcomeStream(url)
    try:
        streams = [Retention(client, kept) for kept in (settings.tapped, settings.capture, settings.recalled)]
        purges.ask(request)  # first, so that nothing of it is taken in from here on
        streamed = sum(stream.purge(request) for stream in streams) + outcomes.forget(request)
        deadline = time.monotonic() + ANSWER_SECONDS
        while missing := purges.members() - purges.answers(request).keys():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        # What was on its way.
        streamed += sum(stream.purge(request) for stream in streams) + outcomes.forget(request)
        return streamed, purges.answers(request), missing
    finally:
        outcomes.close()
        purges.close()
        client.close()
