"""Replicas that Ray Serve ends while they have running requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve

from serving.app import build
from tests.clients import ClientThread, describe_errors
from tests.e2e.conftest import REPLICAS


@pytest.mark.soak
@pytest.mark.fault(
    "a service with fewer replicas is deployed under load",
    "no answer is cut off",
    process="replica: ended by Ray Serve",
)
def test_replaced_replicas_finish_their_answers(service, fault_result, eventually):
    clients = []

    def run(replicas):
        serving = service.settings.serving.model_copy(update={"replicas": replicas})
        settings = service.settings.model_copy(update={"serving": serving})
        serve.run(build(settings, service.redis.url), name="osd", route_prefix="/")

    def names():
        return {replica["name"] for replica in service.data()["replicas"]}

    def ask_until(done):
        while not done():
            clients.append(ClientThread(service.url, max_tokens=400, stream=True, logprobs=5))
            clients[-1].join()

    before = names()
    try:
        with ThreadPoolExecutor(5) as pool:
            deployed = pool.submit(run, 1)
            for _ in range(4):
                pool.submit(ask_until, deployed.done)
        deployed.result()
        eventually(lambda: len(names()) == 1 and not names() & before)
        assert clients
        assert [client.error() for client in clients] == [None] * len(clients)
        fault_result.errors, fault_result.lost = describe_errors(clients), "nothing"
    finally:
        run(REPLICAS)
        eventually(lambda: len(names()) == REPLICAS)
