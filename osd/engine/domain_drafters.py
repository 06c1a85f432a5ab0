"""Drafters of one domain: the version in service, and another version that is compared with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from osd.drafting.base import Drafter
from osd.drafting.session import CommittedTokens, Origin, Session, TargetRows
from osd.economy.report import RECALL_ALONE, Comparison
from osd.economy.turns import Turns


@dataclass(eq=False)
class ActiveDrafter:
    """Drafter in use: the session, and the domain and version of its weights.

    A sequence keeps its stable drafter to its end.

    Attributes:
        session: with the weights.
        drafter: configuration of the session; other versions of the same configuration can be swapped in.
        columns: columns of the target's tapped states that the drafter reads; None for all.
        domain: of the weights.
        version: of the weights.
        users: number of sequences that use the drafter.
    """

    session: Session
    drafter: Drafter
    columns: slice | Tensor | None
    domain: str
    version: int
    users: int = 0

    def __post_init__(self) -> None:
        """Copy the properties that every step reads."""
        self.kind, self.calls, self.needs = self.drafter.kind, self.drafter.calls, self.drafter.needs

    def open(self, slot: int, token: int, origin: Origin) -> None:
        """Open a slot for a sequence that starts with ``token``."""
        self.session.open(slot, token, origin)
        self.users += 1

    def close(self, slot: int) -> None:
        """Free a slot of the session, whose sequence ended or was preempted."""
        self.users -= 1
        self.session.close(slot)

    def commit(self, slot: int, tokens: list[int], states: Tensor | None, rows: TargetRows | None = None) -> None:
        """Pass committed tokens to the session, with the states and ``rows`` of the target that it needs.

        ``states`` [len(tokens), taps * hidden] are the target's before each token.
        """
        needed = rows if self.needs.target_rows or self.needs.riders else None
        self.session.commit(slot, CommittedTokens(tokens, self.hidden(states), needed))

    def judge(self, states: Tensor) -> Tensor | None:
        """Return the controller's logits for ``states`` [n, taps * hidden]; None without a controller."""
        hidden, heads = self.hidden(states), self.session.capabilities.early_heads
        return None if hidden is None or heads is None else heads.judge(hidden)

    def hidden(self, states: Tensor | None) -> Tensor | None:
        """Return the columns of the target's tapped states [n, taps * hidden] that the drafter reads; None for none."""
        if states is None or not self.needs.taps:
            return None
        return states if self.columns is None else states[:, self.columns]


@dataclass(eq=False)
class AlternateDrafter:
    """Second drafter of a domain, and the turns in which it replaces the stable drafter.

    Attributes:
        drafter: of a canary, which is newer than the stable version, or of a reference, which is older.
        turns: of the newer and the older version.
        reference: whether the drafter is a reference.
    """

    drafter: ActiveDrafter
    turns: Turns
    reference: bool = False

    @property
    def drafts(self) -> bool:
        """Whether it drafts in the next step, in place of the stable drafter."""
        return self.turns.candidate != self.reference

    def comparison(self, stable: ActiveDrafter) -> Comparison:
        """Return the measurement of the newer version against the older one."""
        newer, older = (stable, self.drafter) if self.reference else (self.drafter, stable)
        return Comparison(newer.version, older.version, self.turns.measured)


class DomainDrafters:
    """Drafters of a domain: the stable one and, during a comparison of versions, an alternate.

    A version with the configuration of the stable one is swapped into its session; another one replaces the drafter.

    Attributes:
        stable: drafter of the version in service.
        alternate: drafter that takes turns with it; None without a comparison.
        settled: comparisons of the stable version with references whose results are known, by version of the reference.
        rests: whether recall drafts alone, because the trained drafter next to it certainly lost time.
        last_used: number of the last choice.
    """

    def __init__(self, stable: ActiveDrafter) -> None:
        self.stable = stable
        self.alternate: AlternateDrafter | None = None
        self.settled: dict[int, Comparison] = {}
        self.rests = False
        self.last_used = 0

    @property
    def idle(self) -> bool:
        """Whether no sequence uses these drafters."""
        return not (self.stable.users or (self.alternate is not None and self.alternate.drafter.users))

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Comparisons of the stable version with references, and of the canary with the stable version."""
        compared = dict(self.settled)
        if (alternate := self.alternate) is not None and alternate.drafter.version not in compared:
            compared[alternate.drafter.version] = alternate.comparison(self.stable)
        if self.rests and (alone := compared.get(RECALL_ALONE)) is not None:
            compared[RECALL_ALONE] = replace(alone, measured=replace(alone.measured, guarded=1))
        return tuple(compared.values())

    def settle(self) -> bool:
        """Note the result of the comparison with a reference; return whether the comparison ends.

        The comparison with recall alone begins again while the trained drafter rests.
        """
        alternate = self.alternate
        if alternate is None or not alternate.reference or not alternate.turns.settled:
            return False
        comparison = self.settled[alternate.drafter.version] = alternate.comparison(self.stable)
        if alternate.drafter.version != RECALL_ALONE:
            return True
        if (effect := comparison.measured.effect) is not None:
            self.rests = effect.log <= 0 if self.rests else effect.log + effect.width < 0
        if self.rests:
            alternate.turns = Turns(0.0, self.stable.version)
        return not self.rests
