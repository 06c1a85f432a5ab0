"""Translation of the target's tokens into tokens of a draft model with a different tokenizer.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
ICML 2025 (arXiv 2502.05202), token-level intersection: only tokens of both vocabularies are drafted. q is the draft
model's distribution renormalised on them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from osd.drafting.alternative_tokens import AlignedTokens
from osd.drafting.base import DrafterError
from osd.drafting.shapes import check_sizes
from osd.runtime.causal_lm import text_config
from osd.runtime.device import copy_all
from osd.runtime.model import eos_ids
from osd.target.files import TargetError
from osd.target.load import load_tokenizer
from osd.target.vocabulary import LEAST_SHARE, Vocabulary, VocabularyError
from osd.verification.tree import repeats

TRANSLATION = "translation."
"""Prefix of its tensors in a version."""


class Translation(nn.Module):
    """Spelling of each target token in tokens of a draft model; a version stores it, and it is not trained.

    A shared token is one token in both vocabularies. The draft tokenizer spells the other tokens.

    Attributes:
        target_ids: [S] int64 target ids of the shared tokens, ascending; the draft vocabulary.
        pieces: [P] int64 draft ids of all target ids, in the order of the target ids.
        ends: [target vocabulary] int64 end of the pieces of each target id; each has one piece or more.
    """

    target_ids: Tensor
    pieces: Tensor
    ends: Tensor

    def __init__(self, shared: int, pieces: int, vocabulary: int) -> None:
        """Make room for ``shared`` tokens and ``pieces`` of a target ``vocabulary``, for ``load_state_dict``."""
        super().__init__()
        check_sizes(pieces=pieces, shared=shared)
        if not 1 <= shared <= vocabulary <= pieces:
            raise DrafterError(
                f"a target with {vocabulary} tokens cannot have {shared} shared tokens and {pieces} pieces"
            )
        for name, size in (("target_ids", shared), ("pieces", pieces), ("ends", vocabulary)):
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64))

    @classmethod
    def of(cls, spelled: list[list[int]], shared: Collection[int]) -> Self:
        """Make a translation from the draft ids that spell each target id, and the shared target ids."""
        made = cls(len(shared), sum(map(len, spelled)), len(spelled))
        made.target_ids.copy_(torch.tensor(sorted(shared)))
        made.pieces.copy_(torch.tensor([piece for pieces in spelled for piece in pieces]))
        made.ends.copy_(torch.tensor([len(pieces) for pieces in spelled]).cumsum(0))
        return made

    def config(self) -> dict[str, int]:
        """Return the sizes for ``config.json``."""
        return {"shared": len(self.target_ids), "pieces": len(self.pieces)}

    @property
    def columns(self) -> Tensor:
        """[S] draft id of each shared token."""
        return self.pieces[self.ends[self.target_ids] - 1]

    def read(self, token_ids: Tensor, lengths: Tensor) -> AlignedTokens:
        """Return the target's ``token_ids`` [B, L] of ``lengths`` [B] in tokens of the draft model."""
        counts = self.ends.diff(prepend=self.ends.new_zeros(1))[token_ids]  # [B, L]
        real = torch.arange(token_ids.shape[1], device=token_ids.device) < lengths[:, None]
        ends = torch.where(real, counts, 0).cumsum(1)
        row, place = real.nonzero(as_tuple=True)
        of = torch.arange(len(row), device=row.device).repeat_interleave(counts[row, place])
        piece = (self.ends[token_ids] - counts)[row, place][of] + repeats(of)
        row = row[of]
        translated = token_ids.new_zeros(len(token_ids), int(ends.max()))
        translated[row, repeats(row)] = self.pieces[piece]
        return AlignedTokens(translated, ends[:, -1], ends)


