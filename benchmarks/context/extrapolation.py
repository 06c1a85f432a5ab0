"""The target itself over selected tokens, beyond its trained length: perplexity, and a needle to find."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table as Grid
from transformers import PreTrainedTokenizerBase

from benchmarks.context.scaled import reaching
from benchmarks.report import columns
from osd.runtime.attention.selection import SelectionSizes
from osd.runtime.batch import following
from osd.runtime.model import SlotModel
from osd.target.model import load_model

CHUNK = 512
"""Tokens that are read together and share a choice; the perplexity behind a length is that of its last two of these."""

FULL, SCALED, SELECTED = "everything", "yarn", "selected"
WAYS = (FULL, SCALED, SELECTED)

_NEEDLE = "\n\nThe secret number of the archive is {number}. Remember it: {number} is the secret number.\n\n"
_QUESTION = "\n\nWhat is the secret number of the archive? The secret number of the archive is"
_NUMBERS = (48213, 90574, 31768)


@dataclass(frozen=True)
class Reading:
    """How one way of reading does behind ``length`` tokens: ``perplexity``, and needles ``found`` of ``hidden``."""

    way: str
    length: int
    perplexity: float | None = None
    found: int = 0
    hidden: int = 0


class Reader:
    """A target that reads texts in one of ``WAYS``."""

    def __init__(self, way: str, directory: Path, dtype: str, longest: int, sizes: SelectionSizes) -> None:
        """Load it with room for ``longest`` tokens."""
        with reaching(directory, longest if way == SCALED else 0) as source:
            model = load_model(source, dtype, "cpu")
        selection = replace(sizes, compact=True) if way == SELECTED else None
        self.model = SlotModel(model, slots=1, context=longest, scratch=1, selection=selection)

    def begin(self) -> None:
        """Start another text."""
        self.model.begin(0)

    def read(self, start: int, ids: Sequence[int], scored: bool) -> float:
        """Read a chunk behind ``start`` tokens: the sum of -log p of all its tokens but the first, where ``scored``."""
        wanted = torch.arange(len(ids) - 1 if scored else 1)
        logits = self.model.forward(following(0, start, ids), wanted).logits
        if not scored:
            return 0.0
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))

    def most_probable(self, start: int, ids: Sequence[int]) -> list[int]:
        """The most probable token after each of ``ids``, read one by one."""
        best: list[int] = []
        for place, token in enumerate(ids, start):
            logits = self.model.forward(following(0, place, [token]), torch.zeros(1, dtype=torch.int64)).logits
            best.append(int(logits[0].argmax()))
        return best


@torch.inference_mode()
def perplexities(
    reader: Reader, way: str, text: Sequence[int], lengths: Sequence[int], report: Callable[[str], None]
) -> Iterator[Reading]:
    """Read a text once and yield at each of the ascending ``lengths``, multiples of ``CHUNK``."""
    recent: list[float] = []
    reader.begin()
    for start in range(0, max(lengths), CHUNK):
        end = start + CHUNK
        scored = any(end in (length, length - CHUNK) for length in lengths)
        recent.append(reader.read(start, text[start:end], scored))
        if end in lengths:
            report(f"{way}: {end} tokens")
            yield Reading(way, end, perplexity=math.exp(sum(recent[-2:]) / (2 * (CHUNK - 1))))


@torch.inference_mode()
def needles(
    reader: Reader,
    way: str,
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[int],
    lengths: Sequence[int],
    report: Callable[[str], None],
) -> Iterator[Reading]:
    """Hide a number at three depths of texts of each length, and see whether the answer begins with it."""
    question = _ids(tokenizer, _QUESTION)
    for length in lengths:
        found = 0
        for number, depth in zip(_NUMBERS, (0.1, 0.5, 0.9), strict=True):
            needle, answer = _ids(tokenizer, _NEEDLE.format(number=number)), _ids(tokenizer, f" {number}")
            room = length - len(needle) - len(question) - len(answer)
            at = int(room * depth)
            ids = [*text[:at], *needle, *text[at:room], *question]
            reader.begin()
            for start in range(0, len(ids) - 1, CHUNK):
                reader.read(start, ids[start : min(start + CHUNK, len(ids) - 1)], scored=False)
            found += reader.most_probable(len(ids) - 1, [ids[-1], *answer[:-1]]) == answer
        report(f"{way}: {found} of {len(_NUMBERS)} needles in {length} tokens")
        yield Reading(way, length, found=found, hidden=len(_NUMBERS))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def table(found: Sequence[Reading]) -> Grid:
    """A row for each length, and for each way perplexity and needles."""
    ways = [way for way in WAYS if any(one.way == way for one in found)]
    grid = columns("tokens", *(f"{way}: {what}" for way in ways for what in ("perplexity", "needles")))
    for length in sorted({one.length for one in found}):
        cells: list[str] = []
        for way in ways:
            mine = [one for one in found if one.way == way and one.length == length]
            read, sought = (
                next((one for one in mine if one.perplexity is not None), None),
                next((one for one in mine if one.hidden), None),
            )
            cells.append("" if read is None else f"{read.perplexity:.2f}")
            cells.append("" if sought is None else f"{sought.found} of {sought.hidden}")
        grid.add_row(str(length), *cells)
    return grid
