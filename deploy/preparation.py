"""What a start needs of the target: rules, memory and drafter that fit it, and pointers to versions in service."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from osd import files
from osd.config import ConfigError, Settings
from osd.engine.policy import Policy
from osd.registry.object_storage import storage_of
from osd.registry.pointer import Pointer, Rollout
from osd.registry.versions import Registry, VersionError
from osd.runtime import eight_bits
from osd.runtime.device import pick_device

if TYPE_CHECKING:
    from deploy.warm_store import WarmStore
    from osd.drafting.base import Drafter


def prepare(
    settings: Settings, redis_url: str, target: Path, report: Callable[[str], None] = lambda step: None
) -> None:
    """Have everything ready that replicas ask for as they start; ``report`` is told about what takes long.

    Where a version is in service no model is read, and what reads models is not imported.

    Raises:
        ConfigError: the settings do not fit the ``target`` in that directory.
    """
    check_memory(settings, target)
    check_attention(settings, target)
    check_division(settings, target)
    if settings.drafts:
        ensure_version(settings, redis_url, target, report)


def check_rules(settings: Settings) -> None:
    """Refuse rules of drafting, verification and arithmetic that do not go together.

    Raises:
        ConfigError: verification would bias the drafts of growth, the draft is larger than a slot has room for, or this
            machine cannot compute with such weights.
    """
    try:
        if settings.target.weights != "full":
            eight_bits.check(settings.target.weights, pick_device(settings.target.device).type == "cuda")
        policy = Policy.of(settings.growth, settings.verification)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    largest, room = policy.growth.max_nodes, settings.engine.max_draft
    if largest > room:
        kind = settings.growth.kind
        raise ConfigError(f"growth.kind {kind} drafts up to {largest} tokens, and engine.max_draft is {room}")


def check_memory(settings: Settings, target: Path) -> None:
    """Refuse an ``engine.kv_mb`` that has no room for a request of the target in a directory.

    Raises:
        ConfigError: it has none, or the device cannot keep to it.
    """
    if settings.engine.kv_mb is None:
        return
    from osd.engine import kv_budget  # seconds of imports
    from osd.runtime.attention.selection import SelectionSizes
    from osd.runtime.kv_cache import heads_of, slot_bytes
    from osd.target.model import DTYPES, load_config

    config, places = load_config(target), settings.engine.context + settings.engine.max_draft + 1
    heads, dim = heads_of(config)
    width = dim * DTYPES[settings.target.dtype].itemsize
    one = slot_bytes(config.num_hidden_layers, heads, places, width)
    for chosen in (settings.drafter.selected, settings.target.attention.selected):
        if chosen is not None:
            sizes = SelectionSizes(chosen.initial, chosen.top, chosen.local, threshold=1.0)
            one += sizes.copied_bytes(config.num_hidden_layers, heads, places, width)
    try:
        kv_budget.check(settings.engine.kv_mb, one, pick_device(settings.target.device).type)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_attention(settings: Settings, target: Path) -> None:
    """Refuse to select tokens for the target in a directory where it has no rotary positions.

    Raises:
        ConfigError: it has none.
    """
    chosen = settings.target.attention.selected
    if chosen is None:
        return
    from osd.target.model import check_rotary

    try:
        check_rotary(target)
    except ValueError as error:
        message = f"target.attention.kind {chosen.kind} needs a target with rotary positions, and {error}"
        raise ConfigError(message) from None


def check_division(settings: Settings, target: Path) -> None:
    """Refuse to divide the target in a directory among processes where its sizes or its kind do not allow it.

    Raises:
        ConfigError: they do not.
    """
    if settings.target.tensor_parallel == 1:
        return
    from osd.target.load import TargetError
    from osd.target.tensor_parallel.sharding import check_divisible

    try:
        check_divisible(target, settings.target.tensor_parallel)
    except TargetError as error:
        raise ConfigError(str(error)) from None


def ensure_version(
    settings: Settings, redis_url: str, target: Path, report: Callable[[str], None] = lambda step: None
) -> int:
    """Make sure that the rollout pointer of the domain names a version of the configured drafter; return its number.

    Where it does not, the newest version that fits comes into service; a domain without any is given what warm-up
    left, else the drafter's initial weights, as a version, and those of ``trainer.extra_domains`` the drafter that this
    domain has. Other domains that have a version are treated in the same way, and where none fits they stay as they
    are. A domain that recalls nothing yet is given what warm-up left of that, too.

    Raises:
        ConfigError: the settings of the drafter do not fit the target.
    """
    registry = Registry(storage_of(settings))
    first = _First(settings, target, report)
    if settings.recalls and not registry.numbers(settings.domain):
        first.warm.recall(settings.recall, registry.root / settings.domain)
    with Pointer(redis_url, registry.storage) as pointer:

        def choose(domain: str, before: Rollout | None) -> Rollout | None:
            rollout = _fitting(registry, domain, before, first.config)
            if rollout is not None:
                return rollout
            if domain == settings.domain:
                manifest: dict[str, Any] = {"parent": None, "trained_on": {}}
                if (warm := first.warm.drafter(first.config)) is not None:
                    manifest["warm_up"] = warm.manifest.get("warm_up")
                    return _at(registry.publish(domain, warm.weights, warm.config, manifest))
                return _at(registry.publish(domain, first.drafter.weights(), first.config, manifest))
            own = pointer.get(settings.domain)
            if own is None or domain not in settings.trainer.extra_domains:
                return None
            version = registry.load(settings.domain, own.stable)
            manifest = {"parent": None, "trained_on": {}, "copied": f"{settings.domain}/{own.stable}"}
            return _at(registry.publish(domain, version.weights, version.config, manifest))

        for domain in dict.fromkeys((*settings.trained_domains, *registry.domains())):
            pointer.repair(domain)
            _settle(pointer, domain, choose)
        own = pointer.get(settings.domain)
    assert own is not None  # noqa: S101  it has just been set
    return own.stable


def _settle(pointer: Pointer, domain: str, choose: Callable[[str, Rollout | None], Rollout | None]) -> None:
    """Move a domain's pointer to what ``choose`` makes of it, as often as somebody else moves it meanwhile."""
    while True:
        before = pointer.get(domain)
        rollout = choose(domain, before)
        if rollout is None or rollout == before or pointer.replace(domain, before, rollout):
            return


