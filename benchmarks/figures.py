"""Figures with their statistical errors, and the tables that are made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_SIGMAS = 3.0


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the least and the largest of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """All three, each times ``scale``."""
        middle, least, most = (f"{value * scale:.{digits}f}" for value in (self.median, self.least, self.most))
        return f"{middle} ({least} to {most})"


@dataclass(frozen=True)
class Quartiles(Spread):
    """The same with the quartiles."""

    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Of at least one value."""
        enough = values if len(values) > 1 else [*values, *values]
        lower, median, upper = statistics.quantiles(enough, method="inclusive")
        return cls(median, min(values), max(values), lower, upper)


@dataclass(frozen=True)
class Mean:
    """A mean over contexts and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """Of one value [N] for each context."""
        spread = float(values.std()) if len(values) > 1 else 0.0
        return cls(float(values.mean()), spread / math.sqrt(len(values)))

    @property
    def below_zero(self) -> bool:
        """Whether chance hardly explains a mean as low as this where zero or more is true."""
        return self.value < -_SIGMAS * self.error - 1e-6


def difference(more: Tensor, less: Tensor) -> Mean:
    """The mean of ``more - less``, both [N] over the same contexts."""
    return Mean.of(more - less)


@dataclass(frozen=True)
class Row:
    """One rule on the drafts of one draw.

    ``length`` tokens are kept a round, the bonus token included; ``first`` says how often one of the drafts of the
    first token is, as measured, ``exact`` the same by formula where there is one; no rule surpasses ``bound``.
    """

    draw: str
    drafts: int
    rule: str
    length: Mean | None
    first: Mean
    exact: float | None
    bound: float

    @property
    def acceptance(self) -> float:
        """Of the first token: by formula, else as measured."""
        return self.first.value if self.exact is None else self.exact

    @property
    def gap(self) -> float:
        """How much the best rule could accept more."""
        return self.bound - self.acceptance

    @property
    def above(self) -> str:
        """What is wrong when this is more than the bound."""
        return f"{self.rule} on {self.draw} accepts {self.acceptance:.4f}, above the bound {self.bound:.4f}"


@dataclass(frozen=True)
class Table:
    """The rows of one sampling setting over ``contexts``, and a sentence for everything that should not be."""

    temperature: float
    top_p: float
    contexts: int
    rows: list[Row]
    broken: list[str]

    @property
    def title(self) -> str:
        """The setting in words."""
        limit = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"temperature {self.temperature:g}{limit}, {self.contexts} contexts"
