"""Prompts, and their split into prompts to send and prompts held out for measurements."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

HELD_OUT = 0.1
"""Share of the built-in prompts that are used only for measurements, never for learning."""


class TrafficError(ValueError):
    """Error of an unusable prompt source, with a message of one line."""


@dataclass(frozen=True)
class Prompt:
    """Conversation to hold: the user's turns, after an optional system message."""

    id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None = None

    def opening(self) -> list[dict[str, str]]:
        """Return the messages before the first answer: the system's, if any, and the user's first turn."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.turns[0]}]


def draw(prompt: Prompt, purpose: str) -> float:
    """Return a number in [0, 1) that depends only on the prompt's text and the purpose."""
    text = "\0".join((purpose, prompt.system or "", *prompt.turns))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def split(prompts: Iterable[Prompt], held_out: float) -> tuple[list[Prompt], list[Prompt]]:
    """Divide prompts by their text into prompts to send and a share ``held_out`` that is never sent."""
    send: list[Prompt] = []
    hold: list[Prompt] = []
    for prompt in prompts:
        (hold if draw(prompt, "held out") < held_out else send).append(prompt)
    return send, hold


def shuffled(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return each distinct prompt once, in an order that separates neighbours of the source."""
    distinct = {(prompt.system, prompt.turns): prompt for prompt in prompts}
    return sorted(distinct.values(), key=lambda prompt: draw(prompt, "order"))
