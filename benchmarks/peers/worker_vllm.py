"""vLLM's build for CPUs: plain, with n-grams of the prompt, with a draft model, or with recall."""

from __future__ import annotations

from typing import Any

import vllm
import worker
from vllm import LLM, SamplingParams


class Vllm:
    """Target as safetensors, with prompts as token ids."""

    def __init__(
        self,
        target: str,
        dtype: str,
        context: int,
        streams: int,
        speculative: dict[str, Any] | None = None,
        counted: bool = False,
    ) -> None:
        self.version = f"vllm {vllm.__version__}"
        options: dict[str, Any] = {} if speculative is None else {"speculative_config": speculative}
        self._llm = LLM(
            target,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=streams,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,  # prompts may be repeated
            disable_log_stats=not counted,
            **options,
        )

    def decode(self, prompts: list[list[int]], tokens: int | list[int]) -> list[list[int]]:
        """Return the tokens after all prompts, decoded together; ``tokens`` is one length or a length per prompt."""
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        sampling = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(inputs, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def counts(self) -> dict[str, int]:
        """Return the draft tokens and the accepted tokens since the start; needs ``counted``."""
        metrics = {metric.name: metric for metric in self._llm.get_metrics()}
        names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
        counters = {key: metrics.get(f"vllm:spec_decode_{name}") for key, name in names.items()}
        return {key: 0 if counter is None else int(counter.value) for key, counter in counters.items()}


if __name__ == "__main__":
    worker.serve(Vllm)
