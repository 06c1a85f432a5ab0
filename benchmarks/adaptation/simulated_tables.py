"""Passes beside their simulation, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.adaptation.report import Table
from benchmarks.adaptation.simulated import Compared, Fitted


def fitted_table(fit: Fitted) -> Table:
    """What was taken from the passes."""
    curve = "{0[0]:.2f} tokens per round, all but 1 / e of it after {0[1]:.0f} tokens".format
    learnt = "{:.2f} tokens per round, all but 1 / e of it after {:.0f} tokens, {:.0f} in a CPU second"
    rows = [
        ("recall learns", curve(fit.recall)),
        *(
            (name, learnt.format(one.most, one.tokens, one.per_second))
            for name, one in (("training adds", fit.trained), ("beside recall", fit.trained_beside))
        ),
        ("the first version gives", f"{fit.frozen:.2f} tokens per round, {fit.beside:.2f} beside recall"),
        ("a second of training takes", f"{fit.slowing:g} s of replicas beside it"),
        ("a + b of the chances", f"{fit.certainty:g}"),
    ]
    return Table("fitted to the passes of one load", ("", "drafts of up to eight tokens"), rows)


def compared_table(found: Sequence[Compared]) -> Table:
    """Predicted over observed; of paybacks the seconds too, "-" where training did not pay."""
    columns = (
        "load, turn, way",
        "speed",
        "acceptance",
        "in quarters",
        "bytes",
        "payback",
        "of seconds",
    )
    table = Table("predicted / observed", columns, [])
    for one in found:
        paid = "" if one.paid is None else ", ".join("-" if each is None else f"{each:.0f}" for each in one.paid)
        table.rows.append(
            (
                f"{one.load:g}, {one.turn}, {one.way}" + (" (fitted)" if one.fitted else ""),
                f"{one.speed:.3f}",
                _ratio(one.acceptance),
                " ".join(f"{each:.2f}" for each in one.quarters),
                _ratio(one.written),
                _ratio(one.payback),
                paid,
            )
        )
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
