"""What ``/metrics`` says in tests."""

from __future__ import annotations

from osd.capture.waiting import StreamState
from osd.engine.counters import EngineLoad
from osd.registry.ledger import Spent
from osd.registry.training import Expected, Training
from serving.prometheus import BY_VERSION, render
from serving.replica_metrics import Report, TableSize, Totals


def everything() -> str:
    """The exposition of a service that has done everything once."""
    report = Report("r", 0.0, 1, True, EngineLoad(0, 0), 0.0, {}, tables={"general": TableSize(1, 64)})
    counters: dict = {("accepted_per_position", 0): 1.0, ("http_responses", "/health", 200): 1.0}
    counters |= {(name, "general", 1): 1.0 for name in BY_VERSION}
    counters |= {("version_round_accepted", "general", "older", 1): 1, ("traces_lost", "redis"): 1.0}
    counters |= {(name, "recall", 1): 1.0 for name in ("recall_drafted", "recall_accepted")}
    counters |= {(name, "recall"): 1.0 for name in ("source_drafted", "source_accepted")}
    training = {"general": Training(lag=0, lag_seconds=0.0, loss=1.0, expected=Expected(True, 0.1, 60.0, 2.0, 1.0))}
    streams = {"general": StreamState(1, 64, None)}
    totals = Totals(counters, [report], Spent({1: 2.0}, 0.5, saving={1: 0.01}), training, {"general": 0.0}, streams)
    return render(totals, "general", "model").decode()
