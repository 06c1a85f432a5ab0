"""The drafters at work in one engine, and which of them a request gets."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from osd.config import EngineSettings
from osd.drafters.base import Drafter, Runtime, Session
from osd.registry.pointer import Rollout
from osd.runtime.device import one_core

_MOST_WANTED = 64
"""Names of domains that are remembered until somebody asks: clients can send any."""


@dataclass(eq=False)
class Lane:
    """A drafter at work: its session, and the domain and version whose weights that has; ``users`` sequences use it.

    A sequence holds on to its lane to its end.
    """

    session: Session
    domain: str
    version: int
    users: int = 0

    def open(self, slot: int, token: int) -> None:
        """Give a slot to a sequence that starts with ``token``."""
        self.session.open(slot, token)
        self.users += 1

    def close(self, slot: int) -> None:
        """Take the slot back."""
        self.users -= 1
        self.session.close(slot)


class Line:
    """A domain's drafters: the stable version's lane and, while there is one, the canary's.

    The stable lane is there as long as the line, and versions are swapped into it.
    """

    def __init__(self, stable: Lane) -> None:
        self.stable = stable
        self.canary: tuple[Lane, Rollout] | None = None
        self.used = 0

    def choose(self, request_id: str) -> Lane:
        """The lane that a request gets."""
        if self.canary is not None:
            lane, rollout = self.canary
            if rollout.version_for(request_id) == lane.version:
                return lane
        return self.stable

    @property
    def idle(self) -> bool:
        """Whether no sequence uses it."""
        return not (self.stable.users or (self.canary is not None and self.canary[0].users))


class Lanes:
    """The lines of every domain at hand; all lanes share each forward of the target.

    The line of the engine's own domain is always there and serves what has none. The engine's thread chooses; any
    thread changes what there is to choose from, under ``changed``, which wakes the engine.
    """

    def __init__(
        self, drafter: Drafter, domain: str, version: int, settings: EngineSettings, changed: threading.Condition,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Make the own line on ``device``, with the weights that ``drafter`` has and their ``version``."""
        self._device = device
        self.domain, self.source, self.reads_hidden = domain, drafter.kind, bool(drafter.taps)
        self._drafter, self._settings, self._changed = drafter, settings, changed
        self._turn = 0
        self._wanted: set[str] = set()
        self.lines = {domain: Line(Lane(self._session(), domain, version))}
        self.staged: dict[Lane, tuple[int, dict[str, Tensor]]] = {}
        self._retired: list[Lane] = []  # until ``sweep``: the decode thread must not spend its time on freeing memory

    def choose(self, domain: str, request_id: str) -> Lane:
        """The lane that a request of ``domain`` gets; must hold ``changed``."""
        line = self.lines.get(domain)
        if line is None:
            if len(self._wanted) < _MOST_WANTED:
                self._wanted.add(domain)
            line = self.lines[self.domain]
        self._turn += 1
        line.used = self._turn
        return line.choose(request_id)

    def others(self) -> dict[str, int]:
        """The stable version of every line but the own."""
        with self._changed:
            return {domain: line.stable.version for domain, line in self.lines.items() if domain != self.domain}

    def wanted(self) -> set[str]:
        """Domains that requests asked for in vain since the last call."""
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            return wanted

    def open(self, domain: str, version: int, weights: dict[str, Tensor]) -> None:
        """Begin a domain's line, or do nothing where there is one; takes a while.

        Raises:
            DrafterError: the weights do not fit.
        """
        lane = self._make(domain, version, weights)
        with self._changed:
            self.lines.setdefault(domain, Line(lane))

    def drop_idle(self) -> str | None:
        """End the line that was not used for longest, of those that no sequence uses and not the own; says which."""
        with self._changed:
            idle = [(line.used, domain) for domain, line in self.lines.items() if domain != self.domain and line.idle]
            if not idle:
                return None
            domain = min(idle)[1]
            self.drop(domain)
            return domain

    def drop(self, domain: str) -> None:
        """End a domain's line; what uses it keeps it."""
        with self._changed:
            self.end_canary(domain)
            lane = self.lines.pop(domain).stable
            self.staged.pop(lane, None)
            self._retired.append(lane)

    def sweep(self) -> None:
        """Free the drafters that get no new sequences and have seen their last."""
        with self._changed:
            gone = [lane for lane in self._retired if not lane.users]
            self._retired = [lane for lane in self._retired if lane.users]
        del gone  # here, where nothing waits for it

    def stage(self, domain: str, version: int, weights: dict[str, Tensor]) -> None:
        """Check and lay out another version's weights, to be swapped into a stable lane between two rounds.

        Raises:
            DrafterError: the weights do not fit; the running version stays.
            KeyError: the domain has no line.
        """
        lane = self.lines[domain].stable
        one_core()
        staged = lane.session.stage(weights)
        with self._changed:
            self.staged[lane] = (version, staged)
            self._changed.notify_all()

    def try_canary(self, domain: str, rollout: Rollout, weights: dict[str, Tensor] | None) -> None:
        """Let the canary of ``rollout`` draft for its share of a domain's new requests, beside the stable version.

        It takes the place of another canary, whose requests go on with what they have.

        Args:
            domain: one that has a line.
            rollout: names the canary and its share.
            weights: of the canary; None when it runs already.

        Raises:
            DrafterError: the weights do not fit; nothing changes.
            KeyError: the domain has no line.
        """
        line, number = self.lines[domain], rollout.canary
        lane = line.canary[0] if line.canary else None
        if weights is not None and number is not None:
            lane = self._make(domain, number, weights)
        if lane is None or lane.version != number:
            raise ValueError(f"{domain} has no canary of version {number}")
        with self._changed:
            if line.canary is not None and line.canary[0] is not lane:
                self.end_canary(domain)
            line.canary = lane, rollout

    def end_canary(self, domain: str) -> None:
        """Let a domain's stable version draft for every new request; what the canary drafts for keeps it."""
        line = self.lines[domain]
        with self._changed:
            if line.canary is not None:
                self._retired.append(line.canary[0])
            line.canary = None

    def _make(self, domain: str, version: int, weights: dict[str, Tensor]) -> Lane:
        one_core()
        session = self._session()
        staged = session.stage(weights)
        with torch.inference_mode():
            session.load(staged)
        return Lane(session, domain, version)

    def _session(self) -> Session:
        settings = self._settings
        return self._drafter.session(Runtime(settings.slots, settings.context, settings.max_draft + 1, self._device))


class LineControl:
    """One domain's drafters, as whoever follows its rollout pointer sees them."""

    def __init__(self, lanes: Lanes, domain: str) -> None:
        self._lanes, self._domain = lanes, domain

    @property
    def drafter_version(self) -> int:
        """The stable version."""
        return self._lanes.lines[self._domain].stable.version

    @property
    def canary_version(self) -> int | None:
        """The version that drafts for a share of new requests, None for none."""
        canary = self._lanes.lines[self._domain].canary
        return canary[0].version if canary else None

    def stage(self, version: int, weights: dict[str, Tensor]) -> None:
        """See ``Lanes.stage``."""
        self._lanes.stage(self._domain, version, weights)

    def try_canary(self, rollout: Rollout, weights: dict[str, Tensor] | None) -> None:
        """See ``Lanes.try_canary``."""
        self._lanes.try_canary(self._domain, rollout, weights)

    def end_canary(self) -> None:
        """See ``Lanes.end_canary``."""
        self._lanes.end_canary(self._domain)
