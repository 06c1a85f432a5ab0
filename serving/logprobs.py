"""Log-probabilities in OpenAI's two shapes, that of chat and that of text completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from osd.engine.request import TokenLogprobs

Texts = Callable[[list[int]], Awaitable[list[str]]]
"""The text of each of some token ids."""

_LEAST = -9999.0  # JSON has no infinity
_UNFINISHED = "\ufffd"  # a token that is a part of a character


@dataclass
class Logprobs:
    """Renders what the engine reports; ``render`` is called for the tokens of each choice in their order.

    All are log-probabilities of the model itself, before temperature, penalties and the other sampling settings, as
    OpenAI and vLLM have it. ``bytes`` is null for a token that is no whole character.
    """

    chat: bool
    texts: Texts
    _offsets: dict[int, int] = field(default_factory=dict)

    async def render(self, choice: int, places: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The ``logprobs`` of a choice or of its part of one event; None where nothing was asked for or is new."""
        if not places:
            return None
        ids = sorted({token for place in places for token in (place.token, *(token for token, _ in place.top))})
        text = dict(zip(ids, await self.texts(ids), strict=True))
        return self._of_chat(places, text) if self.chat else self._of_completion(choice, places, text)

    def _of_chat(self, places: Sequence[TokenLogprobs], text: dict[int, str]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            written = text[token]
            encoded = None if _UNFINISHED in written else list(written.encode())
            return {"token": written, "logprob": max(logprob, _LEAST), "bytes": encoded}

        content = [
            {**entry(place.token, place.logprob), "top_logprobs": [entry(*pair) for pair in place.top]}
            for place in places
        ]
        return {"content": content, "refusal": None}

    def _of_completion(self, choice: int, places: Sequence[TokenLogprobs], text: dict[int, str]) -> dict[str, Any]:
        offsets, best, end = [], [], self._offsets.get(choice, 0)
        for place in places:
            offsets.append(end)
            end += len(text[place.token])
            top: dict[str, float] = {}
            # Different tokens may have the same text: the more probable one stands for it, the chosen one above all.
            for token, logprob in ((place.token, place.logprob), *place.top):
                top.setdefault(text[token], max(logprob, _LEAST))
            best.append(top)
        self._offsets[choice] = end
        return {
            "tokens": [text[place.token] for place in places],
            "token_logprobs": [max(place.logprob, _LEAST) for place in places],
            "top_logprobs": best,
            "text_offset": offsets,
        }
