"""Copies of what passes through a tap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2


@dataclass
class Copy:
    """A request and its answer on their way, up to ``limit`` bytes of each."""

    chat: bool
    limit: int
    asked: bytearray = field(default_factory=bytearray)
    answered: bytearray = field(default_factory=bytearray)
    status: int = 0
    request_encoding: str = ""
    headers: httpx2.Headers = field(default_factory=httpx2.Headers)
    whole: bool = False
    too_large: bool = False

    def request(self, part: bytes) -> None:
        """Take in a part of the request's body."""
        self._add(self.asked, part)

    def begin(self, asked: Sequence[tuple[bytes, bytes]], status: int, headers: httpx2.Headers) -> None:
        """Take in the head of the answer, and of the request what says how its body is written."""
        self.request_encoding = next((v.decode("latin-1") for name, v in asked if name == b"content-encoding"), "")
        self.status, self.headers = status, headers

    def answer(self, part: bytes) -> None:
        """Take in a part of the answer's body."""
        self._add(self.answered, part)

    def _add(self, to: bytearray, part: bytes) -> None:
        if len(to) + len(part) > self.limit:
            self.too_large = True
            to.clear()
        if not self.too_large:
            to += part
