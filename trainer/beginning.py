"""What a trainer begins with: the lease of its domain, the version in service, a learner, and records."""

from __future__ import annotations

import time

from redis.exceptions import RedisError

from osd.config import Settings
from osd.drafters import trainable
from osd.drafters.acceptance_head import suited
from osd.learning.gate import Gate
from osd.learning.online import Learner
from osd.learning.recalled import Recalled
from osd.learning.replay import Replay
from osd.registry.lease import Lease
from osd.registry.versions import Version
from osd.speculation.growth import make_growth
from trainer.executor import TargetContext
from trainer.rollout import Publisher, Service


class NotYet(Exception):
    """There is nothing to begin with now; the message says why."""


def take_up(domain: str, service: Service, publisher: Publisher, lease: Lease) -> Version:
    """Take the lease; the version in service.

    Raises:
        NotYet: another trainer has the lease, there is no version, or something cannot be reached.
    """
    try:
        rollout = service.rollout()
        if rollout is not None and not lease.take(rollout):
            raise NotYet(f"another trainer has {domain}")
        version = publisher.in_service()
    except RedisError as error:
        raise NotYet(f"Redis cannot be reached: {error}") from error
    except OSError as error:
        raise NotYet(f"the registry cannot be read or written: {error}") from error
    if version is None:
        raise NotYet(f"the registry has no drafter version of {domain} in service yet")
    return version


def learner_of(
    version: Version, settings: Settings, context: TargetContext, replay: Replay, recalled: Recalled | None
) -> Learner:
    """A learner that goes on from the weights of a version."""
    drafter = trainable(suited(context.build(version.config), settings.growth))
    drafter.load_weights(version.weights)
    distiller = context.executor.distiller(settings.domain, drafter, settings.trainer)
    gate = Gate(settings.growth.lookahead, settings.trainer.divergence)
    trees = make_growth(settings.growth).by_worth
    return Learner(distiller, settings.trainer, gate, context.vocabulary, replay, recalled, trees)


def lacking(learner: Learner, least: int, refused: int, fresh: int) -> str:
    """What a micro-step waits for: ``least`` records, with so many ``refused``, or new ones; "" for nothing."""
    if not learner.ready:
        missing = f"{learner.counters.records} of {least} records to begin with"
        return missing + (f", {refused} were refused" if refused else "")
    if not learner.trigger.due(fresh, time.monotonic()):
        return "every record was trained on often enough, waiting for new ones"
    return ""