class Reader:
    """Translation laid out for drafting, on the host for text and on the device for drawn tokens.

    Attributes:
        support: [S] target ids that may be drafted, at a constant address.
        columns: [S] their draft ids.
        own_ids: [target vocabulary] draft id of each shared token, arbitrary for other tokens.
        host_ids: the same on the host.
    """

    host_ids: np.ndarray

    def __init__(self, translation: Translation, device: torch.device) -> None:
        tensors = dict(translation.named_buffers())
        self.support, self.columns, self.own_ids = (part.to(device, copy=True) for part in _laid_out(tensors))
        self._read(tensors)

    def translate(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft ids that spell ``tokens`` of the target."""
        parts = [self._pieces[self._starts[token] : self._ends[token]] for token in tokens]
        return np.concatenate(parts).tolist() if parts else []

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Replace the translation by another translation with the same sizes."""
        copy_all([self.support, self.columns, self.own_ids], _laid_out(tensors))
        self._read(tensors)

    def _read(self, tensors: dict[str, Tensor]) -> None:
        self._pieces, self._ends = (tensors[name].cpu().numpy().copy() for name in ("pieces", "ends"))
        self._starts = np.concatenate([[0], self._ends[:-1]])
        self.host_ids = self._pieces[self._ends - 1]


def _laid_out(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    own_ids = tensors["pieces"][tensors["ends"] - 1]
    return tensors["target_ids"], own_ids[tensors["target_ids"]], own_ids


def check_translation(tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Raise DrafterError unless ``tensors`` of valid shapes translate into a draft ``vocabulary``."""
    target_ids, pieces, ends = (tensors[name] for name in ("target_ids", "pieces", "ends"))
    counts = ends.diff(prepend=ends.new_zeros(1))
    if int(counts.min()) < 1 or int(ends[-1]) != len(pieces):
        raise DrafterError("tensor 'translation.ends' does not divide the pieces among the target's tokens")
    if int(pieces.min()) < 0 or int(pieces.max()) >= vocabulary:
        raise DrafterError(f"tensor 'translation.pieces' has an id outside the draft vocabulary of {vocabulary}")
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= len(ends) or bool((target_ids.diff() <= 0).any()):
        raise DrafterError(f"tensor 'translation.target_ids' must ascend within 0 to {len(ends) - 1}")
    columns = pieces[ends[target_ids] - 1]
    if bool((counts[target_ids] != 1).any()) or len(columns.unique()) < len(columns):
        raise DrafterError("tensor 'translation.target_ids' has a token without a draft token of its own")


def translation_of(model: nn.Module, directory: Path, target: nn.Module, target_dir: Path) -> Translation | None:
    """Return the translation for ``model`` in ``directory``; None if its tokenizer equals the target's.

    Raises:
        DrafterError: a tokenizer cannot be read, or the tokenizers share too few tokens.
    """
    sizes = text_config(target).vocab_size, text_config(model).vocab_size
    try:
        draft = Vocabulary.read(directory, "drafter.source", str(directory))
        if sizes[0] == sizes[1] and _words(directory) == _words(target_dir):
            return None
        of_target = Vocabulary.read(target_dir, "target.source", str(target_dir))
    except (VocabularyError, TargetError) as error:
        raise DrafterError(f"the tokens of drafter.source cannot be translated: {error}") from None
    return intersection(of_target, draft, sizes, (eos_ids(target), eos_ids(model)))


def intersection(
    target: Vocabulary, draft: Vocabulary, sizes: tuple[int, int], ends: tuple[Collection[int], Collection[int]]
) -> Translation:
    """Return the translation between the vocabularies of the target and the draft model.

    Tokens are shared if they stand for the same bytes. Special tokens are shared if they have the same text and both or
    neither end a text.

    ``sizes`` are the numbers of ids of the two models; their tokenizers may have more. ``ends`` are the ids of the two
    models that end a text.

    Raises:
        DrafterError: they share less than ``LEAST_SHARE`` of the smaller vocabulary.
    """
    draft_ids, target_ids = _by_meaning(draft, sizes[1]), _by_meaning(target, sizes[0])
    pairs = [(id, draft_ids[meaning]) for meaning, id in target_ids.items() if meaning in draft_ids]
    shared = [id for id, draft_id in pairs if (id in ends[0]) == (draft_id in ends[1])]
    least = max(1, math.ceil(LEAST_SHARE * min(len(draft_ids), len(target_ids))))
    if len(shared) < least:
        raise DrafterError(
            f"drafter.source shares {len(shared)} of its {len(draft_ids)} tokens with the target, but must share at "
            f"least {least}: only shared tokens can be drafted"
        )
    # Bytes that the draft tokenizer cannot spell become its unknown token, or its first special token.
    known = [*([] if draft.unknown is None else [draft.unknown]), *sorted(draft.special), 0]
    unknown = next(id for id in known if id < sizes[1])
    spelled = [[unknown] for _ in range(sizes[0])]
    for id, (data, _) in target.tokens.items():
        if id < sizes[0]:
            meaning = data, id in target.special
            pieces = [draft_ids[meaning]] if meaning in draft_ids else draft.spell(data)
            spelled[id] = [piece for piece in pieces if piece < sizes[1]] or [unknown]
    return Translation.of(spelled, shared)


def _by_meaning(vocabulary: Vocabulary, size: int) -> dict[tuple[bytes, bool], int]:
    """Return the id of each meaning: bytes, and whether the token is special.

    Like SentencePiece, prefer a character's own token to the token of its byte.
    """
    ids: dict[tuple[bytes, bool], int] = {}
    for id in sorted(vocabulary.tokens, key=lambda id: (id in vocabulary.byte_ids, id)):
        data = vocabulary.tokens[id][0]
        if id < size and data:
            ids.setdefault((data, id in vocabulary.special), id)
    return ids


def _words(directory: Path) -> dict[str, Any]:
    return load_tokenizer(directory).get_vocab()
