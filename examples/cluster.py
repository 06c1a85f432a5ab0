"""Deploy the service on a Ray cluster, wait until it answers, and list its replicas.

    ray up ray_cluster.yaml          # or ray start on each machine
    ray attach ray_cluster.yaml      # then, on the head node:
    python examples/cluster.py home=/data redis_url=redis://redis:6379/0 serving.replicas=4

It reads ``deploy/serve.yaml`` as ``serve deploy deploy/serve.yaml`` does; settings on the command line override the
file. Every node must see the same ``home``, which has the files of the key and the password, and Redis must run
already. The service continues when this program ends; ``serve shutdown`` stops it. With ``--address local`` everything
runs on this machine and stops at the end.
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


def deploy(address: str, options: list[str]) -> httpx2.Client:
    """Deploy the application of the file on a cluster, and return a client of it."""
    file = yaml.safe_load(FILE.read_text())
    (application,) = file["applications"]
    args = {**application["args"], **dict(setting.split("=", 1) for setting in options)}
    port = int(args.get("serving.port", file["http_options"]["port"]))
    ray.init(address=address)
    serve.start(proxy_location=file["proxy_location"], http_options={**file["http_options"], "port": port})
    serve.run(build(args), name=application["name"], route_prefix=application["route_prefix"])
    headers = {"Authorization": f"Bearer {Path(args['serving.api_key_file']).read_text().strip()}"}
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120)


def replicas(http: httpx2.Client, count: int) -> list[dict[str, Any]]:
    """Return the reports of all replicas, once ``count`` of them have reported.

    Raises:
        TimeoutError: they do not start in time.
    """
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        reports = http.get("/dashboard/data").raise_for_status().json()["replicas"]
        if len(reports) >= count:
            return reports
        time.sleep(0.5)
    raise TimeoutError(f"{count} replicas did not start within {_SECONDS:.0f} s")


def main() -> None:
    """Deploy the service, list its replicas and send a request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="auto", help="of the cluster; local starts one on this machine")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="override deploy/serve.yaml")
    options = parser.parse_args()
    with deploy(options.address, options.settings) as http:
        deployments = serve.status().applications["osd"].deployments
        count = max(sum(deployment.replica_states.values()) for deployment in deployments.values())
        for replica in replicas(http, count):
            print(f"replica {replica['name']} drafts with version {replica['version']}")
        body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        print(answer["choices"][0]["text"])
        url = str(http.base_url).rstrip("/")
    print(f"{url}/v1 on each of {len(ray.nodes())} nodes; the dashboard is at {url}/dashboard")
    if options.address == "local":
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
