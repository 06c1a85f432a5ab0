"""vLLM's build for CPUs: plain, with n-grams of the prompt, or with a draft model."""

from __future__ import annotations

from typing import Any

import vllm
import worker
from vllm import LLM, SamplingParams


class Vllm:
    """The target as safetensors, with prompts as token ids."""

    def __init__(
        self, target: str, dtype: str, context: int, streams: int, speculative: dict[str, Any] | None = None
    ) -> None:
        self.version = f"vllm {vllm.__version__}"
        more: dict[str, Any] = {} if speculative is None else {"speculative_config": speculative}
        self._llm = LLM(
            target,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=streams,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,  # the same prompt may come again
            disable_log_stats=True,
            **more,
        )

    def decode(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """All prompts at once."""
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(asked, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


if __name__ == "__main__":
    worker.serve(Vllm)
