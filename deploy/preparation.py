"""Preparation of a start: checks of settings against the target, and rollout pointers to fitting drafter versions."""

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
    """Prepare all that replicas need at their start; ``report`` is called with each slow step.

    If a version is in service, no model is read and no modelling code is imported. With ``engine.kind=vllm`` vLLM
    checks the target, except for the sizes that a drafter needs.

    Raises:
        ConfigError: the settings do not fit the target in the directory ``target``.
        osd.target.files.TargetError: the target lacks a size that a drafter needs.
    """
    if settings.engine.kind == "osd":
        check_memory(settings, target)
        check_attention(settings, target)
        check_division(settings, target)
    elif settings.drafts:
        from osd.target.ends import check_sizes

        check_sizes(target)
    if settings.drafts:
        ensure_version(settings, redis_url, target, report)


def check_rules(settings: Settings) -> None:
    """Refuse incompatible rules of drafting, verification and arithmetic, unless vLLM is the engine.

    Raises:
        ConfigError: verification would bias the drafts of growth, a draft is larger than the room in a slot, or this
            machine does not support the weights.
    """
    if settings.engine.kind == "vllm":
        return
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
    """Refuse an ``engine.kv_mb`` that is too small for one request of the target in a directory.

    Raises:
        ConfigError: it is too small, or the device cannot enforce it.
    """
    if settings.engine.kv_mb is None:
        return
    from osd.engine import kv_budget  # seconds of imports
    from osd.runtime.attention.selection import SelectionSizes
    from osd.runtime.kv_cache import heads_of, slot_bytes
    from osd.target.context import context_of
    from osd.target.model import DTYPES, load_config

    config, places = load_config(target), context_of(settings, target) + settings.engine.max_draft + 1
    heads, dim = heads_of(config)
    width = dim * DTYPES[settings.target.dtype].itemsize
    needed = slot_bytes(config.num_hidden_layers, heads, places, width)
    for chosen in (settings.drafter.selection, settings.target.attention.selection):
        if chosen is not None:
            sizes = SelectionSizes(chosen.initial, chosen.top, chosen.local, threshold=1.0)
            needed += sizes.copied_bytes(config.num_hidden_layers, heads, places, width)
    try:
        kv_budget.check(settings.engine.kv_mb, needed, pick_device(settings.target.device).type)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_attention(settings: Settings, target: Path) -> None:
    """Refuse token selection for a target without rotary positions.

    Raises:
        ConfigError: the target in the directory has no rotary positions.
    """
    chosen = settings.target.attention.selection
    if chosen is None:
        return
    from osd.target.model import check_rotary

    try:
        check_rotary(target)
    except ValueError as error:
        message = f"target.attention.kind {chosen.kind} needs a target with rotary positions, and {error}"
        raise ConfigError(message) from None


def check_division(settings: Settings, target: Path) -> None:
    """Refuse ``target.tensor_parallel`` if the target's kind or sizes do not allow it.

    Raises:
        ConfigError: the target in the directory cannot be divided.
    """
    if settings.target.tensor_parallel == 1:
        return
    from osd.target.files import TargetError
    from osd.target.tensor_parallel.sharding import check_divisible

    try:
        check_divisible(target, settings.target.tensor_parallel)
    except TargetError as error:
        raise ConfigError(str(error)) from None


def ensure_version(
    settings: Settings, redis_url: str, target: Path, report: Callable[[str], None] = lambda step: None
) -> int:
    """Set the rollout pointer of each domain to a version of the configured drafter.

    A pointer to a fitting version stays, else the newest fitting version comes into service. If the main domain has
    none, the result of a warm-up, or else the drafter's initial weights, are published. Domains of
    ``trainer.extra_domains`` then get a copy of the main domain's drafter. Other domains without a fitting version do
    not change. A main domain without versions also gets the recall table of a warm-up.

    Returns:
        The version in service of the main domain.

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
            main = pointer.get(settings.domain)
            if main is None or domain not in settings.trainer.extra_domains:
                return None
            version = registry.load(settings.domain, main.stable)
            manifest = {"parent": None, "trained_on": {}, "copied": f"{settings.domain}/{main.stable}"}
            return _at(registry.publish(domain, version.weights, version.config, manifest))

        for domain in dict.fromkeys((*settings.trained_domains, *registry.domains())):
            pointer.repair(domain)
            _settle(pointer, domain, choose)
        main = pointer.get(settings.domain)
    assert main is not None  # noqa: S101  the loop has set it
    return main.stable


def _settle(pointer: Pointer, domain: str, choose: Callable[[str, Rollout | None], Rollout | None]) -> None:
    """Set a domain's pointer to the result of ``choose``, again if another process moves it at the same time."""
    while True:
        before = pointer.get(domain)
        rollout = choose(domain, before)
        if rollout is None or rollout == before or pointer.replace(domain, before, rollout):
            return


class _First:
    """First drafter of a domain under these settings, created when its weights are needed.

    Creating it and importing its code take seconds, so its configuration is cached in a file.

    Raises:
        ConfigError: from ``drafter`` and ``config``, if the settings do not fit the target.
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
            return drafting.initial(self._settings.drafter, self._target, self._settings.cache_dir)
        except DrafterError as error:
            raise ConfigError(str(error)) from error

    @cached_property
    def warm(self) -> WarmStore:
        """Store of warm-up results."""
        from deploy.warm_store import WarmStore

        return WarmStore(self._settings.home_dir, self._target)

    @cached_property
    def config(self) -> dict[str, Any]:
        drafter = self._settings.drafter
        if not drafter.reproducible:
            return self._made()
        made_of = [drafter.model_dump_json(), (self._target / "config.json").read_text()]
        made_of += map(importlib.metadata.version, ("osd-llm", "transformers"))
        name = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
        file = self._settings.cache_dir / "drafters" / f"{name}.json"
        try:
            return json.loads(file.read_text())
        except (FileNotFoundError, ValueError):
            config = self._made()
        files.replace(file, json.dumps(config).encode())
        return config

    def _made(self) -> dict[str, Any]:
        return json.loads(json.dumps(self.drafter.config()))


def _fitting(registry: Registry, domain: str, rollout: Rollout | None, config: dict[str, Any]) -> Rollout | None:
    """Return ``rollout`` if its version fits, else the newest fitting version, None if there is none."""
    if rollout is not None and _fits(registry, domain, rollout.stable, config, imported=True):
        return rollout
    numbers = [info.number for info in registry.list(domain)]
    number = next((number for number in reversed(numbers) if _fits(registry, domain, number, config)), None)
    return None if number is None else _at(number)


def _at(number: int) -> Rollout:
    return Rollout(stable=number, canary=None, share=0.0, changed=time.time())


def _fits(registry: Registry, domain: str, number: int, config: dict[str, Any], imported: bool = False) -> bool:
    """Return whether a version is of this drafter; ``imported`` also accepts imported versions of other sizes."""
    try:
        version = registry.load(domain, number)
    except VersionError:
        return False
    stored = version.config
    if stored == config or (imported and "imported" in version.manifest and stored.get("kind") == config["kind"]):
        return True
    from osd.drafting.acceptance_head import without_head

    return without_head(stored) == config
