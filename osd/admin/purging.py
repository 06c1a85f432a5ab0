"""Purge of a request from streams, trainers, replicas, and snapshots on disk."""

from __future__ import annotations

import time
from dataclasses import dataclass

from redis.exceptions import RedisError

from osd.admin import NotFoundError, UnavailableError
from osd.admin.audit import Actor, AuditLog
from osd.capture.purge import ALIVE_SECONDS, HEARTBEAT_SECONDS, Member, Purges, RemovedData
from osd.capture.retention import Retention
from osd.config import Settings
from osd.drafting.recall.snapshot import Snapshots
from osd.redis_client import connect
from osd.registry.object_storage import storage_of
from osd.registry.trained_requests import versions_trained_on
from osd.registry.versions import Registry
from osd.routing.outcome_stream import OutcomeStream

ANSWER_SECONDS = 60.0
"""Maximum time to wait for the answers of trainers and replicas."""


@dataclass(frozen=True)
class PurgeResult:
    """Result of a purge: the removed data, and the drafters that were trained on the request and stay.

    Attributes:
        streamed: the number of records removed from streams.
        remembered: the number of records removed from the memory of trainers.
        entries: the number of entries removed from n-gram caches and their snapshots.
        learning: the domains whose drafter in training was trained on the request.
        versions: the numbers of the versions that were trained on the request, by domain.
        absent: the trainers and replicas of the last day that sent no heartbeat before or during the purge, did not end
            regularly and have not answered; each forgets the request when it returns.
    """

    streamed: int
    remembered: int
    entries: int
    learning: list[str]
    versions: dict[str, list[int]]
    absent: list[str]

    @property
    def is_known(self) -> bool:
        """Whether a stream, a trainer or a version had a record of the request; entries of recall name no request."""
        return bool(self.streamed or self.remembered or self.learning or self.versions)


def purge_request(settings: Settings, redis_url: str | None, actor: Actor, request: str) -> PurgeResult:
    """Remove a request everywhere, and wait up to a minute for trainers and replicas.

    Args:
        settings: the settings of the service.
        redis_url: the URL of Redis, or None when no Redis is in use.
        actor: the operator, for the audit log.
        request: the id of a request or of a response.

    Raises:
        NotFoundError: no data of the request exists.
        UnavailableError: the audit log, Redis or the disk cannot be written, or a trainer or replica does not answer.
            The caller may repeat the purge.
    """
    with AuditLog(settings.home_dir).action(actor, "purge", request=request):
        return _purge(settings, redis_url, request)


def _purge(settings: Settings, redis_url: str | None, request: str) -> PurgeResult:
    streamed, answers, silent, absent = 0, {}, set(), set()
    if redis_url is not None:
        try:
            streamed, answers, silent, absent = _purge_over_redis(settings, redis_url, request)
        except RedisError as error:
            raise UnavailableError(f"Redis does not answer; the request may not be removed: {error}") from error
    try:
        entries = Snapshots(settings.registry_dir).purge(request)
    except OSError as error:
        raise UnavailableError(
            f"the snapshots of the n-gram caches cannot be written; the request may not be removed: {error}"
        ) from error
    registry = Registry(storage_of(settings))
    versions = {domain: versions_trained_on(registry, domain, request) for domain in registry.domains()}
    result = PurgeResult(
        streamed,
        sum(removed.records for removed in answers.values()),
        entries + sum(removed.entries for removed in answers.values()),
        sorted(member.name for member, removed in answers.items() if removed.learnt),
        {domain: numbers for domain, numbers in versions.items() if numbers},
        [" ".join(member) for member in sorted(absent)],
    )
    if silent:
        names = " and ".join(f"the {role} {name}" for role, name in sorted(silent))
        raise UnavailableError(
            f"{names} did not answer, and will forget request {request} as soon as it can; ask again"
        )
    if not (result.is_known or result.entries):
        places = "in a stream, in a trainer's memory or in the training data of a version"
        unknown = "".join(f"; the {member} is absent and has not answered" for member in result.absent)
        raise NotFoundError(f"there is no request {request} {places}{unknown}")
    return result


def _purge_over_redis(
    settings: Settings, url: str, request: str
) -> tuple[int, dict[Member, RemovedData], set[Member], set[Member]]:
    """Return the number of records removed from streams, the answers, and the silent and the absent members.

    Silent members were alive during the purge and have not answered.
    """
    client, purges, outcomes = connect(url, timeout=5.0), Purges(url), OutcomeStream(url)
    try:
        streams = [Retention(client, capture) for capture in (settings.tapped, settings.capture, settings.recalled)]
        purges.add(request)  # first, so that members refuse its records from now on
        streamed = sum(stream.purge(request) for stream in streams) + outcomes.forget(request)
        start = time.monotonic()
        alive: set[Member] = set()
        while True:
            members, answers = purges.members(), purges.answers(request)
            # A member that hangs or dies during the purge still has to answer.
            alive |= {member for member, age in members.items() if age < ALIVE_SECONDS}
            missing = members.keys() - answers.keys()
            silent = alive & missing
            # After a jump of Redis's clock, every member looks absent until its next heartbeat.
            patience = ANSWER_SECONDS if silent else HEARTBEAT_SECONDS
            if not missing or time.monotonic() - start > patience:
                break
            time.sleep(0.1)
        # Again, for records that were in transit.
        streamed += sum(stream.purge(request) for stream in streams) + outcomes.forget(request)
        purges.delete_shared_tokens()
        return streamed, answers, silent, missing - alive
    finally:
        outcomes.close()
        purges.close()
        client.close()
