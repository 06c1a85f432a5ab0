"""transformers' ``generate()``: plain, assisted by a small model, or with prompt lookup."""

from __future__ import annotations

from typing import Any

import torch
import transformers
import worker


class TransformersPeer:
    """Target loaded by ``AutoModelForCausalLM``."""

    def __init__(self, target: str, dtype: str, threads: int, draft: str | None = None, lookup: int = 0) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._model = self._load(target, dtype)
        self._options: dict[str, Any] = {}
        if draft is not None:
            self._options["assistant_model"] = self._load(draft, dtype)
        if lookup:
            self._options["prompt_lookup_num_tokens"] = lookup

    @staticmethod
    def _load(directory: str, dtype: str) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        return model.eval()

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the tokens after each prompt; prompts are padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **self._options
        )
        return output[:, width:].tolist()


if __name__ == "__main__":
    worker.serve(TransformersPeer)
