"""Drafter versions of a domain and their training, as a table of at most 80 columns and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from osd.admin.rollouts import ListedVersion, Listing
from osd.economy.effect import bounds
from osd.registry.training import Training, VersionEffect

_SILENT_SECONDS = 30.0  # without a heartbeat of the trainer, as on the dashboard


def version_table(listing: Listing) -> RenderableType:
    """Return the table of the versions of a domain, followed by unreadable versions and the cost of training."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("version", "in service", "made", "accepted", "length", "cost", "measured"):
        table.add_column(column, no_wrap=True)
    problems: list[Text] = []
    effects = _effects(listing)
    for version in listing.versions:
        manifest = version.manifest
        gate, parent = manifest.get("gate") or {}, manifest.get("parent")
        branched = f" of {parent}" if parent not in (None, version.number - 1) else ""
        cells = [
            f"{version.number}{branched}",
            state(version, listing),
            time.strftime("%b %d %H:%M", time.localtime(manifest["created"])) if "created" in manifest else "",
            _change(gate, "acceptance", 3),
            _change(gate, "expected_length", 2),
            f"{cost['core_seconds']:,.0f} s" if (cost := manifest.get("cost")) else "",
            _measured(effects[version.number]) if version.number in effects else "",
        ]
        table.add_row(*map(Text, cells))
        if version.problem:
            problems.append(Text(f" version {version.number}: {version.problem}"))
    lines = explained(listing.training, listing.silence)
    training = [Text(f" {name:<13} {figure}") for name, figure in lines]
    return Group(Text(listing.domain, style="bold", overflow="fold"), table, *problems, *training)


def version_records(listing: Listing) -> Iterator[dict[str, Any]]:
    """Yield a JSON record for each version, with all results of the gate.

    Durations are in seconds; points in time are in seconds since the epoch.
    """
    effects = _effects(listing)
    for version in listing.versions:
        manifest, effect = version.manifest, effects.get(version.number)
        yield {
            "domain": listing.domain,
            "version": version.number,
            "state": state(version, listing),
            "parent": manifest.get("parent"),
            "created": manifest.get("created"),
            "removed": version.removed,
            "cost": manifest.get("cost"),
            "speedup": None if effect is None else bounds(effect.log, effect.width),
            "gate": manifest.get("gate"),
            "problem": version.problem,
        }


def state(version: ListedVersion, listing: Listing) -> str:
    """Return the state of a version; "" if it is neither in service nor removed."""
    rollout = listing.rollout
    if version.removed is not None:
        return f"removed {time.strftime('%b %d', time.localtime(version.removed))}"
    if rollout is None:
        return ""
    if version.number == rollout.canary:
        return f"canary, {100 * rollout.share:.0f} %"
    if version.number != rollout.stable:
        return ""
    return "yes, pinned" if rollout.pinned else "yes"


def _change(gate: dict[str, Any], name: str, digits: int) -> str:
    """Return a figure of the gate for the previous version and for this version."""
    before, now = gate.get(f"baseline_{name}"), gate.get(name)
    if before is None or now is None:
        return ""
    return f"{before:.{digits}f} → {now:.{digits}f}"


def explained(training: Training | None, silence: float | None = None) -> list[tuple[str, str]]:
    """Return the state of a domain's trainer, the cost of training and its measured gain, by name.

    ``silence`` are the seconds since the last heartbeat of the trainer, None while no trainer runs. Without a report
    the result is empty.
    """
    if training is None:
        return []
    under_load = training.beside_seconds + training.slowed_seconds
    cost = f"{training.cost:,.0f} core seconds, {under_load:,.0f} of them while requests ran"
    lines = [("trainer", _activity(training, silence)), ("training cost", cost)]
    account = training.account
    if account is None:
        return lines
    gain, alone = "no version is measured yet", account.over_recall
    if account.log is not None:
        over = "over recall alone" if alone is not None else f"since version {account.effects[0].before}"
        gain = f"{interval(account.log, account.width)} {over}"
    if alone is not None and alone.resting:
        gain += f"; the trained drafter rests, and recall drafts alone (replicas: {alone.resting})"
    paid = "not yet"
    if account.paid_back is not None:
        paid = time.strftime("%b %d, %H:%M", time.localtime(account.paid_back))
    lines += [("training gain", gain), ("paid back", paid)]
    if (trial := account.undecided) is not None:
        change = "not measured yet" if trial.width is None else interval(trial.log, trial.width)
        lines.append(("on trial", f"version {trial.number} against {trial.before}: {change}, {trial.trials} trials"))
    return lines


def _activity(training: Training, silence: float | None) -> str:
    """Return the state of the trainer and why it does not train."""
    if silence is None:
        return "none runs"
    if silence > _SILENT_SECONDS:
        return f"silent for {silence:,.0f} s"
    return training.activity or "has not reported its state"


def interval(log: float, width: float | None) -> str:
    """Return the change of a measured speed-up in percent, with its bounds."""
    estimate, low, high = (f"{math.expm1(log + off):+.1%}" for off in (0.0, -(width or 0.0), width or 0.0))
    return estimate if width is None else f"{estimate} ({low} to {high})"


def _measured(effect: VersionEffect) -> str:
    return "" if effect.width is None else f"{math.expm1(effect.log):+.1%}"


def _effects(listing: Listing) -> dict[int, VersionEffect]:
    account = None if listing.training is None else listing.training.account
    return {} if account is None else {effect.number: effect for effect in account.measured}
