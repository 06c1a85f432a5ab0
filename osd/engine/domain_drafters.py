"""Drafters of one domain: the version in service, and another version that is compared with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from osd.drafting.base import Drafter
from osd.drafting.session import CommittedTokens, Origin, Session, TargetRows
from osd.economy.effect import KNOWN_WIDTH, LEAST_TRIALS
from osd.economy.report import RECALL_ALONE, Comparison
from osd.economy.switchback import KEPT_SECONDS
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
        reference: whether the drafter is a reference, the version before or recall alone.
    """

    drafter: ActiveDrafter
    turns: Turns
    reference: bool = False

    @classmethod
    def recall_alone(cls, drafter: ActiveDrafter) -> AlternateDrafter:
        """Return a reference that drafts until the trained drafter gains, and from then on in few blocks."""
        return cls(drafter, Turns(0.0, RECALL_ALONE, KEPT_SECONDS), reference=True)

    @property
    def drafts(self) -> bool:
        """Whether it drafts in the next step, in place of the stable drafter."""
        return self.turns.candidate != self.reference

    @property
    def rests(self) -> bool:
        """Whether the newer version drafts in trials only."""
        return self.turns.share == 0.0

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
        recall_alone: reference of a trained version of a mixed drafter; None for other drafters.
        settled: result of the comparison of the stable version with the version before; None before it is known.
        last_used: number of the last choice.
    """

    def __init__(self, stable: ActiveDrafter) -> None:
        self.stable = stable
        self.alternate: AlternateDrafter | None = None
        self.recall_alone: AlternateDrafter | None = None
        self.settled: Comparison | None = None
        self.last_used = 0

    @property
    def idle(self) -> bool:
        """Whether no sequence uses these drafters."""
        return not (self.stable.users or (self.alternate is not None and self.alternate.drafter.users))

    @property
    def rests(self) -> bool:
        """Whether the stable drafter drafts in trials only, and recall alone in all other steps."""
        return self.alternate is not None and self.alternate is self.recall_alone and self.alternate.rests

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Comparisons of the stable version with references, and of the canary with the stable version."""
        compared = [] if self.settled is None else [self.settled]
        if self.alternate is not None and self.alternate is not self.recall_alone:
            compared.append(self.alternate.comparison(self.stable))
        if self.recall_alone is not None:
            alone = self.recall_alone.comparison(self.stable)
            compared.append(replace(alone, measured=replace(alone.measured, guarded=int(self.recall_alone.rests))))
        return tuple(compared)

    def settle(self) -> bool:
        """Take in the measured effects; return whether a comparison with the version before ends."""
        if self.recall_alone is not None:
            effect = self.recall_alone.turns.measured.effect
            gains = effect is not None and effect.trials >= LEAST_TRIALS and effect.log > KNOWN_WIDTH
            self.recall_alone.turns.share = float(gains)
        alternate = self.alternate
        if alternate in (None, self.recall_alone) or not alternate.reference or not alternate.turns.settled:
            return False
        self.settled = alternate.comparison(self.stable)
        return True
