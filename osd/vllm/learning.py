"""Learning tokens of which nothing is known but that the target said them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osd.recall.memory import Heard, Memory, Text


def learn(memory: Memory, text: Text, tokens: Sequence[int], now: int, drafted: bool) -> None:
    """Learn ``tokens`` after ``text``, each as all that the target said there, and append them.

    Where drafts were or could have been made after this text (``drafted``), it is counted how right they would be, at
    any temperature as often as what is most probable came.
    """
    count = len(tokens)
    ids, logp = torch.tensor(tokens).unsqueeze(1), torch.zeros(count, 1)
    following = tokens if drafted else [-1] * count
    memory.learn(text, Heard(tokens[:-1], range(-1, count - 2), ids, logp, following), 0.0, 0, now)
    text.append(tokens, certain=False)
