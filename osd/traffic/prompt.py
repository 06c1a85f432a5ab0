"""A prompt, and the split that keeps some of them back for measuring."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

HELD_OUT = 0.1
"""Share of the built-in prompts that are only measured on: whatever learns from the others has never seen them."""


class TrafficError(ValueError):
    """A prompt source cannot be used; the message is one line that says why."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to hold: the user's turns, after an optional system message."""

    id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None = None

    def opening(self) -> list[dict[str, str]]:
        """The messages before the first answer: the system's, if any, and the user's first turn."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.turns[0]}]


def draw(prompt: Prompt, purpose: str) -> float:
    """A number in [0, 1) that depends on what the prompt says and on nothing else."""
    text = "\0".join((purpose, prompt.system or "", *prompt.turns))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def split(prompts: Iterable[Prompt], held_out: float) -> tuple[list[Prompt], list[Prompt]]:
    """Divide prompts into those to send and a share ``held_out`` never to be sent, by what they say."""
    send: list[Prompt] = []
    hold: list[Prompt] = []
    for prompt in prompts:
        (hold if draw(prompt, "held out") < held_out else send).append(prompt)
    return send, hold


def shuffled(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Mix prompts so that neighbours in the source are not neighbours in time; each text is kept once."""
    distinct = {(prompt.system, prompt.turns): prompt for prompt in prompts}
    return sorted(distinct.values(), key=lambda prompt: draw(prompt, "order"))
