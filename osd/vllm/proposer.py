"""The proposer: what vLLM decodes is remembered, and what followed the same tokens before is drafted."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osd.recall.backends import ENTRY_BYTES, backend
from osd.recall.memory import ORDERS, Sought
from osd.runtime.native import quick_kernels
from osd.vllm.readers import LEAST_ROOM, Readers, least_bytes
from osd.vllm.settings import MEGABYTES, REDIS_URL, SettingsError, VllmSettings

log = logging.getLogger(__name__)

_FAINT = 0.02
"""The chance below which nothing is drafted."""
_LONGEST = LEAST_ROOM // 4


class RecallProposer:
    """Drafts the tokens of ``num_speculative_tokens`` that most probably follow, as vLLM 0.32 asks a custom class.

    vLLM says which tokens it sampled, not how probable they were, so that each counts as all that the target says after
    the tokens before it. The table is one for all requests, the text of each is its own.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read what is needed of vLLM's configuration, and the settings from the environment.

        Raises:
            SettingsError: one of them is refused.
            MemoryError: there is no room for the table.
        """
        settings = VllmSettings.from_environment()
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._limit: int = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= self._limit <= _LONGEST:
            raise SettingsError(f"num_speculative_tokens must be from 1 to {_LONGEST}, not {self._limit}")
        self._length: int = model.max_model_len
        self._vocabulary: int = model.get_vocab_size()
        # vLLM takes the drafts of the first of the processes that share each layer.
        self._asked: bool = parallel.rank % parallel.tensor_parallel_size == 0
        self._now = 0  # a clock that is set back must not make what is learnt then look older than the rest
        self._sharing = None
        if not self._asked:
            return
        size, most = settings.megabytes * 1_000_000, vllm_config.scheduler_config.max_num_seqs
        if size // 2 < least_bytes(most):
            least = -(-2 * least_bytes(most) // 1_000_000)
            given = settings.megabytes
            raise SettingsError(f"{MEGABYTES} must be at least {least} for max_num_seqs {most}, not {given}")
        if quick_kernels() is None:
            log.warning("osd was installed without kernels that this CPU runs: recall drafts in Python, which is slow")
        made = backend()
        self._memory, self._drafting = made.memory(size // 2 // ENTRY_BYTES), made.drafting()
        self._readers = Readers(made, most, size // 2)
        if settings.redis_url is not None:
            try:
                from osd.vllm.sharing import Sharing
            except ModuleNotFoundError as error:
                raise SettingsError(f"{REDIS_URL} needs {error.name}: pip install 'osd[vllm]'") from None
            names = (model.model, model.revision, model.tokenizer, self._vocabulary)
            spoken = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
            self._sharing = Sharing(settings.redis_url, spoken, self._vocabulary, self._memory, made)

    def load_model(self, *given: Any, **options: Any) -> None:
        """There is none to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Learn what was sampled, and draft what may follow.

        Args:
            sampled_token_ids: of each row those that this step added; none while a prompt is being read.
            num_tokens_no_spec: [rows] tokens of each, with these.
            token_ids_cpu: [rows, max_model_len] the tokens themselves.
            slot_mappings: not needed.

        Returns:
            Of each row up to ``num_speculative_tokens`` tokens, from the next one on.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._asked:
            return drafts
        self._now = max(self._now, int(time.time()))
        self._readers.begin()
        owners: list[int] = []
        sought: list[Sought] = []
        lengths = num_tokens_no_spec[: len(drafts)].tolist()
        for place, (sampled, length) in enumerate(zip(sampled_token_ids, lengths, strict=True)):
            if not sampled:
                continue
            row, before = token_ids_cpu[place], length - len(sampled)
            reader = self._readers.of(place, row, before, len(sampled))
            if self._sharing is not None:
                self._sharing.say(reader.number, row[max(before - ORDERS, 0) : before].tolist(), sampled)
            self._memory.hear(reader.text, row[before:length], drafted=True, now=self._now)
            reader.end = length
            limit = min(self._limit, self._length - length - 1)
            if limit > 0:
                owners.append(place)
                sought.append(Sought(self._memory, reader.text, limit, 0.0))
        if sought:
            found = self._drafting.draft(sought, self._limit * len(sought), _FAINT, chains=True)
            for owner, token in zip(found.owners, found.tokens, strict=True):
                drafts[owners[owner]].append(token)
        return [self._known(draft) for draft in drafts]

    def close(self) -> None:
        """Stop sharing."""
        if self._sharing is not None:
            self._sharing.close()

    def _known(self, draft: list[int]) -> list[int]:
        """A draft up to a token that the model cannot read: prompts may hold such ids in the place of images."""
        if all(0 <= token < self._vocabulary for token in draft):
            return draft
        return draft[: next(place for place, token in enumerate(draft) if not 0 <= token < self._vocabulary)]
