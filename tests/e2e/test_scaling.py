"""Serve itself ends replicas while they have requests in flight."""

from __future__ import annotations

import pytest
from ray import serve

from serving.app import build
from tests.clients import Asking, told
from tests.e2e.conftest import REPLICAS


@pytest.mark.soak
@pytest.mark.fault("Serve takes a replica away under load", "what it works on ends whole")
def test_a_replica_that_is_no_longer_wanted_ends_its_answers_first(service, aftermath, eventually):
    def run(replicas):
        serving = service.settings.serving.model_copy(update={"replicas": replicas})
        settings = service.settings.model_copy(update={"serving": serving})
        serve.run(build(settings, service.redis.url), name="osd", route_prefix="/", blocking=False)

    def alive(replicas):
        return lambda: len(service.data()["replicas"]) == replicas

    eventually(alive(REPLICAS))
    clients = []
    for _ in range(6):
        clients.append(Asking(service.url, max_tokens=1000, stream=True, logprobs=5))
        assert clients[-1].begun.wait(30)
    run(1)
    try:
        assert all(client.is_alive() for client in clients)
        eventually(alive(1), seconds=60)
        assert [client.error() for client in clients] == [None] * len(clients)
        aftermath.errors, aftermath.lost = told(clients), "nothing"
    finally:
        run(REPLICAS)
        eventually(alive(REPLICAS), seconds=60)
