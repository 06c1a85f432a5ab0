"""Proposer of vLLM that learns the decoded tokens and drafts tokens that followed the same context before."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from osd.recall.backends import ENTRY_BYTES, backend
from osd.recall.memory import ORDERS, DraftQuery
from osd.runtime.native import quick_kernels
from osd.vllm.cpu_sampling import correct_sampling
from osd.vllm.request_tracker import LEAST_ROOM, RequestTracker, least_bytes
from osd.vllm.settings import MEGABYTES, REDIS_URL, SettingsError, VllmSettings

log = logging.getLogger(__name__)

_LEAST_CHANCE = 0.02
"""Smallest probability of a draft token."""
_LONGEST = LEAST_ROOM // 4


class RecallProposer:
    """Proposer that drafts the ``num_speculative_tokens`` most probable tokens, for the interface of vLLM 0.32.

    vLLM passes sampled tokens without probabilities, so each sampled token counts as the whole distribution. All
    requests share the table; each request has its own text.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's configuration, and the settings of osd from the environment.

        Raises:
            SettingsError: a setting is invalid.
            MemoryError: there is not enough memory for the table.
        """
        correct_sampling()
        settings = VllmSettings.from_environment()
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._limit: int = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= self._limit <= _LONGEST:
            raise SettingsError(f"num_speculative_tokens must be from 1 to {_LONGEST}, not {self._limit}")
        self._length: int = model.max_model_len
        self._vocabulary: int = model.get_vocab_size()
        # vLLM uses the drafts of the first process of each tensor-parallel group.
        self._is_first: bool = parallel.rank % parallel.tensor_parallel_size == 0
        self._now = 0  # never decreases: after a clock change, new entries must not look older than previous ones
        self._sharing = None
        if not self._is_first:
            return
        size, most = settings.megabytes * 1_000_000, vllm_config.scheduler_config.max_num_seqs
        if size // 2 < least_bytes(most):
            least = -(-2 * least_bytes(most) // 1_000_000)
            given = settings.megabytes
            raise SettingsError(f"{MEGABYTES} must be at least {least} for max_num_seqs {most}, not {given}")
        if quick_kernels() is None:
            log.warning("osd was installed without kernels for this CPU: recall drafts in Python, which is slow")
        recall = backend()
        self._memory, self._drafting = recall.memory(size // 2 // ENTRY_BYTES), recall.drafting()
        self._requests = RequestTracker(recall, most, size // 2)
        if settings.redis_url is not None:
            try:
                from osd.vllm.sharing import Sharing
            except ModuleNotFoundError as error:
                raise SettingsError(f"{REDIS_URL} needs {error.name}: pip install 'osd-llm[vllm]'") from None
            names = (model.model, model.revision, model.tokenizer, self._vocabulary)
            model_hash = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
            self._sharing = Sharing(settings.redis_url, model_hash, self._vocabulary, self._memory, recall)

    def load_model(self, *args: Any, **options: Any) -> None:
        """Do nothing, because recall has no model; vLLM requires this method."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Learn the sampled tokens and draft the following tokens.

        Args:
            sampled_token_ids: tokens that this step added to each row; empty during prefill.
            num_tokens_no_spec: [rows] number of tokens of each row, sampled tokens included.
            token_ids_cpu: [rows, max_model_len] token ids.
            slot_mappings: not used.

        Returns:
            Up to ``num_speculative_tokens`` draft tokens for each row.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._is_first:
            return drafts
        self._now = max(self._now, int(time.time()))
        self._requests.begin()
        owners: list[int] = []
        queries: list[DraftQuery] = []
        lengths = num_tokens_no_spec[: len(drafts)].tolist()
        for index, (sampled, length) in enumerate(zip(sampled_token_ids, lengths, strict=True)):
            if not sampled:
                continue
            row, before = token_ids_cpu[index], length - len(sampled)
            request = self._requests.of(index, row, before, len(sampled))
            tokens = row[before:length]
            if self._sharing is None:
                self._memory.learn_tokens(request.text, tokens, drafted=True, now=self._now)
            else:
                context = row[max(before - ORDERS, 0) : before].tolist()
                self._sharing.learn(request.number, request.text, context, tokens, self._now)
            request.end = length
            limit = min(self._limit, self._length - length - 1)
            if limit > 0:
                owners.append(index)
                queries.append(DraftQuery(self._memory, request.text, limit, 0.0))
        if queries:
            nodes = self._drafting.draft(queries, self._limit * len(queries), _LEAST_CHANCE, chains=True)
            for owner, token in zip(nodes.owners, nodes.tokens, strict=True):
                drafts[owners[owner]].append(token)
        return [self._cut_at_unknown(draft) for draft in drafts]

    def close(self) -> None:
        """Stop sharing."""
        if self._sharing is not None:
            self._sharing.close()

    def _cut_at_unknown(self, draft: list[int]) -> list[int]:
        """Return the draft up to the first id outside the vocabulary; prompts have such ids in place of images."""
        if all(0 <= token < self._vocabulary for token in draft):
            return draft
        return draft[: next(index for index, token in enumerate(draft) if not 0 <= token < self._vocabulary)]
