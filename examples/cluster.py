"""The service on a Ray cluster: deploy it, wait until it answers, and say what came up where.

    ray up ray_cluster.yaml          # or ray start on each machine
    ray attach ray_cluster.yaml      # then, on the head node:
    python examples/cluster.py home=/data redis_url=redis://redis:6379/0 serving.replicas=4

It reads ``deploy/serve.yaml`` as ``serve deploy deploy/serve.yaml`` does; settings that are given replace those of the
file. Every node has to see the same ``home``, and Redis is one of your own. The service stays when this program ends:
``serve shutdown`` ends it. ``--address local`` tries all of it on this machine alone, and ends it again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import httpx2
import ray
import yaml
from ray import serve

from deploy.cluster import build

FILE = Path(__file__).parents[1] / "deploy/serve.yaml"
_SECONDS = 300.0


def deploy(address: str, given: list[str]) -> httpx2.Client:
    """Deploy the application of the file on a cluster; returns a client of it."""
    file = yaml.safe_load(FILE.read_text())
    (application,) = file["applications"]
    args = {**application["args"], **dict(one.split("=", 1) for one in given)}
    port = int(args.get("serving.port", file["http_options"]["port"]))
    ray.init(address=address)
    serve.start(proxy_location=file["proxy_location"], http_options={**file["http_options"], "port": port})
    serve.run(build(args), name=application["name"], route_prefix=application["route_prefix"])
    key = args.get("serving.api_key")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120)


def replicas(http: httpx2.Client, count: int) -> list[dict[str, Any]]:
    """What all replicas say of themselves, once as many have reported as were asked for.

    Raises:
        TimeoutError: they do not come up.
    """
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        found = http.get("/dashboard/data").raise_for_status().json()["replicas"]
        if len(found) >= count:
            return found
        time.sleep(0.5)
    raise TimeoutError(f"{count} replicas did not come up in {_SECONDS:.0f} s")


def main() -> None:
    """Deploy, look, and ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="auto", help="of the cluster; local makes one of this machine")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="in place of those of deploy/serve.yaml")
    given = parser.parse_args()
    with deploy(given.address, given.settings) as http:
        deployments = serve.status().applications["osd"].deployments
        count = max(sum(one.replica_states.values()) for one in deployments.values())
        for replica in replicas(http, count):
            print(f"replica {replica['name']} drafts with version {replica['version']}")
        body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        print(answer["choices"][0]["text"])
        url = str(http.base_url).rstrip("/")
    print(f"{url}/v1 on each of {len(ray.nodes())} nodes; the dashboard is at {url}/dashboard")
    if given.address == "local":
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
