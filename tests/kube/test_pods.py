"""The service in the pods of the RayService; `make kube`."""

from __future__ import annotations

import contextlib

import httpx2
import pytest

from tests.clients import ClientThread
from tests.kube.manifests import ray_service
from tests.kube.pods import running, serve_config
from tests.tiny import make_tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

STREAMS = 4
SETTINGS = {
    "target.source": "/data/tiny", "target.dtype": "float32", "engine.slots": 8, "engine.context": 1024,
    "engine.threads": 1, "drafter.kind": "none",
}  # fmt: skip


def test_pods_serve_and_a_pod_that_ends_completes_its_streams(tmp_path):
    make_tiny(tmp_path / "tiny", layers=96)
    with running(ray_service("base"), tmp_path) as pods:
        config = serve_config(pods.service)
        config["applications"][0]["args"] |= SETTINGS
        assert pods.ask("PUT", "/api/serve/applications/", config).status_code == 200

        def runs() -> bool:
            state = pods.ask("GET", "/api/serve/applications/").json()["applications"].get("osd", {})
            assert state.get("status") != "DEPLOY_FAILED", state["message"]
            return state.get("status") == "RUNNING"

        wait_until(runs, every=0.5, what="the application")
        headers = {"authorization": f"Bearer {pods.key}"}

        def chat(ip: str) -> int:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            url = f"http://{ip}:8000/v1/chat/completions"
            return httpx2.post(url, json=body, headers=headers, timeout=60).status_code

        def has_proxy(ip: str) -> bool:
            with contextlib.suppress(httpx2.ConnectError):
                return httpx2.get(f"http://{ip}:8000/health", timeout=30).status_code == 200
            return False

        for pod in pods.replicas:
            wait_until(lambda pod=pod: has_proxy(pod.ip), every=0.5, what=f"the proxy of {pod.name}")
        leaving, staying = pods.replicas
        assert [chat(leaving.ip), chat(staying.ip)] == [200, 200]
        url = f"http://{staying.ip}:8000"
        clients = [ClientThread(url, headers, prompt=f"{n}", max_tokens=400, stream=True) for n in range(STREAMS)]
        assert all(client.started.wait(60) for client in clients)
        done = pods.leave(leaving)
        assert (done.returncode, done.stderr) == (0, "")
        leaving.kill()
        assert [client.error() for client in clients] == [None] * STREAMS
        assert chat(staying.ip) == 200
