"""The versions of one domain's drafter, as the dashboard shows them: what each is, how it does, and what it earned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from osd.admin.listing import Listed
from osd.engine.counters import OLDER
from osd.registry.learnt import REQUESTS
from osd.registry.ledger import Spent
from osd.registry.pointer import Rollout
from osd.registry.versions import VersionInfo
from serving.metrics.report import Totals


def version_of(info: VersionInfo | Listed) -> dict[str, Any]:
    """A version as JSON."""
    # What a version has learnt from is a long list, and nothing to look at.
    manifest = {name: value for name, value in info.manifest.items() if name != REQUESTS}
    return {"number": info.number, "problem": info.problem, "manifest": manifest}


def rollout_of(rollout: Rollout | None) -> dict[str, Any]:
    """A rollout as JSON; None is a domain that has none."""
    return {
        "stable": rollout.stable if rollout else None,
        "canary": rollout.canary if rollout else None,
        "share": rollout.share if rollout else 0.0,
        "pinned": rollout.pinned if rollout else False,
    }


def shown(
    domain: str,
    versions: Sequence[dict[str, Any]],
    running: Collection[int | None],
    rollout: Rollout | None,
    totals: Totals,
    spent: Spent,
) -> dict[str, Any]:
    """A domain's ``versions``, those of them that replicas have ``running``, its rollout and its ledger, as JSON.

    A version's ``training`` are the seconds that it took, None where nobody says, ``payback`` as in the ledger.
    """
    live = {name: totals.by_label(f"version_{name}") for name in ("rounds", "drafted", "accepted")}
    rows = []
    for version in versions:
        counts = {name: by_version.get((domain, version["number"]), 0) for name, by_version in live.items()}
        took = {"training": spent.by_version.get(version["number"]), "payback": spent.payback(version["number"])}
        rows.append({**version, **took, "in_service": version["number"] in running, "live": counts})
    return {
        "domain": domain,
        "versions": rows,
        "ledger": ledger(totals, domain, spent),
        **rollout_of(rollout),
    }


def ledger(totals: Totals, domain: str, spent: Spent) -> dict[str, Any]:
    """Seconds saved in serving against seconds ``spent`` on training, by version of ``domain`` and in ``total``.

    Versions that are not counted apart any more are the one named "older", with what was spent on them.
    ``saved`` is ``plain - decode``, see ``osd.engine.savings``: seconds of the engine, on all the cores that it has.
    ``training`` are CPU seconds of the trainer and what rounds lost beside it, in all ``slowed``; those since the last
    version count in the total only. ``net`` is ``saved - training``. ``payback`` are the seconds in service after which
    a version, or everything, is expected to have paid; None where it never does, or nobody knows.
    """
    tokens, plain, decode = (
        {labels[1]: value for labels, value in totals.by_label(f"version_{name}").items() if labels[0] == domain}
        for name in ("tokens", "plain_seconds", "decode_seconds")
    )
    by_version = _apart(spent, tokens)
    rows = []
    for version in sorted({*tokens, *by_version}, key=lambda version: -1 if version == OLDER else version):
        saved, training = plain.get(version, 0.0) - decode.get(version, 0.0), by_version.get(version, 0.0)
        rows.append({"version": version, "tokens": tokens.get(version, 0), "plain": plain.get(version, 0.0)})
        rows[-1] |= {"decode": decode.get(version, 0.0), "saved": saved, "training": training, "net": saved - training}
        rows[-1]["payback"] = None if isinstance(version, str) else spent.payback(version)
    total: dict[str, float | None] = {
        name: sum(row[name] for row in rows) for name in ("tokens", "plain", "decode", "saved")
    }
    total |= {"training": spent.total, "net": sum(row["saved"] for row in rows) - spent.total}
    total["payback"] = spent.payback_of_all
    return {"versions": rows, "unpublished": spent.unpublished, "slowed": spent.slowed, "total": total}


def _apart(spent: Spent, counted: Collection[str | int]) -> dict[str | int, float]:
    """Seconds of training by version; those of versions that serving may count among the older ones are theirs."""
    newest = max((version for version in counted if isinstance(version, int)), default=0)
    found: defaultdict[str | int, float] = defaultdict(float)
    if spent.older:
        found[OLDER] = spent.older
    for version, seconds in spent.by_version.items():
        found[OLDER if OLDER in counted and version not in counted and version < newest else version] += seconds
    return found
