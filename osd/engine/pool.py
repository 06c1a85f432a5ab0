"""Drafters of an engine, by domain: the choice for a request, swaps, and comparisons of versions."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from osd.config import Settings, in_tenant, tenant_of
from osd.drafting.base import Drafter, DrafterError
from osd.drafting.mixed import Mixed
from osd.drafting.recall.drafter import Recall
from osd.drafting.recall.memories import Memories, Tables
from osd.drafting.session import Runtime
from osd.economy.report import RECALL_ALONE, Comparison
from osd.economy.turns import Turns
from osd.engine.domain_drafters import ActiveDrafter, AlternateDrafter, DomainDrafters
from osd.registry.pointer import Rollout
from osd.runtime.device import one_core
from osd.runtime.model import SlotModel

log = logging.getLogger(__name__)

_MAX_REQUESTED = 64
"""Number of names of domains without drafters to remember; clients can send any name."""


class _DrafterFactory:
    """Factory of drafters for a target; drafters of a domain share its memories."""

    def __init__(self, settings: Settings, target: SlotModel) -> None:
        self._settings, self._target = settings.engine, target
        self.tables = Tables(settings.recall, settings.engine.domains)

    def make(
        self, drafter: Drafter, domain: str, version: int, weights: dict[str, Tensor] | None = None
    ) -> ActiveDrafter:
        """Return a drafter in use, with ``weights``, or with the weights of ``drafter`` if they are None.

        Raises:
            DrafterError: the weights do not fit, the drafter reads a layer that is not tapped, or there is no room for
                its riders or embeddings.
        """
        columns, settings, target = self._columns(drafter), self._settings, self._target
        room = target.cache.places - target.context - settings.max_draft - 1
        if drafter.needs.riders > room:
            raise DrafterError(
                f"this {drafter.kind} drafter has {drafter.needs.riders} riders, but there is room for {room}"
            )
        room = target.embeddings // settings.slots
        if drafter.needs.embeddings > room:
            raise DrafterError(
                f"this {drafter.kind} drafter has {drafter.needs.embeddings} embeddings, but there is room for {room}"
            )
        runtime = Runtime.serving(settings.slots, target.context, settings.max_draft + 1, target.device, target)
        if drafter.needs.target_rows:
            runtime = replace(runtime, memories=self.tables.of(domain))
        session = drafter.session(runtime)
        if weights is not None:
            one_core()
            staged = session.stage(weights)
            with torch.inference_mode():
                session.load(staged)
        return ActiveDrafter(session, drafter, columns, domain, version)

    def _columns(self, drafter: Drafter) -> slice | Tensor | None:
        """Return the columns of the target's tapped states that a drafter reads; None for all."""
        layers, taps = range(len(self._target.layers)), self._target.taps
        read = tuple(layers[tap] for tap in drafter.needs.taps)
        if read in ((), taps):
            return None
        if not set(read) <= set(taps):
            raise DrafterError(
                f"this {drafter.kind} drafter reads layers {list(read)}, but the target is tapped at {list(taps)}"
            )
        size = self._target.hidden_size
        if read == taps[: len(read)]:
            return slice(len(read) * size)  # a view, for the drafter whose taps come first
        parts = [torch.arange(taps.index(tap) * size, (taps.index(tap) + 1) * size) for tap in read]
        return torch.cat(parts).to(self._target.device)


class DrafterPool:
    """Drafters of all domains, which share each forward of the target.

    The default domain always has drafters. They also serve requests of other domains without drafters; each tenant has
    its own recall tables then. Drafters of different domains may be of different kinds. Only the engine's thread
    chooses drafters. Any thread may call the methods that change them: these take the lock ``changed`` and wake the
    engine.

    Attributes:
        domain: default domain.
        domains: drafters by domain.
        version_changes: number of changes of any stable version or canary.
    """

    def __init__(
        self,
        drafter: Drafter,
        domain: str,
        version: int,
        settings: Settings,
        changed: threading.Condition,
        target: SlotModel,
    ) -> None:
        """Begin with version ``version`` of the default ``domain``; ``changed`` is the engine's lock."""
        self.domain = domain
        self._factory, self._changed = _DrafterFactory(settings, target), changed
        self.version_changes = self._choices = 0
        self._requested: set[str] = set()
        self._staged: dict[str, tuple[ActiveDrafter, int, dict[str, Tensor] | None]] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        self._retired: list[ActiveDrafter] = []  # until ``sweep``, so that the engine's thread does not free memory
        self._measures = settings.measures
        self.domains = {domain: DomainDrafters(self._factory.make(drafter, domain, version))}
        self._compare_with_recall(domain)

    @property
    def default(self) -> ActiveDrafter:
        """Stable drafter of the default domain."""
        return self.domains[self.domain].stable

    def memories(self, domain: str) -> Memories:
        """Return the recall memories of a domain; the first call for a domain creates them, empty."""
        return self._factory.tables.of(domain)

    def all_memories(self) -> dict[str, Memories]:
        """Return the recall memories of all drafters, by domain."""
        return self._factory.tables.all()

    @property
    def staged(self) -> bool:
        """Whether a staged version waits for its swap."""
        return bool(self._staged)

    def choose(self, domain: str) -> DomainDrafters:
        """Return the drafters for a request of ``domain``, else of the tenant's or the engine's default domain.

        Must hold ``changed``.
        """
        drafters = self.domains.get(domain)
        if drafters is None:
            if len(self._requested) < _MAX_REQUESTED:
                self._requested.add(domain)
            drafters = self.domains.get(in_tenant(tenant_of(domain), self.domain), self.domains[self.domain])
        self._choices += 1
        drafters.last_used = self._choices
        return drafters

    def alternate_of(self, stable: ActiveDrafter) -> AlternateDrafter | None:
        """Return the drafter that takes turns with a stable drafter; None without one. Must hold ``changed``."""
        drafters = self.domains.get(stable.domain)
        return drafters.alternate if drafters is not None and drafters.stable is stable else None

    def comparisons(self) -> dict[str, tuple[Comparison, ...]]:
        """Return the measured effects of versions, by domain: of canaries, and of stable versions over references."""
        with self._changed:
            return {name: compared for name, drafters in self.domains.items() if (compared := drafters.comparisons)}

    def other_versions(self) -> dict[str, int]:
        """Return the stable versions of all domains except the default domain."""
        with self._changed:
            return {name: drafters.stable.version for name, drafters in self.domains.items() if name != self.domain}

    def take_requested(self) -> set[str]:
        """Return the domains without drafters that were requested since the last call."""
        with self._changed:
            requested, self._requested = self._requested, set()
            return requested

    def open(self, domain: str, version: int, weights: dict[str, Tensor], drafter: Drafter | None = None) -> None:
        """Add a stable drafter for a domain, unless it has one. Loading the weights takes a while.

        ``drafter`` is its configuration, None for the default domain's.

        Raises:
            DrafterError: the weights do not fit the drafter, or the drafter does not fit the target.
        """
        stable = self._factory.make(drafter or self.default.drafter, domain, version, weights)
        with self._changed:
            self.domains.setdefault(domain, DomainDrafters(stable))
            self._compare_with_recall(domain)

    def drop_idle(self) -> str | None:
        """Drop the least recently used idle domain, but not the default domain; return its name, None without one."""
        with self._changed:
            idle = [(d.last_used, name) for name, d in self.domains.items() if name != self.domain and d.idle]
            if not idle:
                return None
            domain = min(idle)[1]
            self.drop(domain)
            return domain

    def drop(self, domain: str) -> None:
        """Drop the drafters of a domain; sequences that use them keep them."""
        with self._changed:
            self._end_comparison(domain)
            self._staged.pop(domain, None)
            self._failed.pop(domain, None)
            self._retired.append(self.domains.pop(domain).stable)
            self._factory.tables.forget(domain)

    def sweep(self) -> None:
        """Free dropped and replaced drafters that no sequence uses any more."""
        with self._changed:
            unused = [drafter for drafter in self._retired if not drafter.users]
            self._retired = [drafter for drafter in self._retired if drafter.users]
        del unused  # frees the memory after the lock is released

    def stage(self, domain: str, version: int, weights: dict[str, Tensor], drafter: Drafter | None = None) -> None:
        """Check and lay out the weights of another version; the engine swaps it in before the next step.

        ``drafter`` is the configuration of the version, None for the running version's.

        Raises:
            DrafterError: the weights do not fit; the running version stays.
            KeyError: the domain has no drafters.
        """
        drafters = self.domains[domain]
        stable = drafters.stable
        if drafter is None or drafter.config() == stable.drafter.config():
            one_core()
            staged = stable, version, stable.session.stage(weights)
        else:
            staged = self._factory.make(drafter, domain, version, weights), version, None
        with self._changed:
            if self.domains.get(domain) is drafters:  # unless they were dropped since
                self._staged[domain] = staged
                self._failed.pop(domain, None)
                self._changed.notify_all()

    def swap(self) -> ActiveDrafter | None:
        """Swap in one staged version and return its drafter; None if there is none or it failed. Must hold ``changed``.

        ``swap_failure`` returns the reason of a failed swap. The session may then have some of the new weights. That
        lowers acceptance, but stays lossless, until another version is swapped in.
        """
        if not self._staged:
            return None
        domain, (drafter, version, staged) = self._staged.popitem()
        drafters = self.domains[domain]
        if staged is not None:
            try:
                with torch.inference_mode():
                    drafter.session.load(staged)
            except Exception as error:
                log.exception("drafter version %d of %s cannot be swapped in", version, domain)
                self._failed[domain] = version, type(error).__name__
                return None
        if drafter is not drafters.stable:
            self._retired.append(drafters.stable)
            drafters.stable = drafter
        drafter.version, drafters.settled = version, None
        alternate = drafters.alternate
        if alternate is not None and not alternate.reference:
            alternate.turns = Turns(alternate.turns.share, alternate.drafter.version)
        elif alternate is not drafters.recall_alone:
            self._end_comparison(domain)
        self.version_changes += 1
        self._compare_with_recall(domain)
        return drafter

    def swap_failure(self, domain: str, version: int) -> str | None:
        """Return the reason why a staged version could not be swapped in; None if its swap is pending or succeeded."""
        with self._changed:
            failed, reason = self._failed.get(domain, (0, ""))
        return reason if failed == version else None

    def try_canary(
        self, domain: str, rollout: Rollout, weights: dict[str, Tensor] | None, drafter: Drafter | None = None
    ) -> None:
        """Let the canary of ``rollout`` draft in its share of a domain's steps, in turns with the stable version.

        It replaces another canary. Running requests join from the next step on. ``weights`` are None to change only the
        share of a running canary. ``drafter`` is its configuration, None for the stable version's.

        Raises:
            DrafterError: the weights do not fit; nothing changes.
            KeyError: the domain has no drafters.
            ValueError: ``weights`` are None, but the canary does not run.
        """
        drafters, number = self.domains[domain], rollout.canary
        canary_drafter = None
        if weights is not None and number is not None:
            canary_drafter = self._factory.make(drafter or drafters.stable.drafter, domain, number, weights)
        with self._changed:
            if canary_drafter is not None:
                self._begin_comparison(domain, AlternateDrafter(canary_drafter, Turns(rollout.share, number or 0)))
            canary = drafters.alternate
            if canary is None or canary.reference or canary.drafter.version != number:
                raise ValueError(f"{domain} has no canary of version {number}")
            canary.turns.share = rollout.share

    def end_canary(self, domain: str) -> None:
        """End a domain's trial; running requests return to the stable version in the next step."""
        with self._changed:
            alternate = self.domains[domain].alternate
            if alternate is not None and not alternate.reference:
                self._end_comparison(domain)
                self._compare_with_recall(domain)

    def refer(self, domain: str, version: int, weights: dict[str, Tensor], drafter: Drafter | None = None) -> None:
        """Compare the stable version of a domain with an earlier ``version``, until the result is known.

        The reference drafts in pairs of blocks that the bank of comparisons pays for. A canary ends the comparison.
        ``drafter`` is the configuration of the reference, None for the stable version's. A mixed drafter is compared
        with recall alone instead.

        Raises:
            DrafterError: the weights do not fit; nothing changes.
            KeyError: the domain has no drafters.
        """
        stable = self.domains[domain].stable
        reference = self._factory.make(drafter or stable.drafter, domain, version, weights)
        with self._changed:
            drafters = self.domains.get(domain)
            if drafters is not None and drafters.stable is stable and drafters.alternate is None:
                turns = Turns(1.0, stable.version)
                self._begin_comparison(domain, AlternateDrafter(reference, turns, reference=True))

    def settle(self) -> None:
        """Take in the measured effects, and end the comparisons with references whose results are known."""
        with self._changed:
            for domain, drafters in self.domains.items():
                if drafters.settle():
                    self._end_comparison(domain)

    def _compare_with_recall(self, domain: str) -> None:
        """Compare a trained version of a mixed drafter with recall alone, with all measurements of the last hour."""
        drafters = self.domains[domain]
        stable = drafters.stable
        trained = isinstance(stable.drafter, Mixed) and stable.version != RECALL_ALONE
        if not self._measures or not trained or drafters.alternate is not None:
            return
        if drafters.recall_alone is None:
            drafters.recall_alone = AlternateDrafter.recall_alone(self._factory.make(Recall(), domain, RECALL_ALONE))
        self._begin_comparison(domain, drafters.recall_alone)

    def _begin_comparison(self, domain: str, alternate: AlternateDrafter) -> None:
        self._end_comparison(domain)
        self.domains[domain].alternate = alternate
        self.version_changes += 1

    def _end_comparison(self, domain: str) -> None:
        drafters = self.domains[domain]
        if drafters.alternate is not None:
            self._retired.append(drafters.alternate.drafter)
            drafters.alternate = None
            self.version_changes += 1


class DomainHandle:
    """Drafters of one domain, for the follower of its rollout pointer, with the methods of ``DrafterPool``."""

    def __init__(self, pool: DrafterPool, domain: str) -> None:
        self._pool, self._domain = pool, domain
        self.stage, self.swap_failure = partial(pool.stage, domain), partial(pool.swap_failure, domain)
        self.try_canary, self.end_canary = partial(pool.try_canary, domain), partial(pool.end_canary, domain)
        self.refer = partial(pool.refer, domain)

    @property
    def drafter_version(self) -> int:
        """Number of the stable version."""
        return self._pool.domains[self._domain].stable.version

    @property
    def canary_version(self) -> int | None:
        """Version of the canary; None without a canary."""
        alternate = self._pool.domains[self._domain].alternate
        return None if alternate is None or alternate.reference else alternate.drafter.version
