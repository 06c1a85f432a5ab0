"""Give a domain its first drafter version, and a fresh Redis the pointer that the last one held."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from osd import drafters
from osd.config import Settings
from osd.drafters.acceptance_head import without_head
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, VersionError


def ensure_version(settings: Settings, redis_url: str, target: Path) -> int:
    """Make sure that the rollout pointer of the domain names a version of the configured drafter; return its number.

    Where it does not, the version that was in service when osd last stopped comes back, else the newest that fits;
    a domain without any is given the drafter's initial weights as a version.
    """
    registry = Registry(settings.registry_dir)
    with Pointer(redis_url) as pointer:
        rollout = pointer.get(settings.domain) or _kept(settings)
        first = drafters.initial(settings.drafter, target, settings.home_dir)
        config = json.loads(json.dumps(first.config()))
        if rollout is None or not _fits(registry, settings.domain, rollout.stable, config):
            numbers = [info.number for info in registry.list(settings.domain)]
            fitting = (number for number in reversed(numbers) if _fits(registry, settings.domain, number, config))
            number = next(fitting, None)
            if number is None:
                number = registry.publish(settings.domain, first.weights(), config, {"parent": None, "trained_on": {}})
            rollout = Rollout(stable=number, canary=None, share=0.0, changed=time.time())
        pointer.set(settings.domain, rollout)
        return rollout.stable


def keep_pointer(settings: Settings, redis_url: str) -> None:
    """Write the domain's pointer beside its versions, for the next start with an empty Redis."""
    with Pointer(redis_url) as pointer:
        rollout = pointer.get(settings.domain)
    if rollout is not None:
        _kept_file(settings).write_bytes(msgspec.json.encode(rollout))


def _kept(settings: Settings) -> Rollout | None:
    """What ``keep_pointer`` wrote; it holds for one start, because after a crash it would be out of date."""
    file = _kept_file(settings)
    try:
        return msgspec.json.decode(file.read_bytes(), type=Rollout)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    finally:
        file.unlink(missing_ok=True)


def _kept_file(settings: Settings) -> Path:
    return settings.registry_dir / f"{settings.domain}.rollout.json"


def _fits(registry: Registry, domain: str, number: int, config: dict) -> bool:
    try:
        return without_head(registry.load(domain, number).config) == config
    except VersionError:
        return False