class _First:
    """The drafter that a domain starts with under these settings, made when its weights are needed.

    Making it takes seconds, and so does importing what makes it: what its ``config.json`` would say is remembered.

    Raises:
        ConfigError: from ``drafter`` and ``config``: the settings do not fit the target.
    """

    def __init__(self, settings: Settings, target: Path, report: Callable[[str], None]) -> None:
        self._settings, self._target, self._report = settings, target, report

    @cached_property
    def drafter(self) -> Drafter:
        self._report("preparing the drafter")
        from transformers.utils import logging as progress

        from osd import drafting
        from osd.drafting.base import DrafterError

        progress.disable_progress_bar()
        try:
            return drafting.initial(self._settings.drafter, self._target, self._settings.home_dir)
        except DrafterError as error:
            raise ConfigError(str(error)) from error

    @cached_property
    def warm(self) -> WarmStore:
        """What warm-up left."""
        from deploy.warm_store import WarmStore

        return WarmStore(self._settings.home_dir, self._target)

    @cached_property
    def config(self) -> dict[str, Any]:
        drafter = self._settings.drafter
        if not drafter.reproducible:
            return self._made()
        made_of = [drafter.model_dump_json(), (self._target / "config.json").read_text()]
        made_of += map(importlib.metadata.version, ("osd", "transformers"))
        name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
        file = self._settings.home_dir / "drafters" / f"{name}.json"
        try:
            return json.loads(file.read_text())
        except (FileNotFoundError, ValueError):
            config = self._made()
        files.replace(file, json.dumps(config).encode())
        return config

    def _made(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.drafter.config()))


def _fitting(registry: Registry, domain: str, rollout: Rollout | None, config: dict[str, Any]) -> Rollout | None:
    """``rollout`` if its version fits, else the newest version that does."""
    if rollout is not None and _fits(registry, domain, rollout.stable, config, imported=True):
        return rollout
    numbers = [info.number for info in registry.list(domain)]
    number = next((number for number in reversed(numbers) if _fits(registry, domain, number, config)), None)
    return None if number is None else _at(number)


def _at(number: int) -> Rollout:
    return Rollout(stable=number, canary=None, share=0.0, changed=time.time())


def _fits(registry: Registry, domain: str, number: int, config: dict[str, Any], imported: bool = False) -> bool:
    """Whether a version is of this drafter, or with ``imported`` was trained elsewhere and brings its own sizes."""
    try:
        version = registry.load(domain, number)
    except VersionError:
        return False
    found = version.config
    if found == config or (imported and "imported" in version.manifest and found.get("kind") == config["kind"]):
        return True
    from osd.drafting.acceptance_head import without_head

    return without_head(found) == config
