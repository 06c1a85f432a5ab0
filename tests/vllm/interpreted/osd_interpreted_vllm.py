"""Plugin of vLLM for its second model runner on a CPU, with asynchronous scheduling as on a GPU."""

from typing import Any

import torch


def run_like_on_a_gpu() -> None:
    """Keep asynchronous scheduling, and replace a kernel that Triton's interpreter cannot run."""
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker.gpu import structured_outputs  # pyright: ignore[reportMissingImports]

    update = CpuPlatform.check_and_update_config.__func__

    def update_all_but_scheduling(cls: Any, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        chosen = scheduler.async_scheduling
        update(cls, vllm_config)
        scheduler.async_scheduling = chosen
        print(f"asynchronous scheduling: {chosen}", flush=True)

    def apply_grammar_bitmask(worker: Any, logits: Any, batch: Any, keys: list[str], masks: Any) -> None:
        """Forbid the tokens that a grammar excludes, in place."""
        first, drafts = batch.cu_num_logits_np, batch.num_draft_tokens_per_req
        bonus, stride = worker.num_bonus_tokens, worker.mask_stride
        places = structured_outputs._build_grammar_mapping(batch.req_ids, keys, first, drafts, bonus, stride)
        tokens = torch.arange(logits.shape[1])
        for place, mask in zip(places, torch.from_numpy(masks), strict=True):
            request, position = divmod(place, stride)
            if position < first[request + 1] - first[request]:
                excluded = (mask[tokens // 32] >> (tokens % 32)) & 1 == 0
                logits[int(first[request]) + position, excluded] = -torch.inf

    CpuPlatform.check_and_update_config = classmethod(update_all_but_scheduling)
    structured_outputs.StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask
