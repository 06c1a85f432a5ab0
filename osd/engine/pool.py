"""The drafters at work in one engine, and which of them a request gets."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from osd.config import Settings, in_tenant, tenant_of
from osd.drafting.base import Drafter, DrafterError
from osd.drafting.recall.memories import Memories, Tables
from osd.drafting.session import Kept, Origin, Runtime, Session, TargetRows
from osd.economy.report import Comparison
from osd.economy.turns import Turns
from osd.registry.pointer import Rollout
from osd.runtime.device import one_core
from osd.runtime.model import SlotModel

log = logging.getLogger(__name__)

_MOST_WANTED = 64
"""Names of domains that are remembered until somebody asks: clients can send any."""


@dataclass(eq=False)
class ActiveDrafter:
    """A drafter at work: its session, and the domain and version whose weights that has; ``users`` sequences use it.

    ``make`` is the drafter that the session was made of: versions of its configuration can be swapped in. A sequence
    keeps its stable drafter to its end. ``columns`` are those of the target's states that it reads, None for all.
    """

    session: Session
    make: Drafter
    columns: slice | Tensor | None
    domain: str
    version: int
    users: int = 0

    def __post_init__(self) -> None:
        """Read once what every round asks for."""
        self.kind, self.calls, self.needs = self.make.kind, self.make.calls, self.make.needs

    def open(self, slot: int, token: int, origin: Origin) -> None:
        """Give a slot to a sequence that starts with ``token``."""
        self.session.open(slot, token, origin)
        self.users += 1

    def close(self, slot: int) -> None:
        """Take the slot back."""
        self.users -= 1
        self.session.close(slot)

    def commit(self, slot: int, tokens: list[int], states: Tensor | None, rows: TargetRows | None = None) -> None:
        """Pass committed tokens to the session, with what it needs of the target.

        ``states`` [len(tokens), taps * hidden] are all of the target's before each, ``rows`` its logits of the round.
        """
        needed = rows if self.needs.target_rows or self.needs.riders else None
        self.session.commit(slot, Kept(tokens, self.hidden(states), needed))

    def judge(self, states: Tensor) -> Tensor | None:
        """Return its controller's logits for ``states`` [n, taps * hidden]; see ``EarlyHeads.judge``."""
        mine, heads = self.hidden(states), self.session.capabilities.early_heads
        return None if mine is None or heads is None else heads.judge(mine)

    def hidden(self, states: Tensor | None) -> Tensor | None:
        """Of the target's tapped states [n, taps * hidden] those that the drafter reads."""
        if states is None or not self.needs.taps:
            return None
        return states if self.columns is None else states[:, self.columns]


@dataclass(eq=False)
class Canary:
    """A version on trial: its drafter, and the turns in which it drafts in place of the stable one."""

    drafter: ActiveDrafter
    turns: Turns


class DomainDrafters:
    """A domain's drafters: the stable version's and, while there is one, the canary's.

    A version of the same configuration as the stable one is swapped into it; another takes its place.
    """

    def __init__(self, stable: ActiveDrafter) -> None:
        self.stable = stable
        self.canary: Canary | None = None
        self.used = 0

    @property
    def idle(self) -> bool:
        """Whether no sequence uses any of them."""
        return not (self.stable.users or (self.canary is not None and self.canary.drafter.users))

    @property
    def comparison(self) -> Comparison | None:
        """The canary against the stable version; None without a canary."""
        if self.canary is None:
            return None
        return Comparison(self.canary.drafter.version, self.stable.version, self.canary.turns.measured)


class _Maker:
    """Makes drafters that work beside a target; those of one domain share its memories."""

    def __init__(self, settings: Settings, target: SlotModel) -> None:
        self._settings, self._target = settings.engine, target
        self.tables = Tables(settings.recall, settings.engine.domains)

    def make(
        self, drafter: Drafter, domain: str, version: int, weights: dict[str, Tensor] | None = None
    ) -> ActiveDrafter:
        """A drafter with ``weights``, those that it has when None.

        Raises:
            DrafterError: the weights do not fit, the drafter reads layers where the target was not tapped, or it has
                more riders or embeddings than there is room for.
        """
        columns, settings, target = self._columns(drafter), self._settings, self._target
        room = target.cache.places - target.context - settings.max_draft - 1
        if drafter.needs.riders > room:
            raise DrafterError(
                f"this {drafter.kind} drafter has {drafter.needs.riders} riders, and there is room for {room}"
            )
        room = target.embeddings // settings.slots
        if drafter.needs.embeddings > room:
            raise DrafterError(
                f"this {drafter.kind} drafter has {drafter.needs.embeddings} embeddings, and there is room for {room}"
            )
        runtime = Runtime.serving(settings.slots, settings.context, settings.max_draft + 1, target.device, target)
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
        """Of the target's tapped states those that a drafter reads, None for all of them."""
        layers, given = range(len(self._target.layers)), self._target.taps
        read = tuple(layers[tap] for tap in drafter.needs.taps)
        if read in ((), given):
            return None
        if not set(read) <= set(given):
            raise DrafterError(f"this {drafter.kind} drafter reads layers {list(read)}, the target gives {list(given)}")
        size = self._target.hidden_size
        if read == given[: len(read)]:
            return slice(len(read) * size)  # a view, where the target's own drafter comes first
        parts = [torch.arange(given.index(tap) * size, (given.index(tap) + 1) * size) for tap in read]
        return torch.cat(parts).to(self._target.device)


class DrafterPool:
    """The drafters of every domain at hand; all of them share each forward of the target.

    Those of the engine's own domain are always there and serve what has none, tenants too, who recall from tables of
    their own. Domains may have drafters of different kinds. The engine's thread chooses; any thread changes what there
    is to choose from, under ``changed``, which wakes the engine.

    Attributes:
        trials: number of times that a canary, or the stable version beside it, was changed.
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
        """Begin with the own domain's, with the weights that ``drafter`` has and their ``version``."""
        self.domain = domain
        self._maker, self._changed = _Maker(settings, target), changed
        self.trials = self._turn = 0
        self._wanted: set[str] = set()
        self._staged: dict[str, tuple[ActiveDrafter, int, dict[str, Tensor] | None]] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        self._retired: list[ActiveDrafter] = []  # until ``sweep``: the decode thread must not spend its time on memory
        self.domains = {domain: DomainDrafters(self._maker.make(drafter, domain, version))}

    @property
    def own(self) -> ActiveDrafter:
        """The own domain's stable drafter."""
        return self.domains[self.domain].stable

    def memories(self, domain: str) -> Memories:
        """What the drafters of a domain recall."""
        return self._maker.tables.of(domain)

    def recalled(self) -> dict[str, Memories]:
        """What drafters recall, by domain."""
        return self._maker.tables.all()

    @property
    def staged(self) -> bool:
        """Whether a version waits to be swapped in."""
        return bool(self._staged)

    def choose(self, domain: str) -> DomainDrafters:
        """The drafters that a request of ``domain`` gets; must hold ``changed``."""
        drafters = self.domains.get(domain)
        if drafters is None:
            if len(self._wanted) < _MOST_WANTED:
                self._wanted.add(domain)
            drafters = self.domains.get(in_tenant(tenant_of(domain), self.domain), self.domains[self.domain])
        self._turn += 1
        drafters.used = self._turn
        return drafters

    def canary_beside(self, stable: ActiveDrafter) -> Canary | None:
        """The canary that takes turns with a stable drafter, if any; must hold ``changed``."""
        drafters = self.domains.get(stable.domain)
        return drafters.canary if drafters is not None and drafters.stable is stable else None

    def comparisons(self) -> dict[str, Comparison]:
        """By domain the measured effect of its canary."""
        with self._changed:
            found = {domain: drafters.comparison for domain, drafters in self.domains.items()}
        return {domain: comparison for domain, comparison in found.items() if comparison is not None}

    def others(self) -> dict[str, int]:
        """The stable version of every domain but the own."""
        with self._changed:
            return {name: one.stable.version for name, one in self.domains.items() if name != self.domain}

    def wanted(self) -> set[str]:
        """Domains that requests asked for in vain since the last call."""
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            return wanted

    def open(self, domain: str, version: int, weights: dict[str, Tensor], drafter: Drafter | None = None) -> None:
        """Have drafters for a domain, or do nothing where there are some; takes a while.

        The weights of the stable version are for ``drafter``, None for that of the own domain.

        Raises:
            DrafterError: the weights do not fit the drafter, or that does not fit the target.
        """
        stable = self._maker.make(drafter or self.own.make, domain, version, weights)
        with self._changed:
            self.domains.setdefault(domain, DomainDrafters(stable))

    def drop_idle(self) -> str | None:
        """End the domain that was not used for longest, of those that no sequence uses and not the own; says which."""
        with self._changed:
            idle = [(one.used, name) for name, one in self.domains.items() if name != self.domain and one.idle]
            if not idle:
                return None
            domain = min(idle)[1]
            self.drop(domain)
            return domain

    def drop(self, domain: str) -> None:
        """End a domain's drafters; what uses them keeps them."""
        with self._changed:
            self.end_canary(domain)
            self._staged.pop(domain, None)
            self._failed.pop(domain, None)
            self._retired.append(self.domains.pop(domain).stable)
            self._maker.tables.forget(domain)

    def sweep(self) -> None:
        """Free the drafters that get no new sequences and have seen their last."""
        with self._changed:
            gone = [drafter for drafter in self._retired if not drafter.users]
            self._retired = [drafter for drafter in self._retired if drafter.users]
        del gone  # here, where nothing waits for it

    def stage(self, domain: str, version: int, weights: dict[str, Tensor], drafter: Drafter | None = None) -> None:
        """Check and lay out another version, to be swapped in as the stable one between two rounds.

        Its weights are for ``drafter``, None for that of the running version.

        Raises:
            DrafterError: the weights do not fit; the running version stays.
            KeyError: the domain has no drafters.
        """
        drafters = self.domains[domain]
        stable = drafters.stable
        if drafter is None or drafter.config() == stable.make.config():
            one_core()
            staged = stable, version, stable.session.stage(weights)
        else:
            staged = self._maker.make(drafter, domain, version, weights), version, None
        with self._changed:
            if self.domains.get(domain) is drafters:  # else they have been dropped meanwhile
                self._staged[domain] = staged
                self._failed.pop(domain, None)
                self._changed.notify_all()

    def swap(self) -> ActiveDrafter | None:
        """Take one staged version into service, None where there is none; must hold ``changed``.

        One whose weights cannot be taken is not in service, and ``swap_failure`` says why. The session may have a part
        of them then, which costs acceptance and nothing else, until a version is staged that can be taken.
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
        drafter.version = version
        if (canary := drafters.canary) is not None:  # what was measured is against the version before
            canary.turns = Turns(canary.turns.share, canary.drafter.version)
        self.trials += 1
        return drafter

    def swap_failure(self, domain: str, version: int) -> str | None:
        """Why a version that was staged could not be swapped in; None while that may still come, and afterwards."""
        with self._changed:
            failed, why = self._failed.get(domain, (0, ""))
        return why if failed == version else None

    def try_canary(
        self, domain: str, rollout: Rollout, weights: dict[str, Tensor] | None, drafter: Drafter | None = None
    ) -> None:
        """Let the canary of ``rollout`` draft in its share of a domain's steps, in turns with the stable version.

        It takes the place of another canary. Running requests take part from the next step on. ``weights`` are None
        when it runs already; they are for ``drafter``, None for that of the stable version.

        Raises:
            DrafterError: the weights do not fit; nothing changes.
            KeyError: the domain has no drafters.
        """
        drafters, number = self.domains[domain], rollout.canary
        made = None
        if weights is not None and number is not None:
            made = self._maker.make(drafter or drafters.stable.make, domain, number, weights)
        with self._changed:
            if made is not None:
                self.end_canary(domain)
                drafters.canary = Canary(made, Turns(rollout.share, made.version))
                self.trials += 1
            canary = drafters.canary
            if canary is None or canary.drafter.version != number:
                raise ValueError(f"{domain} has no canary of version {number}")
            canary.turns.share = rollout.share

    def end_canary(self, domain: str) -> None:
        """Let a domain's stable version draft in every step again; running requests leave the canary in the next."""
        drafters = self.domains[domain]
        with self._changed:
            if drafters.canary is not None:
                self._retired.append(drafters.canary.drafter)
                drafters.canary = None
                self.trials += 1


class DomainHandle:
    """One domain's drafters, for the follower of its rollout pointer; its methods are those of the pool."""

    def __init__(self, pool: DrafterPool, domain: str) -> None:
        self._pool, self._domain = pool, domain
        self.stage, self.swap_failure = partial(pool.stage, domain), partial(pool.swap_failure, domain)
        self.try_canary, self.end_canary = partial(pool.try_canary, domain), partial(pool.end_canary, domain)

    @property
    def drafter_version(self) -> int:
        """The stable version."""
        return self._pool.domains[self._domain].stable.version

    @property
    def canary_version(self) -> int | None:
        """The version that drafts in a share of the steps, None for none."""
        canary = self._pool.domains[self._domain].canary
        return canary.drafter.version if canary else None
