"""Who each token of an answer comes from, as responses say it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Texts = Callable[[list[int]], Awaitable[list[str]]]
"""The text of each of some token ids."""


@dataclass(frozen=True)
class TokenSources:
    """Renders what the engine credits; a token that is a part of a character is U+FFFD, as in ``logprobs``."""

    texts: Texts

    async def render(self, tokens: Sequence[tuple[int, str]]) -> list[dict[str, str]]:
        """An entry for each of ``tokens``, pairs of id and source."""
        ids = sorted({token for token, _ in tokens})
        text = dict(zip(ids, await self.texts(ids), strict=True)) if ids else {}
        return [{"token": text[token], "source": source} for token, source in tokens]
