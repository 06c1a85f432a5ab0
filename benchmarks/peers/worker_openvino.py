"""OpenVINO GenAI on the target's GGUF file, plain or with a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import worker


class OpenVino:
    """Target on the CPU device; GenAI reads the GGUF file."""

    def __init__(self, gguf: str, threads: int, draft: str | None = None, depth: int = 0) -> None:
        self.version = f"openvino-genai {genai.__version__}"
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if draft is not None:
            # Only the target may be GGUF. Reading the draft model once writes it in OpenVINO's format to its folder.
            genai.LLMPipeline(draft, "CPU", enable_save_ov_model=True)
            folder = str(Path(draft).parent)
            options["draft_model"] = genai.draft_model(folder, "CPU", INFERENCE_NUM_THREADS=threads)
        self._pipeline, self._depth = genai.LLMPipeline(gguf, "CPU", **options), depth

    def decode(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the tokens after each prompt; prompts are padded on the left."""
        width = max(map(len, prompts))
        ids = np.array([[0] * (width - len(prompt)) + prompt for prompt in prompts], dtype=np.int64)
        mask = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=np.int64)
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        if self._depth:
            config.num_assistant_tokens = self._depth
        answer = self._pipeline.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(mask)), config)
        return [list(map(int, row)) for row in answer.tokens]


if __name__ == "__main__":
    worker.serve(OpenVino)
