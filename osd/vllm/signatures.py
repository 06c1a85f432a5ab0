"""Check of the parts of vLLM that capture relies on, because vLLM changes them without notice."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

Signatures = Mapping[str, tuple[str, ...]]
"""First parameters of functions, or some fields of records, by ``module:name``."""

_REQUESTS: Signatures = {
    "vllm.v1.core.sched.output:NewRequestData": (
        *("req_id", "prompt_token_ids", "mm_features", "sampling_params", "num_computed_tokens"),
        *("lora_request", "prompt_embeds"),
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids"),
    ),
    "vllm.sampling_params:SamplingParams": (
        *("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "extra_args"),
    ),
    "vllm.sampling_params:SamplingParams.eos_token_id": (),
    "vllm.v1.core.sched.output:GrammarOutput": ("structured_output_request_ids",),
}

FIRST_RUNNER, SECOND_RUNNER = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
"""Modules of the two model runners."""

V1: Signatures = {
    **_REQUESTS,
    f"{FIRST_RUNNER}:ExecuteModelState": (
        *("scheduler_output", "logits", "spec_decode_metadata", "aux_hidden_states"),
    ),
    f"{FIRST_RUNNER}:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    f"{FIRST_RUNNER}:GPUModelRunner.sample_tokens": ("self", "grammar_output"),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ("draft_token_ids", "num_draft_tokens"),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "sampled_token_ids"),
}
"""Signatures of the first model runner."""

_AUXILIARY = "vllm.distributed.aux_output_connector.worker"
V2: Signatures = {
    **_REQUESTS,
    f"{SECOND_RUNNER}:ExecuteModelState": ("input_batch", "aux_hidden_states"),
    f"{SECOND_RUNNER}:GPUModelRunner.execute_model": ("self", "scheduler_output"),
    f"{SECOND_RUNNER}:GPUModelRunner.sample_tokens": ("self", "grammar_output"),
    f"{SECOND_RUNNER}:GPUModelRunner.sample": ("self", "hidden_states", "input_batch", "grammar_output"),
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": ("sampled_token_ids", "num_sampled", "num_rejected"),
    "vllm.v1.worker.gpu.input_batch:InputBatch": (
        *("req_ids", "num_scheduled_tokens", "num_draft_tokens_per_req", "query_start_loc_np", "input_ids"),
        *("positions", "logits_indices", "cu_num_logits_np"),
    ),
    "vllm.v1.worker.gpu.async_utils:AsyncOutput": ("model_runner_output", "sampler_output", "pending_aux_output"),
    f"{_AUXILIARY}:AuxOutputWorkerConnector.begin_step": ("self", "metadata"),
    f"{_AUXILIARY}:AuxOutputWorkerConnector.prepare_output": ("self", "input_batch"),
    f"{_AUXILIARY}:PendingAuxOutput.enqueue_cpu_copy": ("self", "num_sampled", "num_rejected"),
    f"{_AUXILIARY}:PendingAuxOutput.process_output": ("self",),
    "vllm.v1.core.sched.output:GrammarOutput": ("structured_output_request_ids", "num_acceptable_drafts"),
}
"""Signatures of the second model runner."""


def missing(signatures: Signatures) -> str | None:
    """Return the first part that this vLLM lacks or has with other parameters, or None if all are as expected."""
    for place, names in signatures.items():
        module, _, path = place.partition(":")
        try:
            part: Any = importlib.import_module(module)
            for name in path.split("."):
                part = getattr(part, name)
        except (ImportError, AttributeError):
            return place
        if names and not _has(part, names):
            return place
    return None


def _has(part: Any, names: tuple[str, ...]) -> bool:
    """Return whether a record or a constructor has the names, or whether a function begins with these parameters."""
    for attribute in ("_fields", "__struct_fields__", "__dataclass_fields__"):
        if fields := getattr(part, attribute, None):
            return set(names) <= set(fields)
    try:
        parameters = tuple(inspect.signature(part).parameters)
    except (TypeError, ValueError):
        return False
    return set(names) <= set(parameters) if inspect.isclass(part) else parameters[: len(names)] == names
