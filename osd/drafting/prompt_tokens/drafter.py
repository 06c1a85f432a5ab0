"""Prompt tokens: embeddings that the target reads behind its text, and answers with the tokens after next.

Chen et al., "Hardware-aware parallel prompt decoding for memory-efficient acceleration of LLM inference", Findings of
EMNLP 2025 (arXiv 2405.18628). After the last token of a text the target says what comes next; at the i-th prompt token
behind it, it says what comes i places later. Prompt tokens ride behind every node of a draft while that is verified, so
that the next draft costs no forward at all. A prompt token may have several embeddings: each sees its own kind alone,
and their logits are averaged.

Only these embeddings are trained, by gradients through the frozen target. A new one is drawn like a word: normally
distributed, with mean and deviation of the target's embeddings in each dimension. Verification is lossless, as for any
other drafter, where the paper has typical acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn

from osd.drafting.base import DrafterError, Needs
from osd.drafting.prompt_tokens.cuts import PACE, like_words, loss_behind, read_behind
from osd.drafting.prompt_tokens.session import PromptTokensSession, states_of, width_of
from osd.drafting.session import Runtime
from osd.drafting.shapes import MOST_OF_A_CALL, check_sizes
from osd.drafting.trainable import Batch, FrozenTarget, Loss, Objective, Trainable
from osd.runtime.causal_lm import check_table, decoder_layers, decoder_of, ends_of
from osd.target.model import load_model, load_part
from osd.verification.tree import repeats

LoadTarget = Callable[[], nn.Module]
"""Reads the target in the dtype that it has: so is it served, and gradients of a few embeddings need no more."""


class PromptTokens(Trainable):
    """``prompts`` [tokens, copies, hidden]; the target is read where gradients are first asked for."""

    kind: ClassVar[str] = "prompt_tokens"
    steps: Tensor

    def __init__(self, target: nn.Module, tokens: int, copies: int, rows: int, load_target: LoadTarget) -> None:
        """Make new prompt tokens for ``target``, a causal language model of transformers in any dtype.

        Args:
            target: whose embedding they stand beside.
            tokens: that it looks ahead.
            copies: embeddings of each.
            rows: of a sequence in a forward of the target, for prompt tokens, at most.
            load_target: called where it has to be trained or evaluated.

        Raises:
            DrafterError: the numbers are impossible, or the target's forward cannot carry such rows.
        """
        super().__init__()
        check_sizes(MOST_OF_A_CALL, tokens=tokens, copies=copies)
        check_sizes(rows=rows)
        if rows < tokens * copies:
            raise DrafterError(
                f"{tokens} prompt tokens of {copies} embeddings need as many rows at least, and have {rows}"
            )
        try:
            check_table(target)
        except ValueError as error:
            raise DrafterError(f"no prompt token can stand beside the target's words: {error}") from None
        words = ends_of(target)[0].weight.detach().float()
        self._layers, self._vocabulary, self._rows = len(decoder_layers(target)), len(words), rows
        self.prompts = nn.Parameter(like_words(words, tokens, copies))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # micro-steps, which key the cuts
        self._target = FrozenTarget(load_target)

    @classmethod
    def initial(cls, settings: Any, target_dir: Path, home: Path) -> Self:
        """See ``Kind.initial``."""
        load = partial(load_model, target_dir, "auto", "cpu")
        words = load_part(target_dir)
        return cls(words, settings.tokens, settings.copies, settings.rows, load)

    @classmethod
    def from_target(cls, target: nn.Module, tokens: int, copies: int = 1, rows: int = 32) -> Self:
        """The drafter that ``target``, a causal language model of transformers, starts with."""
        return cls(target, tokens, copies, rows, lambda: target)

    @classmethod
    def from_config(cls, config: dict[str, Any], target_dir: Path) -> Self:
        """See ``Kind.from_config``."""
        load = partial(load_model, target_dir, "auto", "cpu")
        drafter = cls(load_part(target_dir), config["tokens"], config["copies"], config["rows"], load)
        drafter.check_config(config)
        return drafter

    @property
    def needs(self) -> Needs:
        tokens, copies, _ = self.prompts.shape
        return Needs(riders=self._rows, embeddings=tokens * copies)

    def fields(self) -> dict[str, Any]:
        tokens, copies, hidden = self.prompts.shape
        return {
            "tokens": tokens,
            "copies": copies,
            "rows": self._rows,
            "hidden": hidden,
            "layers": self._layers,
            "target_vocabulary": self._vocabulary,
        }

    @property
    def levels(self) -> int:
        """See ``Trainable.levels``: one for each prompt token."""
        return len(self.prompts)

    @property
    def state_width(self) -> int:
        return width_of(self._vocabulary)

    def pace(self, name: str) -> float:
        return PACE

    def loss(self, batch: Batch, objective: Objective) -> Loss:
        """See ``Trainable.loss``; micro-steps are keyed by ``steps``."""
        step, answers = int(self.steps), partial(self._answers, batch, levels=self.levels)
        self.steps += 1
        return loss_behind(batch, objective, step, self.levels, answers)

    def unroll(self, batch: Batch, depth: int, drafted: Tensor | None = None) -> list[Tensor]:
        """See ``Trainable.unroll``; prompt tokens read no drafted token."""
        length, levels = batch.token_ids.shape[1], min(depth, self.levels)
        cuts = torch.stack([(batch.place - 2 - level).clamp(min=0) for level in range(levels)])  # [levels, N]
        every, which = torch.unique(batch.sequence * length + cuts, return_inverse=True)
        logits = self._answers(batch, every // length, every % length, levels)
        return [logits[mine, level] for level, mine in enumerate(which)]

    def drafted_states(self, batch: Batch, fed: Tensor, depth: int) -> list[Tensor]:
        """See ``Trainable.drafted_states``: of what was said where the token was drawn."""
        return [states_of(logits, fed) for logits in self.unroll(batch, depth)]

    def _answers(self, batch: Batch, text: Tensor, cut: Tensor, levels: int) -> Tensor:
        """What the target says at the first ``levels`` prompt tokens behind places ``cut`` [C] of rows ``text`` [C].

        All of them in one forward, in which none sees another's.

        Returns:
            Logits [C, levels, vocabulary].
        """
        rows, count = repeats(text), len(batch.token_ids)
        width = int(rows.max()) + 1
        ids = batch.token_ids[:, : int(cut.max()) + 1]
        cuts = cut.new_zeros(count, width).index_put((text, rows), cut)
        copies = self.prompts.shape[1]
        seen = torch.arange(ids.shape[1], device=ids.device) <= cuts[..., None]
        target = self._target.on(ids.device)
        cache = transformers.DynamicCache()
        with torch.no_grad():
            decoder_of(target)(input_ids=ids, past_key_values=cache, use_cache=True)
        output = read_behind(target, self.prompts[:levels].to(target.dtype), seen, cuts + 1, cache)
        said = output.logits.float().unflatten(1, (width, copies, levels)).mean(2)  # [B, W, levels, vocabulary]
        return said[text, rows]

    def session(self, runtime: Runtime) -> PromptTokensSession:
        return PromptTokensSession(self.weights(), self._rows, runtime)
