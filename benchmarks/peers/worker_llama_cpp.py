"""llama.cpp on the target's GGUF file, plain or with prompt lookup."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import worker
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class LlamaCpp:
    """Engine for one sequence: ``Llama`` of the bindings does not decode several at a time."""

    def __init__(self, gguf: str, context: int, threads: int, lookup: int = 0) -> None:
        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._llama = llama_cpp.Llama(
            gguf,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            verbose=False,
        )

    def decode(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the tokens after the prompt, which is read again each time."""
        if len(prompts) > 1:
            raise NotImplementedError("the bindings decode one sequence at a time")
        self._llama.reset()
        return [list(islice(self._llama.generate(prompts[0], temp=0.0), tokens))]


if __name__ == "__main__":
    worker.serve(LlamaCpp)
