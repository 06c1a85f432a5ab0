"""Clients of a running service, each in its own thread, which record the answer and how it ends."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until

LONG = 900
"""Number of tokens that takes seconds to decode."""

_SECONDS = 120
_MOMENT_SECONDS = 0.1


class ClientThread(threading.Thread):
    """Client thread that requests one completion; ``join`` waits for the end."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url, self._headers = f"{url}/v1/completions", headers
        self._body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, **fields}
        self.streams = bool(fields.get("stream"))
        self.started = threading.Event()
        """Set at the first event of a stream."""
        self.status, self.headers, self.body = 0, httpx2.Headers(), b""
        self.broken = ""
        """Error of a connection that broke before the end of the answer."""
        self.started_at, self.ended_at = time.monotonic(), 0.0
        self.start()

    def run(self) -> None:
        try:
            with httpx2.stream("POST", self._url, json=self._body, headers=self._headers, timeout=_SECONDS) as response:
                self.status, self.headers = response.status_code, response.headers
                for chunk in response.iter_raw():
                    self.body += chunk
                    self.started.set()
        except httpx2.HTTPError as error:
            self.broken = repr(error)
        finally:
            self.started.set()
            self.ended_at = time.monotonic()

    def events(self) -> list[dict[str, Any]]:
        """Return the events of a complete stream, without the final ``[DONE]``."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, end, rest = self.body.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def error(self) -> dict[str, Any] | None:
        """Return the error object of a failed answer, in OpenAI's format; None for a complete answer."""
        self.join(_SECONDS)
        assert not self.is_alive()
        assert not self.broken, self.broken
        if self.status == 200 and self.streams:
            *events, last = self.events()
            assert not any("error" in event for event in events)
        else:
            last = json.loads(self.body)
        if (error := last.get("error")) is not None:
            assert self.status != 200 or self.streams
            assert set(error) == {"message", "type", "param", "code"}
            return error
        assert self.status == 200
        assert all(choice["finish_reason"] == "length" for choice in last["choices"])
        return None


@dataclass
class Service:
    """Service at a port of this machine, or of another host."""

    port: int
    headers: dict[str, str] = field(default_factory=dict, kw_only=True)
    host: str = field(default="127.0.0.1", kw_only=True)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def in_flight(self, streams: int, answers: int, **fields: Any) -> list[ClientThread]:
        """Start long completions one after the other, so that each replica gets its share."""
        clients = []
        for stream in [True] * streams + [False] * answers:
            clients.append(ClientThread(self.url, self.headers, max_tokens=LONG, stream=stream, **fields))
            clients[-1].started.wait(60 if stream else _MOMENT_SECONDS)
        assert all(client.started.is_set() for client in clients[:streams])
        # The arrival of a request without a stream shows only in the load of the replicas.
        wait_until(lambda: sum(self.loads().values()) >= len(clients), what=f"the arrival of {len(clients)} requests")
        return clients

    def complete(self, **fields: Any) -> httpx2.Response:
        """Request a completion of two tokens."""
        body = {"prompt": "hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}
        return httpx2.post(f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=60)

    def loads(self) -> dict[str, int]:
        """Return the running and waiting sequences of each replica that reports."""
        data = httpx2.get(f"{self.url}/dashboard/data", headers=self.headers, timeout=30).raise_for_status().json()
        replicas = data["replicas"]
        return {replica["name"]: replica["running"] + replica["waiting"] for replica in replicas}

    def versions(self) -> dict[str, int]:
        """Return the drafter version of each replica that reports."""
        data = httpx2.get(f"{self.url}/dashboard/data", headers=self.headers, timeout=30).raise_for_status().json()
        replicas = data["replicas"]
        return {replica["name"]: replica["version"] for replica in replicas}

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = httpx2.get(f"{self.url}/metrics", headers=self.headers, timeout=30).raise_for_status().text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def describe_errors(clients: list[ClientThread]) -> str:
    """Return in words how many answers failed, and how."""
    streams = [client for client in clients if client.streams]
    answers = [client for client in clients if not client.streams]
    cut = sum(client.status == 200 and client.error() is not None for client in streams)
    refused = sum(client.status != 200 for client in streams)
    failed = sum(client.error() is not None for client in answers)
    parts = [f"{cut} of {len(streams)} streams: an error event"] * bool(cut)
    parts += [f"{refused} of {len(streams)} streams: 503"] * bool(refused)
    parts += [f"{failed} of {len(answers)} other answers: 503"] * bool(failed)
    return ", ".join(parts) or "none"
