"""Clients of a running service, each on a thread of its own, that note what they are told however it ends."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx2

_SECONDS = 120


class Asking(threading.Thread):
    """One completion, from now on until ``join``."""

    def __init__(self, url: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, **fields}
        self.streams = bool(fields.get("stream"))
        self.begun = threading.Event()
        """Set with the first event of a stream."""
        self.status, self.headers, self.body = 0, httpx2.Headers(), b""
        self.broken = ""
        """The error of a connection that ended before the answer did."""
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            with httpx2.stream("POST", self._url, json=self._body, timeout=_SECONDS) as response:
                self.status, self.headers = response.status_code, response.headers
                for chunk in response.iter_raw():
                    self.body += chunk
                    self.begun.set()
        except httpx2.HTTPError as error:
            self.broken = repr(error)
        finally:
            self.begun.set()
            self.ended_at = time.monotonic()

    def events(self) -> list[dict[str, Any]]:
        """Of a stream that ended as one does: all but the last one."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def error(self) -> dict[str, Any] | None:
        """What an answer that failed says in OpenAI's shape; None for one that is whole."""
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


def told(clients: list[Asking]) -> str:
    """In words how many of some answers failed, and how."""
    streams = [client for client in clients if client.streams]
    others = [client for client in clients if not client.streams]
    cut = sum(client.status == 200 and client.error() is not None for client in streams)
    refused = sum(client.status != 200 for client in streams)
    failed = sum(client.error() is not None for client in others)
    parts = [f"{cut} of {len(streams)} streams: an error event"] * bool(cut)
    parts += [f"{refused} of {len(streams)} streams: 503"] * bool(refused)
    parts += [f"{failed} of {len(others)} other answers: 503"] * bool(failed)
    return ", ".join(parts) or "none"
