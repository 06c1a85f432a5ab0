"""Texts cut off at random points: what stands before the point is a prompt, and what stands behind it a reference."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from osd.hashing import unit_hash
from osd.traffic.prompt import Prompt

_LEAST, _MOST = 24, 96  # tokens before the point
_LINES = 24  # of a source file, from which one prompt is cut


@dataclass(frozen=True)
class Text:
    """A text, and the name of what it is a part of: parts of the same are all learnt from, or none."""

    name: str
    text: str


@dataclass(frozen=True)
class Prefix:
    """Tokens ``ids``, and those that follow in the text, ``reference``."""

    ids: tuple[int, ...]
    reference: tuple[int, ...]


def asked(prompts: Iterable[Prompt]) -> list[Text]:
    """What users wrote, each prompt by itself."""
    return [Text(prompt.id, "\n".join(prompt.turns)) for prompt in prompts]


def library() -> list[Text]:
    """Parts of the source files of this Python's standard library."""
    found: list[Text] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        found += (Text(file.stem, "\n".join(lines[at : at + _LINES])) for at in range(0, len(lines), _LINES))
    return found


def parted(texts: Sequence[Text], share: float) -> tuple[list[Text], list[Text]]:
    """The texts to learn from, and about a ``share`` of them that nothing is learnt from."""
    unseen = [unit_hash(text.name.encode()) < share for text in texts]
    return tuple([text for text, new in zip(texts, unseen, strict=True) if new is wanted] for wanted in (False, True))  # type: ignore[return-value] # two lists


def prefixes(
    sources: Sequence[Sequence[Text]], tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int, cuts: int = 1
) -> Iterator[Prefix]:
    """Prefixes of ``sources`` in turn, without end, each followed by so many ``tokens``.

    Each text is cut off at up to ``cuts`` points, so that what comes before is read once for all of them. Of one that
    comes again others are drawn. Texts that are too short are left out; a source of which all are gives none.
    """
    chance = random.Random(seed)  # noqa: S311  nothing is secret
    every = [_cut(source, tokenizer, tokens, chance, cuts) for source in sources]
    while every:
        for source in list(every):
            found = next(source, None)
            if found is None:
                every.remove(source)
            else:
                yield from found


def _cut(
    source: Sequence[Text], tokenizer: PreTrainedTokenizerBase, tokens: int, chance: random.Random, cuts: int
) -> Iterator[list[Prefix]]:
    texts, some = chance.sample(list(source), len(source)), True
    while some:
        some = False
        for text in texts:
            ids = tokenizer.encode(text.text, add_special_tokens=False)
            if len(ids) >= _LEAST + tokens:
                some = True
                points = range(_LEAST, min(len(ids) - tokens, _MOST) + 1)
                ends = sorted(chance.sample(points, min(cuts, len(points))))
                yield [Prefix(tuple(ids[:at]), tuple(ids[at : at + tokens])) for at in ends]
