"""Counts of HTTP answers by path and status, in a proxy and over all proxies."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayError
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.testclient import TestClient

from serving import front
from serving.api.routes import create_app
from serving.http.paths import UNKNOWN, template_of
from serving.metrics import replicas
from serving.metrics.http_counts import COUNTS, Delivery
from serving.metrics.replicas import ReplicaMetrics
from tests.unit.serving.exposition import samples_of


def counted(answer, path):
    """Return the increments of the counts of this process by an answer."""
    before = COUNTS.copy()
    TestClient(front.Front(answer), raise_server_exceptions=False).get(path)
    return COUNTS - before


async def failing(scope, receive, send):
    raise RuntimeError


async def silent(scope, receive, send):
    pass


@pytest.mark.parametrize(("answer", "path", "expected"), [
    (JSONResponse({}), "/v1/completions", ("/v1/completions", 200)),
    (JSONResponse({}, 429), "/v1/completions", ("/v1/completions", 429)),
    (JSONResponse({}, 404), "/v1/models/some%20SECRET/thing", ("/v1/models/{model}", 404)),
    (JSONResponse({}, 404), "/etc/SECRET", (UNKNOWN, 404)),
    (PlainTextResponse("no application", 404), "/health", ("/health", 503)),
    (failing, "/health", ("/health", 500)),
    (silent, "/health", ("/health", 503)),
])  # fmt: skip
def test_answer_is_counted_once_with_the_client_status(answer, path, expected):
    assert counted(answer, path) == {expected: 1}


def test_service_paths_have_templates_and_others_do_not(service):
    paths = set()
    for included in create_app(service).routes:
        paths |= {route.path for route in included.original_router.routes}
    assert len(paths) > 15
    for path in paths:
        name = template_of(re.sub(r"\{[^}]*\}", "a/b", path))
        assert name != UNKNOWN, path
        assert "{" in name or "{" not in path
    assert {template_of(path) for path in ("", "//", "/v1", "/metrics/", "/v1/completions/x", "//health")} == {UNKNOWN}


def exposed(metrics):
    samples = samples_of(metrics.totals(0.0)).items()
    return {
        (path, status): value
        for (name, *labels), value in samples
        if name == "osd_http_responses_total"
        for (_, path), (_, status) in [labels]
    }


def test_counts_of_proxies_are_summed_and_never_fall(monkeypatch):
    monkeypatch.setattr(replicas, "_REMEMBERED", 256)
    metrics, path = ReplicaMetrics(), "/v1/completions"
    for counts in ({(path, 200): 3}, {(path, 200): 3}, {(path, 200): 5, (path, 429): 1}):
        metrics.answered("a", counts)
    metrics.answered("b", {(path, 200): 2})
    assert exposed(metrics) == {(path, "200"): 7, (path, "429"): 1}
    metrics.answered("c", {(path, 200): 1})  # replaces a proxy that died
    assert exposed(metrics) == {(path, "200"): 8, (path, "429"): 1}
    for number in range(1000):
        metrics.answered(str(number), {(path, 200): 1})
    assert exposed(metrics)[path, "200"] == 1008
    metrics.answered("0", {(path, 200): 1})  # a forgotten proxy counts from zero
    assert exposed(metrics)[path, "200"] == 1009


def test_new_metrics_actor_receives_all_counts(monkeypatch):
    class ActorHandle:
        """Replacement of a handle of the metrics actor."""

        def __init__(self):
            self.received, self.dead = [], False
            self.answered = SimpleNamespace(remote=lambda proxy, counts: (self, proxy, counts))

    def get(calls, timeout):
        for actor, proxy, counts in calls:
            if actor.dead:
                raise RayError
            actor.received.append((proxy, counts))

    first, second = ActorHandle(), ActorHandle()
    delivery = Delivery(Counter(), "replica_metrics")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", get)
    named = [{"name": "SERVE::replica_metrics", "namespace": "serve"}, {"name": "another", "namespace": "serve"}]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: named)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: second if first.dead else first)
    delivery.deliver({("/health", 200): 1})
    first.dead = True
    for count in (2, 3):
        delivery.deliver({("/health", 200): count})
    assert [counts for _, counts in first.received] == [{("/health", 200): 1}]
    assert [counts for _, counts in second.received] == [{("/health", 200): 3}]
    assert {proxy for proxy, _ in first.received} == {proxy for proxy, _ in second.received}
