"""The versions of every domain as a table of at most 80 columns, and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from osd.admin.rollouts import Listed, Listing

_UNITS = ((86_400 * 365.25, "y"), (86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def version_table(listing: Listing) -> RenderableType:
    """The versions of a domain below its name; what cannot be read of one is told below them."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("version", "in service", "made", "accepted", "length", "payback", "of all"):
        table.add_column(column, no_wrap=True)
    problems: list[Text] = []
    for one in listing.versions:
        gate, parent = one.manifest.get("gate") or {}, one.manifest.get("parent")
        branched = f" of {parent}" if parent not in (None, one.number - 1) else ""
        cells = [
            f"{one.number}{branched}",
            state(one, listing),
            time.strftime("%b %d %H:%M", time.localtime(one.manifest["created"])) if "created" in one.manifest else "",
            _change(gate, "acceptance", 3),
            _change(gate, "expected_length", 2),
            _payback(one.manifest, "payback_seconds"),
            _payback(one.manifest, "payback_of_all"),
        ]
        table.add_row(*map(Text, cells))
        if one.problem:
            problems.append(Text(f" version {one.number}: {one.problem}"))
    return Group(Text(listing.domain, style="bold", overflow="fold"), table, *problems)


def version_records(listing: Listing) -> Iterator[dict[str, Any]]:
    """The same, and the whole gate, for programs: times are seconds, those of the epoch where something happened."""
    for one in listing.versions:
        manifest = one.manifest
        worth = manifest.get("worth") or {}
        yield {
            "domain": listing.domain,
            "version": one.number,
            "state": state(one, listing),
            "parent": manifest.get("parent"),
            "created": manifest.get("created"),
            "removed": one.removed,
            "payback_seconds": worth.get("payback_seconds"),
            "payback_of_all": worth.get("payback_of_all"),
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


def _payback(manifest: dict[str, Any], name: str) -> str:
    worth = manifest.get("worth") or {}
    return _duration(worth.get(name)) if worth else ""


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
    count = seconds / size
    return f"{count:.1f} {unit}" if count < 10 and unit != "s" else f"{count:,.0f} {unit}"
