"""Texts cut at random points into a prompt and a reference completion."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from osd.hashing import unit_hash
from osd.traffic.prompt import Prompt

_LEAST, _MOST = 24, 96  # tokens of a prefix
_LINES = 24  # lines of a source file per text


@dataclass(frozen=True)
class SourceText:
    """Text with the name of its source; all texts of a source are used for training, or none."""

    name: str
    text: str


@dataclass(frozen=True)
class Prefix:
    """Token ids ``ids`` of a prefix, and the following tokens ``reference``."""

    ids: tuple[int, ...]
    reference: tuple[int, ...]


def prompt_texts(prompts: Iterable[Prompt]) -> list[SourceText]:
    """Return the user's text of each prompt."""
    return [SourceText(prompt.id, "\n".join(prompt.turns)) for prompt in prompts]


def library_texts() -> list[SourceText]:
    """Return parts of the source files of Python's standard library."""
    texts: list[SourceText] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        texts += (
            SourceText(file.stem, "\n".join(lines[first : first + _LINES])) for first in range(0, len(lines), _LINES)
        )
    return texts


def split_texts(texts: Sequence[SourceText], share: float) -> tuple[list[SourceText], list[SourceText]]:
    """Return the texts for training and about a ``share`` of unseen texts."""
    parts: tuple[list[SourceText], list[SourceText]] = [], []
    for text in texts:
        parts[unit_hash(text.name.encode()) < share].append(text)
    return parts


def prefixes(
    sources: Sequence[Sequence[SourceText]], tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, cuts: int = 1
) -> Iterator[Prefix]:
    """Yield prefixes of ``sources`` in turn without end, each followed by ``tokens`` tokens.

    Each text is cut at up to ``cuts`` points, so that their common prefix is read once. A repeated text is cut at new
    points. Texts that are too short are skipped; a source without a usable text yields nothing.
    """
    generator = random.Random(seed)  # noqa: S311  nothing is secret
    iterators = [_cut(source, tokenizer, tokens, generator, cuts) for source in sources]
    while iterators:
        for source in list(iterators):
            batch = next(source, None)
            if batch is None:
                iterators.remove(source)
            else:
                yield from batch


def _cut(
    source: Sequence[SourceText], tokenizer: PreTrainedTokenizerBase, tokens: int, generator: random.Random, cuts: int
) -> Iterator[list[Prefix]]:
    texts, has_text = generator.sample(list(source), len(source)), True
    while has_text:
        has_text = False
        for text in texts:
            ids = tokenizer.encode(text.text, add_special_tokens=False)
            if len(ids) >= _LEAST + tokens:
                has_text = True
                points = range(_LEAST, min(len(ids) - tokens, _MOST) + 1)
                ends = sorted(generator.sample(points, min(cuts, len(points))))
                yield [Prefix(tuple(ids[:at]), tuple(ids[at : at + tokens])) for at in ends]
