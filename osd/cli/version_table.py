"""The versions of every domain and their training: a table of at most 80 columns, and JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from osd.admin.rollouts import Listed, Listing
from osd.economy.effect import bounds
from osd.registry.training import Training, VersionEffect


def version_table(listing: Listing) -> RenderableType:
    """The versions of a domain below its name; what cannot be read of one is told below them."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("version", "in service", "made", "accepted", "length", "cost", "measured"):
        table.add_column(column, no_wrap=True)
    problems: list[Text] = []
    effects = _effects(listing)
    for one in listing.versions:
        gate, parent = one.manifest.get("gate") or {}, one.manifest.get("parent")
        branched = f" of {parent}" if parent not in (None, one.number - 1) else ""
        cells = [
            f"{one.number}{branched}",
            state(one, listing),
            time.strftime("%b %d %H:%M", time.localtime(one.manifest["created"])) if "created" in one.manifest else "",
            _change(gate, "acceptance", 3),
            _change(gate, "expected_length", 2),
            f"{cost['core_seconds']:,.0f} s" if (cost := one.manifest.get("cost")) else "",
            _measured(effects[one.number]) if one.number in effects else "",
        ]
        table.add_row(*map(Text, cells))
        if one.problem:
            problems.append(Text(f" version {one.number}: {one.problem}"))
    told = [Text(f" {name:<17} {figure}") for name, figure in explained(listing.training)]
    return Group(Text(listing.domain, style="bold", overflow="fold"), table, *problems, *told)


def version_records(listing: Listing) -> Iterator[dict[str, Any]]:
    """The same, and the whole gate, for programs: times are seconds, those of the epoch where something happened."""
    effects = _effects(listing)
    for one in listing.versions:
        manifest, effect = one.manifest, effects.get(one.number)
        yield {
            "domain": listing.domain,
            "version": one.number,
            "state": state(one, listing),
            "parent": manifest.get("parent"),
            "created": manifest.get("created"),
            "removed": one.removed,
            "cost": manifest.get("cost"),
            "speedup": None if effect is None else bounds(effect.log, effect.width),
            "gate": manifest.get("gate"),
            "problem": one.problem,
        }


def state(one: Listed, listing: Listing) -> str:
    """Whether a version is in service; empty where it is just there."""
    rollout = listing.rollout
    if one.removed is not None:
        return f"removed {time.strftime('%b %d', time.localtime(one.removed))}"
    if rollout is None:
        return ""
    if one.number == rollout.canary:
        return f"canary, {100 * rollout.share:.0f} %"
    if one.number != rollout.stable:
        return ""
    return "yes, pinned" if rollout.pinned else "yes"


def _change(gate: dict[str, Any], name: str, digits: int) -> str:
    """A figure of the version before and of this one, as the gate measured both."""
    before, now = gate.get(f"baseline_{name}"), gate.get(name)
    if before is None or now is None:
        return ""
    return f"{before:.{digits}f} → {now:.{digits}f}"


def explained(training: Training | None) -> list[tuple[str, str]]:
    """Return the cost of a domain's training and its measured gain, by name; empty without a report."""
    if training is None:
        return []
    beside = training.beside_seconds + training.slowed_seconds
    lines = [("training cost", f"{training.cost:,.0f} core seconds, {beside:,.0f} of them while requests ran")]
    account = training.account
    if account is None:
        return lines
    brought = "no version is measured yet"
    if account.effects and account.log is not None:
        brought = f"{interval(account.log, account.width)} since version {account.effects[0].number}"
    paid = "not yet"
    if account.paid_back is not None:
        paid = time.strftime("%b %d, %H:%M", time.localtime(account.paid_back))
    lines += [("training brought", brought), ("paid back", paid)]
    if (trial := account.undecided) is not None:
        found = "not measured yet" if trial.width is None else interval(trial.log, trial.width)
        lines.append(("trying now", f"version {trial.number} against {trial.before}: {found}, {trial.trials} trials"))
    return lines


def interval(log: float, width: float | None) -> str:
    """Return the change of a measured speed-up in percent, with its bounds."""
    estimate, low, high = (f"{math.expm1(log + off):+.1%}" for off in (0.0, -(width or 0.0), width or 0.0))
    return estimate if width is None else f"{estimate} ({low} to {high})"


def _measured(effect: VersionEffect) -> str:
    return "" if effect.width is None else f"{math.expm1(effect.log):+.1%}"


def _effects(listing: Listing) -> dict[int, VersionEffect]:
    account = None if listing.training is None else listing.training.account
    return {} if account is None else {effect.number: effect for effect in account.measured}
